"""Tensors of quantised matrices for which the model has no place: whether they say what config.json does not.

Writers leave some that say nothing more: zeros of symmetric codes, groups of columns in their order, biases of 0. What
says more would change the numbers, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ..quantised.faults import is_in_order, middle_word
from ..scope import Place
from .reading import NUMBERS

_CODES = ("weight_packed", "qweight", "weight")


class _Leftover(NamedTuple):
    is_idle: Callable[[Tensor, Place], bool]  # whether it says nothing more than the place of the matrix' codes
    problem: str  # if it says more; "": a warning that it is not used will do


def _are_zeros(zeros: Tensor, _: Place) -> bool:
    """Packed ones are each the middle of the codes."""
    if zeros.dtype == torch.int32:
        return any(bool((zeros == middle_word(bits)).all()) for bits in (4, 8))
    return not bool(zeros.float().any())


def _is_one(scale: Tensor, _: Place) -> bool:
    return bool((scale.float() == 1).all())


def _is_shape(shape: Tensor, of: Place) -> bool:
    rows = of.shape[0]
    return shape.flatten().tolist() == [rows, of.num_parameters // rows]


_SCALE = _Leftover(_is_one, "is a scale, and by the quantization_config the matrix has none of this name")
_ORDER = _Leftover(
    lambda order, _: is_in_order(order), "has an order of columns, and by the quantization_config there is none"
)
_KNOWN = {
    "weight_zero_point": _Leftover(_are_zeros, "has zeros, and by the quantization_config the weights are symmetric"),
    "weight_g_idx": _ORDER,
    "g_idx": _ORDER,
    "weight_shape": _Leftover(_is_shape, "is another shape than that of the codes beside it"),
    "bias": _Leftover(lambda bias, _: not bool(bias.float().any()), ""),
    "pre_quant_scale": _Leftover(_is_one, "is a scale of activations, which aengine does not read"),
    **dict.fromkeys(("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales"), _SCALE),
}


def is_idle(name: str, places: Mapping[str, Place], read: Callable[[], Tensor] | None, where: str) -> bool:
    """Return whether a tensor that has no place is known to say nothing more than those that have; see above.

    ``read``: gives the tensor; None: it is not looked at. Raises ModelLoadError: what it says is lost.
    """
    known = _KNOWN.get(name.rpartition(".")[2])
    own = "" if known is None else _codes_beside(name, places)
    if known is None or not own or places[own].dtype in NUMBERS or read is None:
        return False
    idle = known.is_idle(read(), places[own])
    if known.problem and not idle:
        raise ModelLoadError(f"{where} {known.problem}: fetch the model again, and its config.json")
    return idle


def other_form(name: str, names: Container[str]) -> str:
    """Return which of the ``names`` is the same matrix, or matrices of experts, in another form; "": none."""
    if name.rpartition(".")[2] in _CODES:
        return _codes_beside(name, names)
    twin = name.removesuffix("_blocks") if name.endswith("_blocks") else f"{name}_blocks"  # gpt-oss'
    return twin if twin in names else ""


def _codes_beside(name: str, names: Container[str]) -> str:
    """Return which of the ``names`` is that of the codes or numbers of the matrix that a tensor is of; "": none."""
    stem, _, last = name.rpartition(".")
    kinds = [kind for kind in _CODES if kind != last]
    return next((full for kind in kinds for full in (f"{stem}.{kind}", f"model.{stem}.{kind}") if full in names), "")
