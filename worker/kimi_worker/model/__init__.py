"""Kimi-K3: configuration, checkpoint and the forward pass. Importing this package does not import torch."""
