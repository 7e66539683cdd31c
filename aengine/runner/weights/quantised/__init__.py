"""Formats of quantised matrices: each reads its description and its tensors of a checkpoint, and multiplies them."""
