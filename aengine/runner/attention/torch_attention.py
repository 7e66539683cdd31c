"""Attention of one step: the batch's metadata and the KV cache, as the model's layers call them.

InputBatch ──> AttentionMetadata ──┐
KvCache (the pages of the pool) ───┴──> Attention.forward(layer, q, k, v): writes KV, attends
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels.input_prep import PreparedInputs
from ...kernels.kv_write import write_kv
from ...kernels.paged_attention import decode_attention, prefill_attention
from ...kernels.rotary import apply_rotary, rotary_rows
from ..input_batch import InputBatch
from ..layers.attention import AttentionLayer
from .kv_pages import KvCacheSpec

__all__ = ["Attention", "AttentionMetadata", "GroupMetadata", "KvCache"]

DEFAULT_BLOCK_SIZE = 16


class KvCache:
    """The paged KV of all layers. On a CPU the memory is taken from the system when a block is first written."""

    clears_blocks = True

    def __init__(self, spec: KvCacheSpec) -> None:
        self._pages = spec.make_pages()
        self.layout = self._pages.layout
        self.layers = self._pages.layers(heads_first=False)
        self.dtype = spec.dtype
        inv_freq, self.rotary_factor = spec.config.rope.inv_freq()
        self.inv_freq = inv_freq.to(spec.device)

    def bind(self, batch: InputBatch) -> Attention:
        """The attention of one step."""
        groups = [
            GroupMetadata(group.seq_lens, group.block_table, slots)
            for group, slots in zip(batch.groups, batch.inputs.slot_mapping.unbind(0), strict=True)
        ]
        return Attention(self, AttentionMetadata(batch.plan.query_lens.tolist(), groups))

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> Attention:
        raise AssertionError("there are no graphs on a CPU")

    def bind_batch(self, inputs: PreparedInputs, rows: Tensor, block_table: Tensor) -> Attention:
        raise AssertionError("there are no graphs on a CPU")

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Blocks (int64 [m]) have a new owner. Places past its tokens are read too, under a mask: 0 * NaN is NaN."""
        self._pages.clear(block_ids)


@dataclass(slots=True)
class GroupMetadata:
    """Attention inputs of a step for one KV group. Blocks that no query attends to are left out."""

    seq_lens: list[int]  # host [num_reqs]: tokens of each request in these blocks, those of this step included
    block_table: Tensor  # int32 or int64 [num_reqs, max_blocks]
    slot_mapping: Tensor  # int64 [num_tokens]


@dataclass(slots=True)
class AttentionMetadata:
    """Attention inputs of a step, for all layers."""

    query_lens: list[int]  # host [num_reqs]: tokens that each request computes
    groups: list[GroupMetadata]  # of each KV group


class Attention:
    """Calls the kernels for one step. Leading requests of one token each are attended to together, others alone."""

    def __init__(self, kv_cache: KvCache, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._groups = metadata.groups
        query_lens = metadata.query_lens
        n = self._num_decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        self._decodes = [(group.block_table[:n], group.seq_lens[:n]) for group in metadata.groups]
        ends = list(accumulate(query_lens))
        # Of each prompt: its place in the batch, its first token, past the last.
        self._prompts = [(i, ends[i] - query_lens[i], ends[i]) for i in range(self._num_decodes, len(query_lens))]

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
        kept = self._kv_cache.layers[layer.index]
        cache, group, n = kept.cache, self._groups[kept.group], self._num_decodes
        block_size = cache.shape[1]
        if kv.dtype != cache.dtype:
            kv = kv.to(cache.dtype)
        write_kv(kv, cache, group.slot_mapping)
        how = layer.scale, kept.window
        parts = []
        if n:
            parts.append(decode_attention(q[:n], cache, *self._decodes[kept.group], *how))
        for i, start, stop in self._prompts:
            seq_len = group.seq_lens[i]
            blocks = group.block_table[i, : -(-seq_len // block_size)]
            parts.append(prefill_attention(q[start:stop], kv[start:stop], cache, blocks, seq_len, *how))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
