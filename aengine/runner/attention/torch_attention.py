"""Attention of one step: the batch's metadata and the KV cache, as the model's layers call them.

InputBatch ──> AttentionMetadata ──┐
KvCache (one tensor a layer) ──────┴──> Attention.forward(layer, q, k, v): writes KV, attends
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.input_prep import PreparedInputs
from ...kernels.kv_write import write_kv
from ...kernels.paged_attention import decode_attention, prefill_attention
from ...kernels.rotary import apply_rotary, rotary_rows
from ..input_batch import InputBatch
from ..layers.attention import AttentionLayer
from ..lazy_zeros import lazy_zeros
from ..model_config import ModelConfig

__all__ = ["Attention", "AttentionMetadata", "KvCache"]

DEFAULT_BLOCK_SIZE = 16


class KvCache:
    """The paged KV of all layers: one tensor [num_blocks, block_size, 2, num_kv_heads, head_dim] each.

    On a CPU the memory is taken from the system when a block is first written.
    """

    clears_blocks = True

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        self.layers = [lazy_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.block_size = block_size
        self.dtype = dtype
        inv_freq, self.rotary_factor = config.rope.inv_freq()
        self.inv_freq = inv_freq.to(device)

    def bind(self, batch: InputBatch) -> Attention:
        """The attention of one step."""
        metadata = AttentionMetadata(
            query_lens=batch.plan.query_lens.tolist(),
            seq_lens=batch.inputs.seq_lens.tolist(),  # the plan's may be upper bounds
            block_table=batch.block_table.long(),
            slot_mapping=batch.inputs.slot_mapping,
        )
        return Attention(self, metadata)

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> Attention:
        raise AssertionError("there are no graphs on a CPU")

    def bind_batch(self, inputs: PreparedInputs, rows: Tensor, block_table: Tensor) -> Attention:
        raise AssertionError("there are no graphs on a CPU")

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Blocks (int64 [m]) have a new owner. Places past its tokens are read too, under a mask: 0 * NaN is NaN."""
        for layer in self.layers:
            layer.index_fill_(0, block_ids, 0)

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


@dataclass(slots=True)
class AttentionMetadata:
    """Of one step, the same for all its layers."""

    query_lens: list[int]  # host [num_reqs]: tokens that each request computes
    seq_lens: list[int]  # host [num_reqs]: its tokens in all, those of this step included
    block_table: Tensor  # int64 [num_reqs, max_blocks]
    slot_mapping: Tensor  # int64 [num_tokens]


class Attention:
    """Calls the kernels for one step. Leading requests of one token each are attended to together, others alone."""

    def __init__(self, kv_cache: KvCache, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._slot_mapping = metadata.slot_mapping
        query_lens = metadata.query_lens
        self._num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        self._decode_lens = metadata.seq_lens[: self._num_decodes]
        self._decode_table = metadata.block_table[: self._num_decodes]
        self._prefills: list[tuple[int, int, int, Tensor]] = []  # first token, past the last, seq_len, block ids
        start = self._num_decodes
        for i in range(self._num_decodes, len(query_lens)):
            seq_len = metadata.seq_lens[i]
            num_blocks = -(-seq_len // kv_cache.block_size)
            self._prefills.append((start, start + query_lens[i], seq_len, metadata.block_table[i, :num_blocks]))
            start += query_lens[i]

    def begin(self, positions: Tensor) -> None:
        """Cosines and sines of the step's tokens (int64 [num_tokens]), for all layers."""
        rows = rotary_rows(positions, self._kv_cache.inv_freq, self._kv_cache.rotary_factor)
        self._cos, self._sin = (t.to(self._kv_cache.dtype) for t in rows)

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall`: q and k are normalised and rotated in place, the KV of all tokens is written, then all
        attend."""
        heads = qkv.view(qkv.shape[0], -1, layer.head_dim)  # q heads, k heads, v heads of each token
        q_and_k = heads[:, : layer.num_heads + layer.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_and_k[:, : layer.num_heads] = layer.q_norm(q_and_k[:, : layer.num_heads])
            q_and_k[:, layer.num_heads :] = layer.k_norm(q_and_k[:, layer.num_heads :])
        apply_rotary(q_and_k, self._cos, self._sin)
        kv = heads[:, layer.num_heads :].unflatten(1, (2, layer.num_kv_heads))
        return self._attend(layer, heads[:, : layer.num_heads], kv)

    def _attend(self, layer: AttentionLayer, q: Tensor, kv: Tensor) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; kv: [num_tokens, 2, num_kv_heads, head_dim]."""
        cache, scale, window = self._kv_cache.layers[layer.index], layer.scale, layer.window
        write_kv(kv.flatten(1), cache.view(cache.shape[0] * cache.shape[1], -1), self._slot_mapping)
        parts = []
        if self._num_decodes:
            decode = q[: self._num_decodes]
            parts.append(decode_attention(decode, cache, self._decode_table, self._decode_lens, scale, window))
        for start, stop, seq_len, block_ids in self._prefills:
            parts.append(prefill_attention(q[start:stop], kv[start:stop], cache, block_ids, seq_len, scale, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
