"""The engine of a rank: caches, the step and sampling. Importing this package does not import torch."""
