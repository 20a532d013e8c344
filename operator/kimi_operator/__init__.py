"""Reconciles KimiDeployment resources into running Kimi-K3 services on AMD GPU nodes."""
