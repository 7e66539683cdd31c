"""LoRA adapters of requests, on the device: which row has which, their matrices, and how these are filled."""
