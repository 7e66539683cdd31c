"""From a checkpoint to a runner that is ready: load, profile, allocate, warm up, capture."""
