"""Attention on a GPU: the paged KV cache, and the two ways in which a step reads it.

    bind_decode    every request has one new token: norm of q and k, rotary, KV write and attention are one launch a layer
    bind           any batch: one launch turns and writes all tokens; then decodes and prompts, each with its kernel

A layer's cache is [num_blocks, block_size, 2, num_kv_heads, head_dim] to whoever indexes it, and lies in memory as
[num_blocks, 2, num_kv_heads, block_size, head_dim], so that a head's tokens of a block are one run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.decode_attention import DecodeWorkspace, decode_step_attention
from ..kernels.write_qkv import turn_and_write
from .attention_backends import PrefillBackend, PrefillMetadata
from .input_batch import InputBatch
from .layers.decoder import AttentionLayer
from .model_config import ModelConfig

__all__ = ["BatchAttention", "DecodeAttention", "GpuKvCache"]


class GpuKvCache:
    """The KV of all layers, and what the attention kernels share."""

    clears_blocks = False  # the kernels never read past a sequence's end

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        prefill: PrefillBackend,
    ) -> None:
        shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        self.layers = [
            torch.zeros(shape, dtype=dtype, device=device).permute(0, 3, 1, 2, 4) for _ in range(config.num_layers)
        ]
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.prefill = prefill
        self.rope = rope_table(config, max_model_len, device)
        self.workspace = DecodeWorkspace(max_num_seqs, config.num_heads, config.num_kv_heads, config.head_dim, device)

    def bind(self, batch: InputBatch) -> BatchAttention:
        return BatchAttention(self, batch)

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> DecodeAttention:
        return DecodeAttention(self, rows, seq_lens, block_table)

    def clear_blocks(self, block_ids: Tensor) -> None:
        raise AssertionError("nothing needs to be cleared")

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines, of position times each frequency, times the factor."""
    inv_freq, factor = config.rope.inv_freq()
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * inv_freq.to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(factor)


@dataclass(slots=True)
class DecodeAttention:
    """Of a step whose every request has one token; all of it lies in memory that a graph may replay."""

    cache: GpuKvCache
    rows: Tensor  # int64 [n]; -1: padding
    seq_lens: Tensor  # int32 [n]
    block_table: Tensor  # int32 [max_num_seqs, width]

    def begin(self, positions: Tensor) -> None:
        pass

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        return _decode(self.cache, layer, qkv, self.rows, self.seq_lens, self.block_table, fused=True)


class BatchAttention:
    """Of any batch: decodes lead, prompts and chunks of prompts follow."""

    def __init__(self, cache: GpuKvCache, batch: InputBatch) -> None:
        self._cache = cache
        self._batch = batch
        plan = batch.plan
        self._num_decodes = n = plan.num_decodes
        self._metadata: PrefillMetadata | None = None
        if n < plan.num_reqs:
            self._metadata = PrefillMetadata.of(
                batch.idx_mapping[n:], batch.seq_lens[n:], batch.block_table, plan.query_lens[n:], plan.seq_lens[n:]
            )

    def begin(self, positions: Tensor) -> None:
        pass

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        cache, batch, n = self._cache, self._batch, self._num_decodes
        kv_cache = cache.layers[layer.index]
        turn_and_write(
            qkv, batch.positions, batch.slot_mapping, cache.rope, *_norms(layer), layer.num_heads, kv_cache
        )
        if self._metadata is None:
            return _decode(cache, layer, qkv, batch.idx_mapping, batch.seq_lens, batch.block_table, fused=False)
        heads = qkv[n:].view(-1, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
        q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        prefilled = cache.prefill.prefill(q, k, v, kv_cache, self._metadata, layer.scale, layer.window)
        if n == 0:
            return prefilled
        decoded = _decode(cache, layer, qkv[:n], batch.idx_mapping[:n], batch.seq_lens[:n], batch.block_table, fused=False)
        return torch.cat((decoded, prefilled))


def _decode(
    cache: GpuKvCache,
    layer: AttentionLayer,
    qkv: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    fused: bool,
) -> Tensor:
    return decode_step_attention(
        qkv,
        cache.layers[layer.index],
        block_table,
        rows,
        seq_lens,
        cache.rope,
        *_norms(layer),
        layer.num_heads,
        layer.scale,
        layer.window,
        cache.workspace,
        is_raw=fused,
    )


def _norms(layer: AttentionLayer) -> tuple[Tensor | None, Tensor | None, float]:
    if layer.q_norm is None or layer.k_norm is None:
        return None, None, 0.0
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
