"""The ranks that share each layer of a model: what they do together, on CPUs and on GPUs."""
