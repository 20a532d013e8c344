"""Ranks, their collectives and the exchange of tokens among experts. Importing this package does not import torch."""
