"""Random weights, for models of which there is only the config."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..scope import Place
from ..weight import RANDOM_WEIGHT
from .reading import NUMBERS, Source, Target

CHUNK = 2**21
"""Numbers made at once on a GPU: 8 MiB of float32, for weights of any format."""


def make_random(target: Target, seed: int) -> Source:
    """Make random weights: those of norms near one, others small, so that activations keep their size through any
    number of layers. Codes have all their values, and scales make them as small."""
    is_cpu = target.device.type == "cpu"
    generator = _generator(target.device, seed)
    total = sum(
        (4 if is_cpu and place.dtype in NUMBERS else place.dtype.itemsize) * prod(place.shape)
        for place in target.places.values()
    )
    # The whole tensor is made even if a part is wanted: the model is the same for any number of ranks.
    tensors = (
        target.named(place.name, _make(place, generator, target.device), keep=False) for place in target.places.values()
    )
    return Source(tensors, total)


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _make(place: Place, generator: torch.Generator, device: torch.device) -> Tensor:
    if callable(place.drawn):
        return place.drawn().to(device)
    if place.drawn is not None:  # rounded, for checkpoints have scales in 16 bits, and so they are kept
        return _uniform(place, *place.drawn, generator, device).bfloat16().to(place.dtype)
    if place.dtype in NUMBERS:
        return (_on_cpu if device.type == "cpu" else _on_gpu)(place, generator, device)
    if place.dtype.is_floating_point:
        codes = torch.finfo(place.dtype)
        return _uniform(place, codes.min, codes.max, generator, device)
    tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
    tensor.view(-1).view(torch.uint8).random_(0, 256, generator=generator)
    return tensor


def _on_cpu(place: Place, generator: torch.Generator, device: torch.device) -> Tensor:
    tensor = torch.empty(place.shape).uniform_(-RANDOM_WEIGHT, RANDOM_WEIGHT, generator=generator)
    return tensor.add_(1.0) if "norm" in place.name else tensor


def _on_gpu(place: Place, generator: torch.Generator, device: torch.device) -> Tensor:
    """Make the numbers in float32, whatever the format, so that they are alike in all up to rounding."""
    middle = 1.0 if "norm" in place.name else 0.0
    return _uniform(place, middle - RANDOM_WEIGHT, middle + RANDOM_WEIGHT, generator, device)


def _uniform(place: Place, least: float, most: float, generator: torch.Generator, device: torch.device) -> Tensor:
    tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
    for chunk in tensor.view(-1).split(CHUNK):
        numbers = torch.empty(chunk.shape, device=device)
        chunk.copy_(numbers.uniform_(least, most, generator=generator))
    return tensor
