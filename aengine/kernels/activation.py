"""Activations of feed-forward layers; gated ones: Shazeer 2020, https://arxiv.org/abs/2002.05202.

silu        x / (1 + exp(-x))
gelu        x (1 + erf(x / sqrt(2))) / 2                              Hendrycks and Gimpel 2016, arXiv:1606.08415
gelu_tanh   x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2         its approximation by tanh
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import uses_triton

Activation = Literal["silu", "gelu", "gelu_tanh"]


class Gated(NamedTuple):
    """activation(gate) * up [n, size], to be computed by what reads it."""

    gate_up: Tensor  # [n, 2 * size]: the gate's half comes first
    activation: Activation

    @property
    def shape(self) -> tuple[int, int]:
        n, both = self.gate_up.shape
        return n, both // 2

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up.dtype


def computed(x: Tensor | Gated) -> Tensor:
    return act_and_mul(x.gate_up, x.activation) if isinstance(x, Gated) else x


def act_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up, [n, size], for gate_up [n, 2 * size]: the gate's half comes first."""
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up has the shape {tuple(gate_up.shape)}"
    if uses_triton(gate_up):
        from .triton import activation as triton_op

        return triton_op.act_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    return activate(gate, activation).mul_(up)


def weigh(x: Tensor, logits: Tensor) -> None:
    """Multiply each row of x [n, size] by the sigmoid of its logit, float32 [n, 1], in place."""
    assert logits.shape == (len(x), 1) and logits.dtype == torch.float32, f"{logits.dtype} {tuple(logits.shape)}"
    if uses_triton(x):
        from .triton import activation as triton_op

        return triton_op.weigh(x, logits)
    x *= torch.sigmoid(logits).to(x.dtype)
    return None


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(x), a new tensor, by torch."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
