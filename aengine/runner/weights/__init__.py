"""Weights: the formats in which they are kept and multiply, and how a checkpoint is loaded into them."""
