"""CUDA graphs of decode steps and of mixed batches."""
