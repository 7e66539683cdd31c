"""What a model's tensors become in memory, in groups, and what a step reads of them: for `describe()`, a line of the
log, and `aengine doctor MODEL`, for which none of them has been loaded.

What is kept of a quantised matrix is seen on one of few rows of its format, made as the loader makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ModelLoadError
from .float16_cpu import Float16Format, float16_plan
from .formats import WeightFormats
from .quantised.matrices import of_first_expert
from .scope import Place, WeightScope
from .sources.reading import NUMBERS
from .weight import ExpertWeights, StoredTensor, Weight, WeightFormat

_ROWS, _COLUMNS = 256, 1024
"""Sizes of the small matrix: multiples of all blocks and groups."""
_CODES = " as codes"


class TensorsOfAKind(NamedTuple):
    """This rank's. A step reads of the experts those that one token takes, and of the embeddings next to nothing."""

    tensors: str  # "attention and MLP", "experts", "embeddings", "head", "embeddings and head", "norms"
    format: str  # what they are in memory: "q4_k as codes, q6_k -> bfloat16"
    bytes: int
    bytes_per_step: int  # read for one token


class _Kept(NamedTuple):
    """A tensor in memory."""

    format: str  # "": it is no matrix
    size: float  # bytes a parameter
    read: float  # those that a step reads


def inventory(weights: WeightScope, experts_share: float, stored: Mapping[str, str]) -> list[TensorsOfAKind]:
    """Return the groups that a model's tensors form, the largest first.

    Args:
        weights: the model's outermost scope
        experts_share: experts that a token takes, of all in a mixture
        stored: formats of matrices in the checkpoint that become plain numbers, by the matrix' name; of experts those
            of the first
    """
    seen: dict[tuple[WeightFormat, bool, int], _Kept] = {}
    totals: dict[str, list[float]] = {}
    names: dict[str, dict[str, None]] = {}
    for name, places in weights.places.items():
        matrix, place = name.rpartition(".")[0], places[0]
        kind = _kind(matrix, places, weights)
        kept = _kept(matrix, kind, place, weights.formats, seen)
        form = kept.format
        if form and place.num_parameters:  # scales beside codes are told with these
            was = stored.get(of_first_expert(matrix), "")
            if was and " " not in form:
                form = f"{was} -> {form}"
            names.setdefault(kind, {})[form] = None
        count = place.num_parameters * prod(place.own_shape) / max(1, prod(place.shape))
        total = totals.setdefault(kind, [0.0, 0.0])
        total[0] += count * kept.size
        total[1] += count * kept.read * {"experts": experts_share, "embeddings": 0.0}.get(kind, 1.0)
    groups = [TensorsOfAKind(k, ", ".join(names.get(k, ())), round(a), round(b)) for k, (a, b) in totals.items()]
    return sorted(groups, key=lambda group: -group.bytes)


def name_of(groups: Sequence[TensorsOfAKind]) -> str:
    """The formats in which the layers' matrices are kept, and codes elsewhere: "int4, int8"."""
    found = {
        form.removesuffix(_CODES).rpartition(" -> ")[2]
        for group in groups
        for form in filter(None, group.format.split(", "))
        if group.tensors in ("attention and MLP", "experts") or form.endswith(_CODES)
    }
    return ", ".join(sorted(found))


def line_of(groups: list[TensorsOfAKind]) -> str:
    """The groups in one line, with what a step reads of them all."""
    parts = [f"{group.tensors}: {group.format or 'numbers'}, {_size(group.bytes)}" for group in groups]
    return f"{'; '.join(parts)}; a token reads {_size(sum(group.bytes_per_step for group in groups))}"


def _kind(matrix: str, places: list[Place], weights: WeightScope) -> str:
    if "embed" in matrix:
        if len(places) > 1 or (weights.gives_rows and not any(name.startswith("lm_head.") for name in weights.places)):
            return "embeddings and head"
        return "embeddings" if weights.stage.is_first else "head"
    if matrix.endswith("lm_head"):
        return "head"
    if ".experts" in matrix:
        return "experts"
    is_plain = weights.formats.of(matrix) == weights.formats.plain
    return "norms" if is_plain and len(places[0].shape) < 2 else "attention and MLP"


def _kept(
    matrix: str,
    kind: str,
    place: Place,
    formats: WeightFormats,
    seen: dict[tuple[WeightFormat, bool, int], _Kept],
) -> _Kept:
    plain, itemsize = _plain(formats), formats.table_dtype.itemsize
    if len(place.shape) < 2:
        return _Kept("", formats.dtype.itemsize, formats.dtype.itemsize)
    if kind.startswith("embeddings") and not formats.is_compiled:
        is_twice = kind == "embeddings and head" and isinstance(formats.plain, Float16Format)  # it is packed
        return _Kept(str(formats.table_dtype).removeprefix("torch."), itemsize + is_twice * plain.size, itemsize)
    form = formats.of(matrix)
    if form == formats.plain:
        if place.dtype != torch.uint8:
            return plain
        if place.kept is None:  # packed_experts.py
            return _Kept("mxfp4 as codes", 17 / 32, 17 / 32)
        return plain._replace(format=f"mxfp4 -> {plain.format}")
    key = form, kind == "experts", _columns_of(place, form)
    if key not in seen:
        size = _bytes_of_codes(form, kind == "experts", formats, key[2])
        is_codes = size < plain.size
        was = f"{form.name} with act-order" if getattr(form, "mixes_columns", False) else form.name
        named = f"{was} as codes" if is_codes else f"{was} -> {plain.format}"
        seen[key] = _Kept(named, size, size) if is_codes else plain._replace(format=named)
    return seen[key]


def _plain(formats: WeightFormats) -> _Kept:
    if isinstance(formats.plain, Float16Format):  # packed, and once more where that is faster for many rows
        return _Kept(formats.plain.name, 2 if float16_plan().large is None else 4, 2)
    itemsize = formats.table_dtype.itemsize  # that of the matrices, too, where they are plain
    return _Kept(formats.plain.name, itemsize, itemsize)


def _columns_of(place: Place, form: WeightFormat) -> int:
    """This rank's columns of the matrix of a place."""
    suffix = place.name.rpartition(".")[2]
    try:
        stored = next((one for one in form.tensors(_ROWS, _COLUMNS, False) if one.suffix == suffix), None)
    except ValueError:  # groups of no power of two
        return _COLUMNS
    if stored is None or stored.in_dim is None or not stored.num_parameters:
        return _COLUMNS
    return place.own_shape[stored.in_dim] * _COLUMNS // stored.shape[stored.in_dim]


def _bytes_of_codes(form: WeightFormat, is_experts: bool, formats: WeightFormats, columns: int = _COLUMNS) -> float:
    """Bytes a parameter that a small matrix takes; infinite: it becomes plain numbers, or what has no tensors."""
    try:
        stored = form.tensors(_ROWS, columns, False)
    except ValueError:  # nothing keeps groups as codes that do not divide a power of two
        return float("inf")
    stored = [one._replace(shape=one.shape or (_ROWS, 1)) for one in stored]
    if any(one.kept in NUMBERS for one in stored):
        return float("inf")
    tensors = {one.suffix: _example(one).to(formats.device) for one in stored}
    stored = [one._replace(shape=one.shape[::-1]) if one.turned else one for one in stored]
    made: Weight | ExpertWeights
    try:
        if is_experts:
            made = form.make_experts(1, stored, formats.device)
            for suffix, tensor in tensors.items():
                made.room(0, suffix, slice(None)).copy_(tensor)
            made.finish(0)
        else:
            made = form.make(tensors)
    except (ValueError, ModelLoadError):  # it needs other codes than zeros: what the checkpoint has
        return sum(tensor.nbytes for tensor in tensors.values()) / (_ROWS * columns)
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(made)}
    return sum(sizes.values()) / (_ROWS * columns) or float("inf")


def _example(stored: StoredTensor) -> Tensor:
    """A tensor as checkpoints have it, as the loader gives it to a format: scales above 0, codes of 0."""
    if callable(stored.drawn):
        made = stored.drawn()
    else:
        made = torch.zeros(stored.shape, dtype=stored.dtype)
        if stored.drawn is not None:
            made.fill_(stored.drawn[1])
    return made.t().contiguous() if stored.turned else made


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a weight, wherever in its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif type(value).__module__.startswith("aengine.") and not isinstance(value, type):
        yield from _tensors(getattr(value, "__dict__", {}))
        names = (name for owner in type(value).__mro__ for name in getattr(owner, "__slots__", ()))
        for name in names:
            yield from _tensors(getattr(value, name, None))


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
