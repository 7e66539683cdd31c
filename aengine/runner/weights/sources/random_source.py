"""Random weights, for models of which there is only the config."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..scope import Place
from .reading import Source, Target

__all__ = ["make_random"]

CHUNK = 2**21
"""Numbers made at once on a GPU: 8 MiB of float32, for weights of any format."""


def make_random(target: Target, seed: int) -> Source:
    """Make random weights: those of norms near one, others small, so that activations keep their size through any
    number of layers."""
    is_cpu = target.device.type == "cpu"
    generator = _generator(target.device, seed)
    total = sum((4 if is_cpu else place.dtype.itemsize) * prod(place.shape) for place in target.places.values())
    make = _on_cpu if is_cpu else _on_gpu
    # The whole tensor is made even if a part is wanted: the model is the same for any number of ranks.
    tensors = (
        target.named(place.name, make(place, generator, target.device), keep=False) for place in target.places.values()
    )
    return Source(tensors, total)


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _on_cpu(place: Place, generator: torch.Generator, device: torch.device) -> Tensor:
    tensor = torch.empty(place.shape).uniform_(-0.04, 0.04, generator=generator)
    return tensor.add_(1.0) if "norm" in place.name else tensor


def _on_gpu(place: Place, generator: torch.Generator, device: torch.device) -> Tensor:
    """Make the numbers in float32, whatever the format, so that they are alike in all up to rounding."""
    tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
    middle = 1.0 if "norm" in place.name else 0.0
    for chunk in tensor.view(-1).split(CHUNK):
        numbers = torch.empty(chunk.shape, device=device)
        chunk.copy_(numbers.uniform_(middle - 0.04, middle + 0.04, generator=generator))
    return tensor
