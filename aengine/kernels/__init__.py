"""One op a file: a wrapper that checks, the torch implementation, which is the reference, and its Triton kernel."""
