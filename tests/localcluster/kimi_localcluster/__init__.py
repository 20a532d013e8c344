"""A real multi-node Kubernetes on one machine, without Docker, for demos and tests."""
