"""The checkpoint's tensors: reading, checking, and placing them."""
