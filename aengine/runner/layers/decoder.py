"""The layer that Llama, Mistral and Qwen have in common: attention with rotary positions, then a gated feed-forward.

             ┌─ norm ─ qkv ─ (q, k norm) ─ rotary ─ attention ─ o ─┐        ┌─ norm ─ gate, up ─ silu·mul ─ down ─┐
residual ────┴─────────────────────────────────────────────────────+────────┴────────────────────────────────────+───
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from ...kernels.activation import silu_and_mul
from ...kernels.rotary import apply_rotary
from ..model_config import ModelConfig
from .linear import Linear, LinearFormat
from .norm import RMSNorm
from .slot import Slot

__all__ = ["AttentionCall", "DecoderLayer", "Rotary"]


class AttentionCall(Protocol):
    """What a layer needs of the step's attention (runner/attention.py)."""

    def forward(self, layer: int, q: Tensor, kv: Tensor, scale: float, window: int | None = None) -> Tensor: ...


class Rotary(NamedTuple):
    """Of the step's tokens, for all layers: float32 [num_tokens, 1, head_dim] each, see kernels/rotary.py."""

    cos: Tensor
    sin: Tensor


class SelfAttention:
    def __init__(self, config: ModelConfig, layer: int, linear_format: LinearFormat) -> None:
        name = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._scale = config.head_dim**-0.5
        self._window = config.sliding_windows[layer]
        parts = [
            (f"{name}.q_proj", config.q_size),
            (f"{name}.k_proj", config.kv_size),
            (f"{name}.v_proj", config.kv_size),
        ]
        self._qkv = Linear(config.hidden_size, parts, config.qkv_bias, linear_format)
        self._o = Linear(config.q_size, [(f"{name}.o_proj", config.hidden_size)], config.o_bias, linear_format)
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            self._q_norm = RMSNorm(f"{name}.q_norm", config.head_dim, config.rms_norm_eps, linear_format.dtype)
            self._k_norm = RMSNorm(f"{name}.k_norm", config.head_dim, config.rms_norm_eps, linear_format.dtype)

    def slots(self) -> Iterator[Slot]:
        yield from self._qkv.slots()
        yield from self._o.slots()
        for norm in (self._q_norm, self._k_norm):
            if norm is not None:
                yield from norm.slots()

    def __call__(self, x: Tensor, rotary: Rotary, attn: AttentionCall) -> Tensor:
        num_tokens = x.shape[0]
        heads = self._qkv(x).view(num_tokens, -1, self._head_dim)  # q heads, k heads, v heads of each token
        q_and_k = heads[:, : self._num_heads + self._num_kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            q_and_k[:, : self._num_heads] = self._q_norm(q_and_k[:, : self._num_heads])
            q_and_k[:, self._num_heads :] = self._k_norm(q_and_k[:, self._num_heads :])
        apply_rotary(q_and_k, rotary.cos, rotary.sin)
        kv = heads[:, self._num_heads :].unflatten(1, (2, self._num_kv_heads))
        return self._o(attn.forward(self._layer, heads[:, : self._num_heads], kv, self._scale, self._window))


class FeedForward:
    def __init__(self, config: ModelConfig, layer: int, linear_format: LinearFormat) -> None:
        name = f"model.layers.{layer}.mlp"
        size = config.intermediate_size
        parts = [(f"{name}.gate_proj", size), (f"{name}.up_proj", size)]
        self._gate_up = Linear(config.hidden_size, parts, config.mlp_bias, linear_format)
        self._down = Linear(size, [(f"{name}.down_proj", config.hidden_size)], config.mlp_bias, linear_format)

    def slots(self) -> Iterator[Slot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(silu_and_mul(self._gate_up(x)))


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, linear_format: LinearFormat) -> None:
        name, size, eps, dtype = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps, linear_format.dtype
        self._input_norm = RMSNorm(f"{name}.input_layernorm", size, eps, dtype)
        self._attention = SelfAttention(config, layer, linear_format)
        self._post_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, dtype)
        self._feed_forward = FeedForward(config, layer, linear_format)

    def slots(self) -> Iterator[Slot]:
        for part in (self._input_norm, self._attention, self._post_norm, self._feed_forward):
            yield from part.slots()

    def __call__(self, delta: Tensor | None, residual: Tensor, rotary: Rotary, attn: AttentionCall) -> Tensor:
        """What is to be added to the residual stream [num_tokens, hidden_size], which is changed in place.

        ``delta``: what the layer before wants added; None before the first layer.
        """
        norm = self._input_norm
        x = norm(residual) if delta is None else norm.after_adding(delta, residual)
        x = self._post_norm.after_adding(self._attention(x, rotary, attn), residual)
        return self._feed_forward(x)
