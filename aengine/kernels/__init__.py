"""One op a file: a checked wrapper, a torch body that is also the reference, and the seat of a Triton body."""
