"""The bridge between host and workers. It knows nothing of models."""
