"""Routes requests to a pair of lanes, one that prefills and one that decodes. Never imports torch."""
