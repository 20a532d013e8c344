"""Move a request's cache from a prefill lane into a decode lane; `session.py` tells the story."""
