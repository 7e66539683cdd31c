"""What the gated delta rule is computed of; see gated_delta.py, and drafted_states.py of tokens behind which some may
be rejected."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rms_norm import rms_norm


class DeltaMemory(NamedTuple):
    """The states of a layer's pages, any stride from page to page."""

    states: Tensor  # float32 [num_pages, num_value_heads, key_dim, value_dim]
    pending: Tensor  # float32 [num_pages, length, keys + values + 2 * num_value_heads]: k, v, decay, beta of a token
    tags: Tensor  # int32 [num_pages, length]


class DeltaInputs(NamedTuple):
    """Inputs of n tokens, with any stride from token to token. A key head serves consecutive value heads."""

    mixed: Tensor  # [n, 2 * keys + values]: the convolution's output, of which q, k and v are made by silu
    z: Tensor  # [n, values]: the gate of the output
    b: Tensor  # [n, num_value_heads]: the share of a correction that is written
    a: Tensor  # [n, num_value_heads]: the share of the state that is forgotten
    num_key_heads: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self[:4]

    def new_output(self) -> Tensor:
        """Return memory for [n, values]."""
        return torch.empty(self.z.shape, dtype=self.mixed.dtype, device=self.mixed.device)

    def of(self, places: slice | Tensor) -> DeltaInputs:
        mixed, z, b, a = (x[places] for x in self.tensors)
        return DeltaInputs(mixed, z, b, a, self.num_key_heads)


class DeltaGates(NamedTuple):
    """Weights of a layer."""

    rate: Tensor  # float32 [num_value_heads], < 0: the slope of the decay
    bias: Tensor  # float32 [num_value_heads]
    norm: Tensor  # [value_dim]: the weight of the output's norm
    eps: float


class DeltaRule(NamedTuple):
    """What the rule itself takes of n tokens."""

    q: Tensor  # [n, num_key_heads, key_dim], not normalised
    k: Tensor
    v: Tensor  # [n, num_value_heads, value_dim]
    decay: Tensor  # float32 [n, num_value_heads]
    beta: Tensor  # float32 [n, num_value_heads]

    @classmethod
    def of_inputs(cls, inputs: DeltaInputs, gates: DeltaGates) -> DeltaRule:
        mixed, z, b, a, num_key_heads = inputs
        values, heads = z.shape[1], b.shape[1]
        keys = (mixed.shape[1] - values) // 2
        q, k, v = F.silu(mixed.float()).split([keys, keys, values], 1)
        q, k = (x.unflatten(1, (num_key_heads, -1)) for x in (q, k))
        decay = gates.rate * F.softplus(a.float() + gates.bias)
        return cls(q, k, v.unflatten(1, (heads, -1)), decay, b.float().sigmoid())

    def of(self, places: Tensor) -> DeltaRule:
        return DeltaRule(*(x.index_select(0, places) for x in self))


def gated_output(out: Tensor, inputs: DeltaInputs, gates: DeltaGates) -> Tensor:
    """Return [n, values] of what the rule reads out of the states, float32 [n, num_value_heads, value_dim]."""
    normed = rms_norm(out, gates.norm.float(), gates.eps).flatten(1)
    return (normed * F.silu(inputs.z.float())).to(inputs.mixed.dtype)
