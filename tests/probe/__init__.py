"""One probe, from the requests to a verdict."""
