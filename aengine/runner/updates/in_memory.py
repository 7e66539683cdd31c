"""Tensors in memory as a file of safetensors, so that what reads such a file takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ..weights.sources.reading import Named, Target
from ..weights.sources.safetensors_source import DTYPES, jobs_of

NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class TensorFile:
    """One tensor, with the methods of `safetensors.safe_open` that the reader calls."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, name: str) -> Tensor:
        return self._tensor

    def get_slice(self, name: str) -> TensorFile:
        return self

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return NAMES_OF_DTYPES[self._tensor.dtype]

    def __getitem__(self, key: Any) -> Tensor:
        return self._tensor[key]


class Fitting:
    """Brings tensors by the checkpoint's names to the places of a model."""

    def __init__(self, places: Mapping[str, Any], device: torch.device) -> None:
        """``places``: of the model's `WeightScope`."""
        self._places = places
        self._device = device

    @cached_property
    def _firsts(self) -> dict[str, Any]:
        return {name: first for name, (first, *_) in self._places.items()}

    def check(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
        """Return the model's names of what a tensor of this name holds; none if the model has no place for it. Raises
        ModelLoadError: it is of another dtype than its place takes."""
        target = Target(self._firsts, torch.device("meta"), where="the update", has_numbers=False)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        return [named.name for named in _read(name, tensor, target) if self._fits(named)]

    def _fits(self, named: Named) -> bool:
        if named.tensor is None:
            return False
        place = self._firsts[named.name]
        if named.shape != place.shape and not (place.shape == () and named.tensor.numel() == 1):
            raise ModelLoadError(
                f"{named.name} has the shape {list(named.shape)}, and in this model it is {list(place.shape)}"
            )
        return True

    def put(self, name: str, tensor: Tensor) -> None:
        """Hand a whole tensor, which was checked, over to its places. Raises ModelLoadError as a load does."""
        target = Target(self._firsts, self._device, where="the update")
        for named in _read(name, tensor, target):
            assert named.tensor is not None
            target.put(self._places[named.name], named.tensor)


def _read(name: str, tensor: Tensor, target: Target) -> Iterator[Named]:
    for job in jobs_of(Path("the update"), TensorFile(tensor), name, target):
        yield job()
