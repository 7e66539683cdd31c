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

import torch
from torch import Tensor

from ...checkpoint.lora import DOWN, GATE_UP, LoraMatrix, name_of_expert
from ...kernels.lora import AdapterMatrices
from ..distributed.shares import Share, sizes

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the layer that a matrix is in, by its name; None: none."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def in_layer(name: str, index: int) -> str:
    """Return the name of the same matrix in another layer."""
    return _LAYER.sub(f".layers.{index}.", name, count=1)


class Target(NamedTuple):
    """A place in a slot for a part of a tensor of the adapter's file: of its units from ``begin`` on, as many as ``to``
    has, what ``last`` says."""

    name: str
    to: Tensor  # [units, ...]
    begin: int
    unit: tuple[int, ...]  # shape of a unit, which is a row of the tensor, or several
    last: slice  # what is wanted of the last dimension
    scale: float


Find: TypeAlias = Callable[[str], LoraMatrix | None]
"""Returns what an adapter has of a matrix, by its name."""


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

    @property
    def names(self) -> str:
        return ", ".join(self._parts)

    def of(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return A and B of a slot: of each of its experts, [experts, rows, columns]."""
        own = slice(slot * self._count, (slot + 1) * self._count)
        return self.tensors.a[own], self.tensors.b[own]

    def targets(self, slot: int, find: Find) -> Iterator[Target]:
        """Yield the places of all that the adapter has for this weight, of which no two have a number in common."""
        a, b = self.of(slot)
        for i, name in enumerate(self._parts):
            if (own := find(name)) is not None:
                yield from self._of_part(i, own, a, b)

    def _of_part(
        self, i: int, own: LoraMatrix, a: Tensor, b: Tensor, experts: slice = slice(0, 1), row: int = 0
    ) -> Iterator[Target]:
        """Yield the places of what the adapter has for a part. ``a``, ``b``: those of as many of the slot's experts as
        are in ``experts``, which are numbers of experts in the file; ``row``: the part's first one in the file."""
        (of_a, of_b), rank, columns = own.names, own.rank, sizes(self._columns)[1]
        for place, begin, end in _ranges(self._columns):
            to = a[:, i * self._rank : i * self._rank + rank, place : place + end - begin]
            if own.num_experts:
                yield Target(of_a, to, experts.start, (rank, columns), slice(begin, end), 1.0)
            else:
                yield Target(of_a, to[0], 0, (columns,), slice(begin, end), 1.0)
        first = sum(self.tensors.sizes[:i])
        for place, begin, end in _ranges(list(self._parts.values())[i]):
            to = b[:, first + place : first + place + end - begin, :rank].permute(1, 2, 0)
            yield Target(of_b, to, row + begin, (rank, own.num_experts or 1), experts, own.scale)


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

    def targets(self, slot: int, find: Find) -> Iterator[Target]:
        a, b = self.of(slot)
        first, end = self._experts.range
        if (whole := find(self._stack)) is not None:
            own, row = slice(first, end), 0
            for i, rows in enumerate(self._parts.values()):
                yield from self._of_part(i, whole, a[: end - first], b[: end - first], own, row)
                row += sizes(rows)[1]
            return
        for i, name in enumerate(self._parts):
            for place, expert in enumerate(range(first, end)):
                if (one := find(name_of_expert(name, expert))) is not None:
                    yield from self._of_part(i, one, a[place : place + 1], b[place : place + 1])


def _ranges(shares: Sequence[Share]) -> Iterator[tuple[int, int, int]]:
    """Yield of each of the shares, which lie one behind the other, its place among this rank's elements, and its first
    and last (exclusive) among all ranks'."""
    place = start = 0
    for share in shares:
        first, last = share.range
        yield place, start + first, start + last
        place, start = place + last - first, start + share.total
