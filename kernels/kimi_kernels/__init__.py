"""Reference and Triton operators of Kimi-K3 for gfx942."""
