"""The host's side of the workers: their start, their supervision, and their answers."""
