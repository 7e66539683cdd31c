"""The bridge between host and workers. It is independent of models."""
