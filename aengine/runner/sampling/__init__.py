"""From logits to ids: the sampler, its features, and the memory of bitmasks."""
