"""The device half's centre: persistent rows, the gathered batch, the model, the sampler."""
