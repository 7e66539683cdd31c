"""The layer that Llama, Mistral and Qwen have in common: attention with rotary positions, then a gated feed-forward.

             ┌─ norm ─ qkv ─ (q, k norm) ─ rotary ─ attention ─ o ─┐        ┌─ norm ─ gate, up ─ silu·mul ─ down ─┐
residual ────┴─────────────────────────────────────────────────────+────────┴────────────────────────────────────+───

Each norm belongs to the product after it, each sum to the product before it, so that both can be one kernel; what is
between q, k, v and o belongs to the attention, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..model_config import ModelConfig
from ..weights.slot import Slot
from .linear import Linear, LinearFormat
from .norm import RMSNorm

__all__ = ["AttentionCall", "AttentionLayer", "DecoderLayer"]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What attention needs to know of one layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q k^T
    window: int | None  # tokens that a query looks back on, itself included; None: all
    q_norm: RMSNorm | None  # head by head
    k_norm: RMSNorm | None


class AttentionCall(Protocol):
    """What the layers need of the step's attention (runner/attention/torch_attention.py)."""

    def begin(self, positions: Tensor) -> None:
        """Once a step, before its first layer. positions: int64 [num_tokens]."""

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim] for qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], which is
        used up: normalised, turned by position, written to the KV cache, attended to."""


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, linear_format: LinearFormat) -> None:
        name, size, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        norm_of: dict[str, RMSNorm] = {}
        if config.qk_norm:
            norm_of = {p: RMSNorm(f"{attn}.{p}", config.head_dim, eps, linear_format.dtype) for p in _QK_NORMS}
        self._attention = AttentionLayer(
            index=layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.sliding_windows[layer],
            q_norm=norm_of.get("q_norm"),
            k_norm=norm_of.get("k_norm"),
        )
        q, kv = config.q_size, config.kv_size
        qkv = [(f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)]
        inner = config.intermediate_size
        gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
        self._input_norm = RMSNorm(f"{name}.input_layernorm", size, eps, linear_format.dtype)
        self._qkv = Linear(size, qkv, config.qkv_bias, linear_format)
        self._o = Linear(config.q_size, [(f"{attn}.o_proj", size)], config.o_bias, linear_format)
        self._post_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, linear_format.dtype)
        self._gate_up = Linear(size, gate_up, config.mlp_bias, linear_format)
        self._down = Linear(inner, [(f"{mlp}.down_proj", size)], config.mlp_bias, linear_format)
        self._parts: list[Linear | RMSNorm] = [self._input_norm, self._qkv, *norm_of.values(), self._o]
        self._parts += [self._post_norm, self._gate_up, self._down]

    def slots(self) -> Iterator[Slot]:
        for part in self._parts:
            yield from part.slots()

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        """Change the residual stream [num_tokens, hidden_size] in place."""
        qkv = self._qkv.after_norm(residual, self._input_norm)
        self._o.add_to(residual, attn.forward(self._attention, qkv))
        self._down.add_to(residual, self._gate_up.gated_after_norm(residual, self._post_norm))


_QK_NORMS = ("q_norm", "k_norm")
