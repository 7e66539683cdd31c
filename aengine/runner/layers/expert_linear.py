"""The matrices of a layer's experts: names in the checkpoint on one side, weights that multiply on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import NamedTuple

from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.expert_types import ExpertGate, ExpertPlan
from ..distributed.shares import NOTHING, Part, Share, part_of, sizes
from ..weights.expert_weights import ExpertWeights
from ..weights.packed_experts import PackedLayout
from ..weights.quantised.matrices import UNQUANTISED
from ..weights.scope import Gathering, WeightScope
from ..weights.weight import Norm, NotMultiplied, StoredTensor
from .linear import Features, drop, part_of_matrix, shape_on_rank, shares_of, turned

_Wrap = Callable[[ExpertWeights], ExpertWeights]


class _Piece(NamedTuple):
    """A tensor that each expert has in the checkpoint."""

    name: str  # name in the checkpoint, behind the expert's number
    stored: StoredTensor
    part: Part | None  # the part of the stored tensor that this rank wants
    rows: slice | None  # its rows in the expert's tensor of this suffix; None: the rank does not want it


_ONE_AT_A_TIME = Lock()
"""While the experts of a packed tensor become numbers on the device: that takes some times the room of one of them."""


class ExpertLinear:
    """y = x W^T + b by the matrices of the experts that a token takes, possibly of several below each other (gate, up).

    The checkpoint has a matrix an expert, "7.up_proj.weight" below the scope; or, with a layout, all in one tensor,
    "up_proj". The verbs are those of `ExpertWeights`.
    """

    def __init__(
        self,
        scope: WeightScope,
        experts: Share,
        in_features: Features,
        parts: Mapping[str, Features],
        *,
        bias: bool = False,
        layout: PackedLayout | None = None,
    ) -> None:
        """``parts``: name and output features of each matrix; one if there is a layout. Experts are divided among the
        ranks, or the features of each, as in `Linear`."""
        self.weights: ExpertWeights
        rows_of = {scope.name_of(name): shares_of(features) for name, features in parts.items()}
        wrap = scope.formats.step_rows.wrap_experts(rows_of, shares_of(in_features), experts)
        self._experts = range(*experts.range)
        self._device = scope.formats.device
        columns = shares_of(in_features)
        # Added up over the ranks, the products have the bias once.
        self._drops_bias = scope.group.rank > 0 and any(share.is_divided for share in columns)
        self._cut: Part | None = None  # the columns that this rank keeps of a matrix that is loaded whole
        self._lock = Lock()  # several threads may load
        if layout is None:
            self._want_each(scope, experts.total, columns, parts, bias, wrap)
        else:
            self._dtype = scope.formats.dtype
            self._want_packed(scope, experts, columns, parts, bias, layout, wrap)

    def _want_each(
        self,
        scope: WeightScope,
        num_experts: int,
        columns: Sequence[Share],
        parts: Mapping[str, Features],
        bias: bool,
        wrap: _Wrap,
    ) -> None:
        form, *others = {scope.format_of(f"0.{name}") for name in parts}
        if others:
            raise ModelLoadError(
                f"{scope.formats.folder}/config.json: quantization_config: of the experts {scope.name_of('*')}, "
                f"{' and '.join(parts)} are multiplied together and quantised in two ways, which aengine does not "
                f"read: {UNQUANTISED}"
            )
        in_features = sizes(columns)[1]
        pieces: list[_Piece] = []  # pieces of each expert of this rank
        num_rows: dict[str, int] = {}
        for name, features in parts.items():
            rows = shares_of(features)
            for stored in scope.tensors_of(f"0.{name}", form, sizes(rows)[1], in_features, bias):
                full = f"{name}.{stored.suffix}"
                if len(parts) > 1 and stored.cuts_block(sizes(rows)[1]):
                    raise ModelLoadError(
                        f"{scope.formats.folder}: of the experts {scope.name_of('*')}, {' and '.join(parts)} are "
                        f"multiplied together, and the {sizes(rows)[1]} rows of each are no whole blocks of "
                        f"{stored.block[0]}, which aengine does not read of experts: {UNQUANTISED}"
                    )
                if self._drops_bias and stored.suffix == "bias":
                    pieces.append(_Piece(full, stored, NOTHING, None))
                    continue
                part = part_of_matrix(stored, rows, columns, f"0.{full}", scope.group.size)
                begin = num_rows.get(stored.suffix, 0)
                num_rows[stored.suffix] = begin + shape_on_rank(stored, part, sizes(rows)[0])[0]
                pieces.append(_Piece(full, stored, part, slice(begin, num_rows[stored.suffix])))
        whole = {
            piece.stored.suffix: piece.stored._replace(
                shape=(num_rows[piece.stored.suffix], *shape_on_rank(piece.stored, piece.part, 1)[1:])
            )
            for piece in pieces
            if piece.rows is not None
        }
        self.weights = wrap(form.make_experts(len(self._experts), list(whole.values()), self._device))
        self._num_tensors = sum(piece.rows is not None for piece in pieces)  # those of an expert
        self._num_come = dict.fromkeys(range(len(self._experts)), 0)
        for expert in range(num_experts):
            for name, stored, part, own in pieces:
                what = (f"{expert}.{name}", stored.shape, stored.dtype)
                if expert not in self._experts or own is None:
                    scope.want(*what, drop, stored.num_parameters, NOTHING)
                    continue
                place = expert - self._experts.start
                room: Callable[[], Tensor] = partial(self.weights.room, place, stored.suffix, own)
                if stored.turned:
                    room = turned(room)
                scope.want(
                    *what,
                    partial(self._put_one, place),
                    stored.num_parameters,
                    part,
                    room,
                    kept=stored.kept,
                    drawn=stored.drawn,
                    fault=stored.fault,
                )
            if expert in self._experts:
                names = [scope.name_of(f"{expert}.{piece.name}") for piece in pieces if piece.rows is not None]
                place = expert - self._experts.start
                come = partial(self._num_come.__getitem__, place)
                scope.gatherings.append(Gathering(names, come, partial(self._num_come.__setitem__, place, 0)))

    def _put_one(self, expert: int, tensor: Tensor) -> None:
        with self._lock:
            self._num_come[expert] = (self._num_come[expert] + 1) % self._num_tensors
            is_last = self._num_come[expert] == 0
        if is_last:
            self.weights.finish(expert)

    def _want_packed(
        self,
        scope: WeightScope,
        experts: Share,
        columns: Sequence[Share],
        parts: Mapping[str, Features],
        bias: bool,
        layout: PackedLayout,
        wrap: _Wrap,
    ) -> None:
        ((name, features),) = parts.items()
        rows, (own_columns, in_features) = shares_of(features), sizes(columns)
        own_rows, out_features = sizes(rows)
        try:
            layout = layout.of(scope.formats, own_columns)
        except NotMultiplied as error:
            raise ModelLoadError(f"{scope.name_of(name)}: {error}") from error
        has_bias = bias and not self._drops_bias
        self.weights = wrap(layout.make_experts(experts.size, own_rows, own_columns, has_bias, scope.formats))
        wanted = layout.tensors(experts.total, out_features, in_features, bias, self._dtype)
        kept: dict[str, Tensor] = {}
        num_wanted = len(wanted) - (bias and self._drops_bias)
        for stored in wanted:
            what = (f"{name}{stored.suffix}", stored.shape, stored.dtype)
            if self._drops_bias and stored.suffix == "_bias":
                scope.want(*what, drop, stored.num_parameters, NOTHING)
                continue
            part = part_of((experts,), 0, experts.total) or self._part_of_packed(stored, rows, columns)
            put = partial(self._put_packed, kept, stored.suffix, num_wanted, layout)
            count, of_codes, drawn, fault = stored.num_parameters, stored.kept, stored.drawn, stored.fault
            scope.want(*what, put, count, part, on_host=True, kept=of_codes, drawn=drawn, fault=fault)
        names = [scope.name_of(f"{name}{stored.suffix}") for stored in wanted]
        scope.gatherings.append(Gathering(names, partial(len, kept), kept.clear))

    def _part_of_packed(self, stored: StoredTensor, rows: Sequence[Share], columns: Sequence[Share]) -> Part | None:
        """Return the part of a tensor of all experts; None, with ``_cut`` set, where ranks' columns meet within its
        blocks."""
        if stored.out_dim is not None and (part := part_of(rows, stored.out_dim, stored.shape[stored.out_dim])):
            return part
        if stored.in_dim is None:
            return None
        try:
            return part_of(columns, stored.in_dim, stored.shape[stored.in_dim])
        except ValueError:
            self._cut = part_of(columns, 1, sizes(columns)[1])
            return None

    def _put_packed(
        self, kept: dict[str, Tensor], suffix: str, wanted: int, layout: PackedLayout, tensor: Tensor
    ) -> None:
        with self._lock:
            kept[suffix] = tensor
            is_last = len(kept) == wanted
        if is_last:
            with _ONE_AT_A_TIME:
                for expert in range(len(self._experts)):
                    self._put_expert(expert, {suffix: tensor[expert] for suffix, tensor in kept.items()}, layout)
            kept.clear()

    def _put_expert(self, expert: int, stored: Mapping[str, Tensor], layout: PackedLayout) -> None:
        on_device = {suffix: tensor.to(self._device) for suffix, tensor in stored.items()}
        own = layout.expert(on_device, self._dtype)
        for suffix, tensor in own.items():
            cut = tensor if self._cut is None or suffix != "weight" else self._cut.of(tensor)
            self.weights.room(expert, suffix, slice(None)).copy_(cut)
        self.weights.finish(expert)

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        return self.weights.gated_after_norm(x, norm, plan, gate)

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        self.weights.add_to(residual, hidden, plan)
