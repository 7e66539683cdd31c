"""Tensors that a model's layers request of its checkpoint: by name, each with its destinations.

A model is built over a `WeightScope`, a view of the checkpoint's names below a prefix. Each layer that has weights says
there what it wants; the loader then finds all the places, in the order in which the model was built, and fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .formats import WeightFormats
from .weight import WeightFormat

__all__ = ["CheckpointNames", "Place", "WeightScope"]


class Place(NamedTuple):
    """Destination of a tensor of the checkpoint.

    A floating ``dtype`` of 16 or 32 bits means numbers: the checkpoint may hold them in any such format, and they come
    in ``dtype``, but on a CPU in the checkpoint's. Any other means codes, which are stored so and come as they are.
    """

    name: str  # in the checkpoint, in transformers' spelling
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_parameters: int  # of the model, that the tensor stands for
    put: Callable[[Tensor], None]  # takes the tensor, on the model's device; from any thread


class CheckpointNames(Protocol):
    """A model's rules by which it requests tensors of those in a checkpoint, where that depends on their names."""

    def choose(self, stored: Mapping[str, tuple[int, ...]] | None) -> None:
        """Request them. ``stored``: names and shapes of all; None: the checkpoint has what the model asks for."""

    def finish(self, device: torch.device) -> None:
        """All of them have come; whatever else the model has goes to ``device``. Raises ModelLoadError."""


class WeightScope:
    """The names below a prefix. All scopes of a model share ``places``, by name; a tied table has two."""

    def __init__(self, formats: WeightFormats, prefix: str = "", places: dict[str, list[Place]] | None = None) -> None:
        self.formats = formats
        self.names: CheckpointNames | None = None  # of the model's outermost scope
        self.places: dict[str, list[Place]] = {} if places is None else places
        self._prefix = prefix

    def at(self, name: str) -> WeightScope:
        """The scope of the names below ``name``."""
        return WeightScope(self.formats, f"{self._prefix}{name}.", self.places)

    def format_of(self, names: Sequence[str]) -> WeightFormat:
        """The format of the matrices of these names, which become one weight. Raises ModelLoadError, see there.

        A matrix that is wanted already, as a table of embeddings, is plain.
        """
        full = [self._prefix + name for name in names]
        return self.formats.plain if f"{full[0]}.weight" in self.places else self.formats.of(full)

    def want(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        put: Callable[[Tensor], None],
        num_parameters: int | None = None,
    ) -> None:
        """Request the tensor ``name``, which the loader passes to ``put``. ``num_parameters``: None: its elements."""
        count = prod(shape) if num_parameters is None else num_parameters
        place = Place(self._prefix + name, shape, dtype, count, put)
        self.places.setdefault(place.name, []).append(place)
