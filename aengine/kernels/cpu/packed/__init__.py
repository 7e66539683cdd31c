"""Packed matrices: how they lie in memory, how they are made, and the kernels that multiply them."""
