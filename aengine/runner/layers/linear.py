"""Linear layers: names in the checkpoint on one side, a weight that multiplies on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.activation import Activation, Gated, computed
from ...kernels.rms_norm import add_rms_norm
from ..distributed.shares import NOTHING, Part, Share, part_of, sizes
from ..weights.plain import NumbersOf, PlainWeight
from ..weights.scope import Gathering, WeightScope
from ..weights.weight import JoinedTensors, Norm, OrdersDiffer, StoredTensor, Weight, WeightFormat

__all__ = ["Features", "Linear", "drop", "part_of_matrix", "shape_on_rank", "shares_of", "turned"]

Features: TypeAlias = int | Share | Sequence[Share]
"""Features of a matrix that all ranks have; or this rank's share of them; or of several that lie behind each other."""


def shares_of(features: Features) -> Sequence[Share]:
    if isinstance(features, int):
        return (Share(features),)
    return (features,) if isinstance(features, Share) else features


def part_of_matrix(
    stored: StoredTensor, rows: Sequence[Share], columns: Sequence[Share], name: str, num_ranks: int
) -> Part | None:
    """Return the part of a matrix' tensor that a rank wants: of the output features ``rows``, of the input's
    ``columns``.

    Raises ModelLoadError: the format can't be divided there.
    """
    try:
        for shares, dim, block in zip((rows, columns), (stored.out_dim, stored.in_dim), stored.block, strict=True):
            if dim is not None and (part := part_of(shares, dim, stored.shape[dim], block)) is not None:
                return part
    except ValueError as error:
        raise ModelLoadError(
            f"tensor_parallel_size={num_ranks}: {name} can't be divided so, in the format in which the checkpoint "
            f"keeps it ({error}): use fewer ranks"
        ) from error
    return None


def shape_on_rank(stored: StoredTensor, part: Part | None, num_rows: int) -> tuple[int, ...]:
    """Return the shape of what a rank keeps of a tensor; of a number, that number for each of the matrix' rows."""
    if stored.shape == ():
        return (num_rows, 1)
    shape = stored.shape if part is None else part.shape_in(stored.shape)
    return shape[::-1] if stored.turned else shape


def turned(room: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Memory for a tensor that the checkpoint has as [in, out], as a view of ``room``'s [out, in]."""
    return lambda: room().t()


class _Piece:
    """Neighbouring matrices of one format: what they are loaded into, at first and again."""

    def __init__(self, form: WeightFormat, device: torch.device, parts: Mapping[str, Features]) -> None:
        self.format = form
        self.parts = parts
        self.joined = JoinedTensors(device)
        self.num_tensors = 0
        self.num_come = 0  # tensors that have come in this load
        self.is_apart = False  # each matrix makes a weight of its own
        self.weight: Weight | None = None

    def make(self) -> Weight:
        """Make one weight of the tensors, all of which have come."""
        if not self.is_apart:
            with suppress(OrdersDiffer):
                return self.format.make(self.joined.tensors)
        first, *others = map(self.format.make, self.joined.of_parts())
        return first.above(others)

    def forget(self) -> None:
        """Forget the tensors that have come."""
        self.joined.tensors, self.num_come = {}, 0


class Linear:
    """y = x W^T + b, possibly of several of the checkpoint's matrices below each other (q, k, v; gate, up).

    A checkpoint that has them packed in one tensor, in this order, names that one as the only part.

    When the last of their tensors has come, the format makes one weight of them; of matrices in several formats each
    makes one of its own. The verbs are those of `Weight`.

    Divided among ranks by output features, each rank has some of those of y. Divided by input features, each rank has
    some of those of x, and its product is a part of a sum: `add_to` adds the sum of all ranks' parts, the first rank's
    with the bias.
    """

    def __init__(
        self, scope: WeightScope, in_features: Features, parts: Mapping[str, Features], bias: bool = False
    ) -> None:
        """``parts``: name and output features of each matrix."""
        self.weight: Weight
        self._lock = Lock()  # several threads may load
        self.group = scope.group
        columns = shares_of(in_features)
        self._is_partial = any(share.is_divided for share in columns)
        self._out_features = 0  # output features on this rank
        rows_of = {scope.name_of(name): shares_of(features) for name, features in parts.items()}
        self._wrap: Callable[[Weight], Weight] | None = self._wrapper(scope, rows_of, columns)
        by_format = groupby(parts.items(), lambda part: self._format_of(scope, part[0]))
        self._pieces = [_Piece(form, scope.formats.device, dict(own)) for form, own in by_format]
        # Names are the scope's alone: layers that hold them would not be alike.
        names: dict[_Piece, list[str]] = {piece: [] for piece in self._pieces}
        for piece, own in names.items():
            scope.gatherings.append(Gathering(own, partial(getattr, piece, "num_come"), piece.forget))
        wanted = [(piece, *part) for piece in self._pieces for part in piece.parts.items()]
        for piece, name, out_features in wanted:
            rows = shares_of(out_features)
            own_rows, all_rows = sizes(rows)
            self._out_features += own_rows
            for stored in scope.tensors_of(name, piece.format, all_rows, sizes(columns)[1], bias):
                full = f"{name}.{stored.suffix}"
                what = (full, stored.shape, stored.dtype)
                if self._is_partial and scope.group.rank and stored.suffix == "bias":
                    scope.want(*what, drop, stored.num_parameters, NOTHING)
                    continue
                part = part_of_matrix(stored, rows, columns, full, scope.group.size)
                shape = shape_on_rank(stored, part, own_rows)
                room = None
                if len(piece.parts) > 1:
                    room = piece.joined.add(stored.suffix, shape, stored.dtype)
                    piece.is_apart |= stored.cuts_block(own_rows)
                if room is not None and stored.turned:
                    room = turned(room)
                put = partial(self._put, piece, stored)
                count, kept, drawn, fault = stored.num_parameters, stored.kept, stored.drawn, stored.fault
                scope.want(*what, put, count, part, room, kept=kept, drawn=drawn, fault=fault)
                names[piece].append(scope.name_of(full))
                piece.num_tensors += 1

    def _wrapper(
        self, scope: WeightScope, rows_of: Mapping[str, Sequence[Share]], columns: Sequence[Share]
    ) -> Callable[[Weight], Weight]:
        return scope.formats.step_rows.wrap(rows_of, columns)

    def _format_of(self, scope: WeightScope, name: str) -> WeightFormat:
        return scope.format_of(name)

    def _put(self, piece: _Piece, stored: StoredTensor, tensor: Tensor) -> None:
        own = tensor.t() if stored.turned else tensor
        with self._lock:
            piece.joined.tensors.setdefault(stored.suffix, own)  # a single matrix has no memory reserved among others
            piece.num_come += 1
            is_last = piece.num_come == piece.num_tensors
        if not is_last:
            return
        made = piece.make()
        piece.forget()
        if piece.weight is not None:
            piece.weight.copy_from(made)
            return
        with self._lock:
            piece.weight = made
            weights = [other.weight for other in self._pieces if other.weight is not None]
            if len(weights) == len(self._pieces):
                assert self._wrap is not None, "the pieces keep their weights when they are loaded again"
                self.weight = self._wrap(weights[0] if len(weights) == 1 else weights[0].above(weights[1:]))
                self._wrap = None

    def multiply(self, x: Tensor) -> Tensor:
        """Return [n, out_features]; where input features are divided, this rank's part of the sum."""
        return self.weight.multiply(x)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return self.weight.after_norm(x, norm, out_dtype)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        return self.weight.gated(x, activation)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor | Gated:
        return self.weight.gated_after_norm(x, norm, activation)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return self.weight.activated(x, activation)

    def add_to(self, residual: Tensor, x: Tensor | Gated, post_norm: Norm | None = None, scale: float = 1.0) -> None:
        """Add norm(product by x), if ``post_norm`` is given, or ``scale`` times the product to ``residual``, in
        place."""
        if isinstance(x, Gated) and not self._is_partial and post_norm is None and scale == 1.0:
            self.weight.add_gated_to(residual, x)
            return
        x = computed(x)
        if self._is_partial:
            self._add_sum_to(residual, x, post_norm, scale)
        elif post_norm is not None:
            self.weight.add_normed_to(residual, x, post_norm)
        elif scale != 1.0:
            self.weight.add_scaled_to(residual, x, scale)
        else:
            self.weight.add_to(residual, x)

    def add_part_to(self, partial: Tensor, x: Tensor) -> None:
        """Add this rank's part of the product by x to ``partial``, in place: the sum is the caller's."""
        self.weight.add_to(partial, x)

    def _add_sum_to(self, residual: Tensor, x: Tensor, post_norm: Norm | None, scale: float) -> None:
        if post_norm is not None:
            add_rms_norm(residual, self.group.sum(self.weight.multiply(x)), post_norm.weight, post_norm.eps)
        elif scale != 1.0:
            own = torch.zeros_like(residual)
            self.weight.add_scaled_to(own, x, scale)
            self.group.add_sum(residual, own)
        else:
            self.group.add_sum(residual, self.weight.multiply(x))


class HeadMatrices(Linear):
    """A matrix whose output features are those of heads, each of which is multiplied by itself: plain numbers, whatever
    the checkpoint has. No adapter changes it."""

    def __init__(self, scope: WeightScope, name: str, rows: Share, in_features: int, num_heads: int) -> None:
        self._in_features, self._num_heads = in_features, num_heads
        super().__init__(scope, in_features, {name: rows})

    def _wrapper(self, *asked: object) -> Callable[[Weight], Weight]:
        return lambda weight: weight

    def _format_of(self, scope: WeightScope, name: str) -> WeightFormat:
        return NumbersOf(scope.format_of(name), self._in_features, scope.formats.dtype)

    @property
    def matrices(self) -> Tensor:
        """[num_heads, output features of each, in_features]."""
        assert isinstance(self.weight, PlainWeight)
        return self.weight.weight.unflatten(0, (self._num_heads, -1))


def drop(tensor: Tensor) -> None:
    """Ignore a tensor that only other ranks use."""
