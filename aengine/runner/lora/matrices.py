"""`SlotMatrices`: of all slots what their adapters add to a weight, in memory that stays where it is.

       slot 0          slot 1
a     ┌ q: [rank, in] ┬ ...      as many rows as the largest rank; zeros where an adapter has fewer, or lacks the
      │ k: [rank, in] │          matrix
      └ v: [rank, in] ┴ ...
b     [out, rank]       ...      that of each part below each other, times the adapter's scale
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.lora import DOWN, GATE_UP, name_of_expert
from ...kernels.lora import AdapterMatrices
from ..distributed.shares import Share, part_of, sizes

_MOST_ALONE = 1 << 15  # numbers that torch computes without other threads
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the layer that a matrix is in, by its name; None: none."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def in_layer(name: str, index: int) -> str:
    """Return the name of the same matrix in another layer."""
    return _LAYER.sub(f".layers.{index}.", name, count=1)


class Factors(NamedTuple):
    """What an adapter has for one matrix of the checkpoint, whole, in any dtype of numbers; or for those of all
    experts, one behind the other."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank]
    scale: float

    def of(self, expert: int, rows: slice) -> Factors:
        """Return those of one expert, for some of its output features."""
        return Factors(self.a[expert], self.b[expert, rows], self.scale)


Read: TypeAlias = Callable[[str], Factors | None]
"""Returns what an adapter has of a matrix, by its name."""
Copy: TypeAlias = Callable[[Tensor, Tensor], None]
"""Copies to the device: (to, from)."""


class SlotMatrices:
    """Those of one weight, which is made of the checkpoint's matrices ``parts``: name and output features of each."""

    def __init__(
        self,
        parts: Mapping[str, Sequence[Share]],
        columns: Sequence[Share],
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        count: int = 1,
    ) -> None:
        """``count``: experts, each of which has such a weight."""
        self._parts, self._columns, self._rank = parts, columns, rank
        own = tuple(sizes(rows)[0] for rows in parts.values())
        self._count = count
        starts = torch.tensor([sum(own[:i]) for i in range(len(own) + 1)], dtype=torch.int32, device=device)
        self.tensors = AdapterMatrices(
            torch.zeros(num_slots * count, len(own) * rank, sizes(columns)[0], dtype=dtype, device=device),
            torch.zeros(num_slots * count, sum(own), rank, dtype=dtype, device=device),
            starts,
            own,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Matrices`: of each part, on all ranks together."""
        return {name: (sizes(rows)[1], sizes(self._columns)[1]) for name, rows in self._parts.items()}

    def fill(self, slot: int, read: Read, copy: Copy) -> None:
        """Set a slot."""
        own = slice(slot * self._count, (slot + 1) * self._count)
        a, b, first = self.tensors.a[own], self.tensors.b[own], 0
        new_a, new_b = _zeros(a.shape, a.dtype), _zeros(b.shape, b.dtype)
        for i, (rows, found) in enumerate(zip(self._parts.values(), self._factors(read), strict=True)):
            size = self.tensors.sizes[i]
            for place, one in enumerate(found):
                if one is None:
                    continue
                of_rows, of_columns = part_of(rows, 0, len(one.b)), part_of(self._columns, 1, one.a.shape[1])
                to_a, to_b = new_a[place, i * self._rank :], new_b[place, first : first + size]
                _put(to_a, one.a if of_columns is None else of_columns.of(one.a), 1.0)
                _put(to_b, one.b if of_rows is None else of_rows.of(one.b), one.scale)
            first += size
        copy(a.flatten(0, 1), new_a.flatten(0, 1))
        copy(b.flatten(0, 1), new_b.flatten(0, 1))

    def _factors(self, read: Read) -> list[list[Factors | None]]:
        """Return what the adapter has for each part, and of that for each expert."""
        return [[read(name)] for name in self._parts]


class ExpertMatrices(SlotMatrices):
    """Those of a weight of experts, each of which is made of ``parts``: this rank's experts of slot 0, then of 1, ...

    An adapter has factors for each part of each expert, or stacked for all experts, for gate and up as one matrix, as
    transformers has them since its version 5; gate and up have the same A then.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[Share]],
        columns: Sequence[Share],
        experts: Share,
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = {name.replace(".experts.", ".experts.*."): rows for name, rows in parts.items()}
        super().__init__(parts, columns, num_slots, rank, dtype, device, experts.size)
        self._experts = experts
        first = next(iter(parts))
        is_gate_up = len(parts) > 1 or first.endswith(f".{GATE_UP}")
        module = first.partition(".*.")[0].replace(".block_sparse_moe.", ".mlp.")  # as transformers has Mixtral's now
        self._stack = f"{module}.{GATE_UP if is_gate_up else DOWN}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        count, columns = self._experts.total, sizes(self._columns)[1]
        rows = {name: sizes(own)[1] for name, own in self._parts.items()}
        return {name: (size, columns, count) for name, size in (rows | {self._stack: sum(rows.values())}).items()}

    def _factors(self, read: Read) -> list[list[Factors | None]]:
        experts = range(*self._experts.range)
        each = [[read(name_of_expert(name, expert)) for expert in experts] for name in self._parts]
        whole = read(self._stack)
        if whole is None:
            return each
        ends = list(accumulate(sizes(rows)[1] for rows in self._parts.values()))
        rows = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        return [[whole.of(expert, own) for expert in experts] for own in rows]


def row_pieces(tensor: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix few at a time: of more numbers torch would ask other threads, on which steps run."""
    rows = max(1, _MOST_ALONE // max(1, tensor.shape[1]))
    for begin in range(0, len(tensor), rows):
        yield slice(begin, begin + rows)


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    content = np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)  # memory of zeros, which nobody has to write
    return torch.from_numpy(content).view(dtype).view(*shape)


def _put(to: Tensor, new: Tensor, scale: float) -> None:
    """Write ``scale`` times a matrix into the first rows and columns of another."""
    for rows in row_pieces(new):
        own = new[rows]
        to[: len(new), : new.shape[1]][rows] = own if scale == 1.0 else own.float() * scale
