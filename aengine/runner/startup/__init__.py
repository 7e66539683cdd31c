"""Start-up of a runner from a checkpoint: load, profile, allocate, warm up, capture."""
