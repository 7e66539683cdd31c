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
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.lora import DOWN, GATE_UP, name_of_expert
from ...errors import ModelLoadError
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
    ) -> None:
        self._parts, self._columns, self._rank = parts, columns, rank
        own = tuple(sizes(rows)[0] for rows in parts.values())
        starts = torch.tensor([sum(own[:i]) for i in range(len(own) + 1)], dtype=torch.int32, device=device)
        self.tensors = AdapterMatrices(
            torch.zeros(num_slots, len(own) * rank, sizes(columns)[0], dtype=dtype, device=device),
            torch.zeros(num_slots, sum(own), rank, dtype=dtype, device=device),
            starts,
            own,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Matrices`: of each part, on all ranks together."""
        return {name: (sizes(rows)[1], sizes(self._columns)[1]) for name, rows in self._parts.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors[:2])

    def fill(self, slot: int, read: Read, copy: Copy) -> None:
        """Set a slot."""
        a, b, first = self.tensors.a[slot], self.tensors.b[slot], 0
        for i, (name, rows) in enumerate(self._parts.items()):
            size, found = self.tensors.sizes[i], read(name)
            new_a, new_b = _zeros(self._rank, a.shape[1], a.dtype), _zeros(size, self._rank, b.dtype)
            if found is not None:
                of_rows, of_columns = part_of(rows, 0, len(found.b)), part_of(self._columns, 1, found.a.shape[1])
                _put(new_a, found.a if of_columns is None else of_columns.of(found.a), 1.0)
                _put(new_b, found.b if of_rows is None else of_rows.of(found.b), found.scale)
            copy(a[i * self._rank : (i + 1) * self._rank], new_a)
            copy(b[first : first + size], new_b)
            first += size


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
        super().__init__(parts, columns, num_slots * experts.size, rank, dtype, device)
        self._experts = experts
        first = next(iter(parts))
        is_gate_up = len(parts) > 1 or first.endswith(f".{GATE_UP}")
        module = first.rpartition(".")[0].replace(".block_sparse_moe.", ".mlp.")  # as transformers has Mixtral's now
        self._stack = f"{module}.{GATE_UP if is_gate_up else DOWN}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        count, columns = self._experts.total, sizes(self._columns)[1]
        rows = {name: sizes(own)[1] for name, own in self._parts.items()}
        return {name: (size, columns, count) for name, size in (rows | {self._stack: sum(rows.values())}).items()}

    def fill(self, slot: int, read: Read, copy: Copy) -> None:
        whole, first = read(self._stack), 0
        rows: dict[str, slice] = {}
        for name, (count, *_) in super().shapes.items():
            rows[name] = slice(first, first + count)
            first += count
        for index, expert in enumerate(range(*self._experts.range)):

            def of_expert(name: str, expert: int = expert) -> Factors | None:
                own = read(name_of_expert(name, expert))
                if own is not None and whole is not None:
                    raise ModelLoadError(f"it changes {name:.200} twice, by two of its names")
                return own if whole is None else whole.of(expert, rows[name])

            super().fill(slot * self._experts.size + index, of_expert, copy)


def row_pieces(tensor: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix few at a time: of more numbers torch would ask other threads, on which steps run."""
    rows = max(1, _MOST_ALONE // max(1, tensor.shape[1]))
    for begin in range(0, len(tensor), rows):
        yield slice(begin, begin + rows)


def _zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    content = np.zeros(rows * columns * dtype.itemsize, dtype=np.uint8)  # memory of zeros, which nobody has to write
    return torch.from_numpy(content).view(dtype).view(rows, columns)


def _put(to: Tensor, new: Tensor, scale: float) -> None:
    """Write ``scale`` times a matrix into the first rows and columns of another."""
    for rows in row_pieces(new):
        own = new[rows]
        to[: len(new), : new.shape[1]][rows] = own if scale == 1.0 else own.float() * scale
