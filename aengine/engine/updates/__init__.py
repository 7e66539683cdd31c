"""New weights of a trainer for the engine's workers: where they come from, how they get there, and their versions."""
