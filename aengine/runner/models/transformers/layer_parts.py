"""The parts of a decoder layer of transformers as ours: norms, matrices, gated feed-forward layers.

Which part a module is follows from its names and types; what it computes is compared with it on random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.activation import Activation, act_and_mul
from ...layers.norm import RMSNorm
from ...weights.plain import PlainWeight

__all__ = [
    "MOST",
    "CentredNorm",
    "GatedParts",
    "Unusual",
    "difference",
    "pack",
    "read_attention_matrices",
    "read_gated",
    "read_norm",
]

MOST = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""By how much, of its size, the output of a layer may differ."""


class Unusual(Exception):
    """A part of a layer is not as our layers have it."""


@dataclass(frozen=True, slots=True)
class CentredNorm:
    """A layer norm: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over the last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class GatedParts:
    """A feed-forward layer: down(activation(gate(x)) * up(x))."""

    gate_up: PlainWeight
    down: PlainWeight
    activation: Activation


def read_norm(module: Any) -> RMSNorm | CentredNorm:
    """Return our norm that computes what ``module`` does. Raises `Unusual` if none does."""
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or not parameters.keys() <= {"weight", "bias"} or weight.dim() != 1 or not isinstance(eps, float):
        raise Unusual(type(module).__name__)
    norms: list[RMSNorm | CentredNorm] = [CentredNorm(weight, bias, eps), CentredNorm(weight + 1, bias, eps)]
    if bias is None:
        norms += [RMSNorm.of(weight, eps), RMSNorm.of(weight.float() + 1.0, eps)]
    x = _random((4, len(weight)), weight) + 1  # a mean other than 0 tells the two kinds of norm apart
    wanted = module(x)
    for norm in norms:
        if difference(norm(x), wanted) <= MOST[x.dtype] / 5:
            return norm
    raise Unusual(type(module).__name__)


def read_attention_matrices(attention: Any) -> tuple[list[nn.Linear], nn.Linear] | None:
    """The matrices of q, k and v, or one of all three, and that of the output; None: there are no such."""
    packed = getattr(attention, "qkv_proj", None)
    qkv = [getattr(attention, f"{name}_proj", None) for name in "qkv"] if packed is None else [packed]
    out = getattr(attention, "o_proj", None) or getattr(attention, "dense", None)
    if any(type(matrix) is not nn.Linear for matrix in (*qkv, out)):
        return None
    return qkv, out  # type: ignore[return-value]


def read_gated(module: Any) -> GatedParts | None:
    """Return the parts of down(activation(gate(x)) * up(x)); None: the module is not of that form."""
    packed, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    first = [getattr(module, f"{name}_proj", None) for name in ("gate", "up")] if packed is None else [packed]
    act_fn = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if any(type(matrix) is not nn.Linear for matrix in (*first, down)) or not isinstance(act_fn, nn.Module):
        return None
    assert down is not None
    x = _random((4, 64), down.weight).float()  # float32: in 16 bits rounding would hide which activation it is
    wanted = act_fn(x[:, :32]) * x[:, 32:]
    for activation in get_args(Activation):
        if difference(act_and_mul(x, activation), wanted) <= 1e-5:
            return GatedParts(pack(first), pack([down]), activation)
    return None


def pack(matrices: list[Any]) -> PlainWeight:
    """Join the weights of several matrices to one, of which theirs become views. Raises `Unusual`."""
    if len({matrix.bias is None for matrix in matrices}) > 1:
        raise Unusual("biases of some matrices")
    if len(matrices) == 1:
        bias = matrices[0].bias
        return PlainWeight(matrices[0].weight.detach(), None if bias is None else bias.detach())
    joined = {}
    for name in ("weight", "bias"):
        tensors = [getattr(matrix, name) for matrix in matrices]
        if tensors[0] is None:
            continue
        joined[name] = torch.cat([tensor.detach() for tensor in tensors])
        for matrix, part in zip(matrices, joined[name].split([len(t) for t in tensors]), strict=True):
            setattr(matrix, name, nn.Parameter(part, requires_grad=False))
    return PlainWeight(joined["weight"], joined.get("bias"))


def difference(x: Tensor, wanted: Tensor) -> float:
    """The norm of ``x - wanted``, as a share of that of ``wanted``."""
    return float((x.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)
