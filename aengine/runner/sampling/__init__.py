"""Sampling of ids from logits: the sampler, its features, and the memory of bitmasks."""
