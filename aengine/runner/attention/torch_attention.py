"""Attention of one step: the batch's metadata and the KV cache, as the model's layers call them.

InputBatch ──> AttentionMetadata ──┐
KvCache (the pages of the pool) ───┴──> Attention.forward(layer, q, k, v): writes KV, attends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.input_prep import PreparedInputs
from ...kernels.invariant_attention import invariant_attention
from ...kernels.kv_write import write_kv
from ...kernels.latent_attention import values_of
from ...kernels.paged_attention import decode_attention, prefill_attention
from ...kernels.policy import FASTEST, KernelPolicy
from ...kernels.rotary import apply_rotary, rotary_rows
from ..block_tables import BlockTables
from ..graphs.batch_states import NO_STATES
from ..input_batch import GroupBatch, InputBatch, Rows
from ..layers.attention import AttentionLayer
from ..layers.states import LayerStates, StateRows, kept_within, state_rows_of_batch
from ..request_state import RequestState
from ..rope import RopeConfig
from ..speculation.states_ahead import RowsAhead
from ..weights.step_rows import StepRows
from .kv_pages import KvCacheSpec

DEFAULT_BLOCK_SIZE = 16


class KvCache:
    """The paged KV of all layers. On a CPU the memory is taken from the system when a block is first written."""

    batch_states = NO_STATES  # there are no graphs

    def __init__(self, spec: KvCacheSpec, policy: KernelPolicy = FASTEST) -> None:
        self.policy = policy
        self.pages = spec.make_pages()
        self.layout = self.pages.layout
        self.layers = self.pages.layers(heads_first=False)
        self.states = self.pages.states()
        self.dtype = spec.dtype
        self.ropes = [StepRope(config) for config in spec.config.ropes]
        self._first_lens: Tensor | None = None
        self.is_taped = False  # steps are run by a tape

    @property
    def clears_blocks(self) -> bool:
        """See `KvMemory`: a tape looks at nothing but what its tokens have written."""
        return not self.is_taped

    def watch_rows(self, first_lens: Tensor) -> None:
        """See `KvMemory`."""
        self._first_lens = first_lens

    def decode_kinds(self, requests: RequestState, tables: BlockTables, step_rows: StepRows) -> StepRows:
        """See `KvMemory`: attention has none."""
        return step_rows

    def bind(self, batch: InputBatch) -> Any:
        """Return the attention of one step; the batch itself for a tape, which has its attention."""
        return batch if self.is_taped else self._attention_of(batch)

    def op_by_op(self, bound: Any) -> Any:
        """See `KvMemory`."""
        return self._attention_of(bound) if self.is_taped else bound

    def _attention_of(self, batch: InputBatch) -> Attention:
        groups = [
            GroupMetadata(group, slots)
            for group, slots in zip(batch.groups(), batch.inputs.slot_mapping.unbind(0), strict=True)
        ]
        query_lens = batch.plan.query_lens.tolist()
        first_lens = self._first_lens_of(batch.idx_mapping)
        return Attention(self, AttentionMetadata(query_lens, groups, first_lens, batch.plan.kept_states))

    def _first_lens_of(self, rows: Tensor) -> Tensor | None:
        if self._first_lens is None or all(rope.long is None for rope in self.ropes):
            return None
        return self._first_lens[rows]

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> Attention:
        raise AssertionError("there are no graphs on a CPU")

    def bind_positions(self, rows: Tensor, positions: Tensor, seq_lens: Tensor, block_table: Tensor) -> Attention:
        """See `KvMemory`: without padding."""
        ones, groups = np.ones(len(rows), dtype=np.int64), []
        for group, table in zip(self.layout.groups, block_table.unbind(0), strict=True):
            own, size = GroupBatch.gather(ones, group, table, rows, seq_lens), group.block_size
            slots = table[rows, positions // size].long() * size + positions % size
            groups.append(GroupMetadata(own, slots))
        return Attention(self, AttentionMetadata([1] * len(rows), groups, self._first_lens_of(rows)))

    def bind_batch(self, inputs: PreparedInputs, rows: Tensor, block_table: Tensor) -> Attention:
        raise AssertionError("there are no graphs on a CPU")

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Blocks (int64 [m]) have a new owner. Places past its tokens are read too, under a mask: 0 * NaN is NaN."""
        self.pages.clear(block_ids)

    def preparations(self) -> list[Callable[[], None]]:
        return []

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        """See `KvMemory`."""
        self.pages.copy(pairs)


class StepRope:
    """A rotary embedding of a model, of which each step takes its tokens' cosines and sines."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self.inv_freq, self.factor = config.inv_freq()
        self.long = config.long()

    def at(self, positions: Tensor, metadata: AttentionMetadata, dtype: torch.dtype) -> RopeRows:
        """Compute the rotary rows of int64 [num_tokens] positions."""
        inv_freq = self.inv_freq
        first_lens = metadata.first_lens_of_tokens()
        if self.long is not None and first_lens is not None:
            inv_freq = torch.where((first_lens > self.long.border)[:, None], self.long.inv_freq, inv_freq)
        interleaved = self.config.interleaved
        cos, sin = rotary_rows(positions, inv_freq, self.factor, interleaved=interleaved)
        scale = self.config.query_scale(positions)
        return RopeRows(cos.to(dtype), sin.to(dtype), interleaved, None if scale is None else scale.to(dtype))


class RopeRows(NamedTuple):
    """The rotary embedding of a step's tokens."""

    cos: Tensor  # [num_tokens, 1, rotary_dim], like sin
    sin: Tensor
    interleaved: bool
    query_scale: Tensor | None  # [num_tokens]

    def apply(self, q_and_k: Tensor, num_heads: int) -> None:
        """Rotate q's heads, the first ``num_heads``, and k's, [num_tokens, heads, head_dim], in place."""
        apply_rotary(q_and_k, self.cos, self.sin, interleaved=self.interleaved)
        if self.query_scale is not None:
            q_and_k[:, :num_heads].mul_(self.query_scale[:, None, None])


@dataclass(slots=True)
class GroupMetadata:
    """Attention inputs of a step for one KV group."""

    batch: GroupBatch
    slot_mapping: Tensor  # int64 [num_tokens]


@dataclass(slots=True)
class AttentionMetadata:
    """Attention inputs of a step, for all layers."""

    query_lens: list[int]  # host [num_reqs]: tokens that each request computes
    groups: list[GroupMetadata]  # one for each KV group
    first_lens: Tensor | None = (
        None  # int32 [num_reqs]: tokens of each when it got its row; None: nothing depends on it
    )
    kept_states: Rows | None = None  # see `BatchPlan`

    def first_lens_of_tokens(self) -> Tensor | None:
        """`first_lens` of each token's request, [num_tokens]."""
        return None if self.first_lens is None else self.first_lens.repeat_interleave(torch.tensor(self.query_lens))


class Attention:
    """Calls the kernels for one step. Leading requests of one token each are attended to together, others alone."""

    def __init__(self, kv_cache: KvCache, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._groups = metadata.groups
        query_lens = metadata.query_lens
        n = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        n = self._num_decodes = 0 if kv_cache.policy.batch_invariant else n  # requests that are attended to together
        self._decodes = [(group.batch.block_table[:n], group.batch.seq_lens[:n]) for group in metadata.groups]
        ends = list(accumulate(query_lens))
        # (place in the batch, first token, one past the last token) of each other request
        self._alone = [(i, ends[i] - query_lens[i], ends[i]) for i in range(self._num_decodes, len(query_lens))]
        self._query_lens = query_lens
        self._state_rows: dict[int, StateRows | RowsAhead] = {}  # the rows of each KV group with states

    def begin(self, positions: Tensor) -> None:
        """Cosines and sines of the step's tokens (int64 [num_tokens]), for all layers."""
        cache, self._positions = self._kv_cache, positions
        self._ropes = [rope.at(positions, self._metadata, cache.dtype) for rope in cache.ropes]

    def first_lens(self) -> Tensor | None:
        """See `AttentionCall`."""
        return self._metadata.first_lens_of_tokens()

    def states(self, index: int) -> LayerStates:
        """See `AttentionCall`."""
        place = self._kv_cache.states[index]
        if place.group not in self._state_rows:
            self._state_rows[place.group] = self._find_states(place.group)
        return self._state_rows[place.group].of_layer(place.tensors)

    def _find_states(self, index: int) -> StateRows | RowsAhead:
        group, n, query_lens = self._groups[index].batch, self._num_decodes, self._query_lens
        pages = group.block_table[:, 0].long()
        kept = kept_within(self._metadata.kept_states, index)
        num_ahead = self._kv_cache.layout.groups[index].num_ahead
        if num_ahead:
            of_tokens = pages.repeat_interleave(torch.tensor(query_lens))
            where = of_tokens, self._positions, query_lens, pages.tolist(), 1 + num_ahead
            return RowsAhead.of_batch(*where, kept)
        decodes = StateRows(pages[:n], torch.tensor(group.seq_lens[:n], dtype=torch.int64) <= 1)
        return state_rows_of_batch(decodes, query_lens, group.seq_lens, pages.tolist(), kept)

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall`: q and k are normalised and rotated in place, the KV of all tokens is written, then all
        attend."""
        return self._attend(layer, *self._prepared(layer, qkv))

    def write(self, layer: AttentionLayer, qkv: Tensor) -> None:
        """See `AttentionCall`."""
        self._write(layer, self._prepared(layer, qkv)[1])

    def _prepared(self, layer: AttentionLayer, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the arguments of `_attend`, q and k normalised and rotated, which are parts of qkv."""
        heads = qkv.view(qkv.shape[0], -1, layer.head_dim)  # q heads, k heads, v heads of each token
        q_and_k = heads[:, : layer.num_heads + layer.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_and_k[:, : layer.num_heads] = layer.q_norm(q_and_k[:, : layer.num_heads])
            q_and_k[:, layer.num_heads :] = layer.k_norm(q_and_k[:, layer.num_heads :])
        if layer.rope is not None:
            self._ropes[layer.rope].apply(q_and_k, layer.num_heads)
        kv = heads[:, layer.num_heads :].unflatten(1, (2, layer.num_kv_heads))
        return heads[:, : layer.num_heads], kv

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionCall`."""
        value_dim = v.shape[2]
        kv = torch.stack((k, F.pad(v, (0, layer.head_dim - value_dim))), 1)
        out = self._attend(layer, q.contiguous(), kv)
        if value_dim < layer.head_dim:
            out = out.unflatten(1, (-1, layer.head_dim))[..., :value_dim].flatten(1)
        return out

    def attend_to_latents(self, layer: AttentionLayer, q: Tensor, latents: Tensor) -> Tensor:
        """See `AttentionCall`."""
        kept, both = self._kv_cache.layers[layer.index], torch.cat((q, latents[:, None]), 1)
        assert layer.rope is not None and kept.value_dim is not None
        self._ropes[layer.rope].apply(both, layer.num_heads)
        own = kept.kept(both[:, layer.num_heads :, None])
        write_kv(own, kept.cache[:, :, :1], self._groups[kept.group].slot_mapping)
        out = self._read(layer, both[:, : layer.num_heads], own.expand(-1, 2, -1, -1))
        return values_of(out, layer.num_heads, kept.value_dim)

    def _write(self, layer: AttentionLayer, kv: Tensor) -> Tensor:
        """Write [num_tokens, 2, num_kv_heads, head_dim] to the cache; returns them as they are kept there."""
        own = self._kv_cache.layers[layer.index]
        kept = own.kept(kv)
        write_kv(kept, own.cache, self._groups[own.group].slot_mapping)
        return kept

    def _attend(self, layer: AttentionLayer, q: Tensor, kv: Tensor) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; kv: [num_tokens, 2, num_kv_heads, head_dim]."""
        return self._read(layer, q, self._write(layer, kv))

    def _read(self, layer: AttentionLayer, q: Tensor, kv: Tensor) -> Tensor:
        """`_attend` where ``kv`` is written, and is as it is kept."""
        kept = self._kv_cache.layers[layer.index]
        cache, group, n = kept.cache, self._groups[kept.group].batch, self._num_decodes
        block_size, how = cache.shape[1], layer.scores(kept.window)
        parts = []
        if n:
            table, lens = self._decodes[kept.group]
            parts.append(decode_attention(q[:n], cache, table, lens, how, kept.scales))
        for i, start, stop in self._alone:
            seq_len = group.seq_lens[i]
            blocks = group.block_table[i, : -(-seq_len // block_size)]
            if self._kv_cache.policy.batch_invariant:
                own = q[start:stop], cache, blocks, seq_len
                parts.append(invariant_attention(*own, how, kept.scales, skipped=group.skipped[i]))
            else:
                new = q[start:stop], kv[start:stop]
                parts.append(prefill_attention(*new, cache, blocks, seq_len, how, kept.scales))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
