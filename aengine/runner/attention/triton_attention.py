"""Attention on a GPU: the paged KV cache, and the two ways in which a step reads it.

    bind_decode         every request has one new token: norm of q and k, rotary, KV write and attention are one launch
    bind, bind_batch    any batch: one launch rotates and writes all tokens; then decodes and prompts, each its kernel

A layer's cache is [num_blocks, block_size, 2, num_kv_heads, head_dim] as it is indexed, and lies in memory as
[num_blocks, 2, num_kv_heads, block_size, head_dim], so that a head's tokens of a block are one run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from ...kernels.input_prep import PreparedInputs
from ...kernels.varlen_attention import plan_prompts, varlen_attention
from ...kernels.write_qkv import apply_rope_and_write_kv
from ..input_batch import BatchPlan, InputBatch
from ..layers.attention import AttentionLayer
from ..layers.states import LayerStates, StateRows, state_rows_of_batch, state_rows_of_decodes
from ..model_config import ModelConfig
from .kv_pages import KvCacheSpec
from .library import PrefillBackend, PrefillMetadata

__all__ = ["BatchAttention", "DecodeAttention", "GpuKvCache"]


class GpuKvCache:
    """The KV of all layers, and what the attention kernels share."""

    clears_blocks = False  # the kernels never read past a sequence's end, nor before its window

    def __init__(self, spec: KvCacheSpec, prefill: PrefillBackend) -> None:
        pages = spec.make_pages(has_spare=True)  # where padding writes its states
        self.spare_page = spec.num_blocks
        self.states = pages.states()
        self.layout = pages.layout
        self.layers = pages.layers(heads_first=True)
        self.dtype = spec.dtype
        self.num_heads = spec.config.num_heads
        self.prefill = prefill
        self.rope = rope_table(spec.config, spec.max_model_len, spec.device)
        self.workspaces = {
            shape: DecodeWorkspace(spec.max_num_seqs, self.num_heads, *shape, spec.device)
            for shape in {layer.heads for layer in self.layers.values()}
        }

    def watch_rows(self, first_lens: Tensor) -> None:
        """See `KvMemory`."""

    def bind(self, batch: InputBatch) -> BatchAttention:
        return BatchAttention(self, batch.inputs, batch.idx_mapping, batch.block_table, batch.plan)

    def bind_batch(self, inputs: PreparedInputs, rows: Tensor, block_table: Tensor) -> BatchAttention:
        return BatchAttention(self, inputs, rows, block_table, None)

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> DecodeAttention:
        return DecodeAttention(self, rows, seq_lens, block_table)

    def clear_blocks(self, block_ids: Tensor) -> None:
        raise AssertionError("nothing needs to be cleared")


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines, of position times each frequency, times the factor."""
    inv_freq, factor = config.ropes[0].inv_freq()
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * inv_freq.to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(factor)


class DecodeAttention:
    """Attention of a step, or a part of one, whose every request has one token; all in memory that a graph may replay.

    rows: int64 [n], -1 for padding; seq_lens: int32 [n]; block_table: int32 [num_groups, max_num_seqs, width].
    """

    def __init__(self, cache: GpuKvCache, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> None:
        self._cache = cache
        self._block_tables = block_table.unbind()  # of each group
        # A plan for each kind of layer: which keys there are depends on the window, how they are cut on the heads.
        self._plans = {
            kind: plan_decode(rows, seq_lens, cache.workspaces[kind[0]], kind[1])
            for kind in dict.fromkeys((kept.heads, kept.window) for kept in cache.layers.values())
        }
        self.size = len(rows)
        self._rows, self._seq_lens = rows, seq_lens
        self._state_rows: dict[int, StateRows] = {}  # by KV group

    def begin(self, positions: Tensor) -> None:
        pass

    def states(self, index: int) -> LayerStates:
        place = self._cache.states[index]
        return LayerStates(place.tensors, self.state_rows(place.group))

    def state_rows(self, group: int) -> StateRows:
        if group not in self._state_rows:
            table, spare = self._block_tables[group], self._cache.spare_page
            self._state_rows[group] = state_rows_of_decodes(table, self._rows, self._seq_lens, spare)
        return self._state_rows[group]

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        return self._call(layer, qkv, None)

    def forward_rotated(self, layer: AttentionLayer, qkv: Tensor, out: Tensor) -> None:
        """`forward` where q and k are rotated, and k and v written, already; into the first rows of ``out``."""
        self._call(layer, qkv, out)

    def _call(self, layer: AttentionLayer, qkv: Tensor, out: Tensor | None) -> Tensor:
        kept = self._cache.layers[layer.index]
        return decode_step_attention(
            qkv,
            kept.cache,
            self._block_tables[kept.group],
            self._cache.rope,
            *_norms(layer),
            layer.num_heads,
            layer.scale,
            kept.window,
            self._plans[kept.heads, kept.window],
            self._cache.workspaces[kept.heads],
            is_raw=out is None,
            out=out,
        )


class BatchAttention:
    """Attention of any batch: decodes lead, prompts and chunks of prompts follow.

    ``plan``: what the host knows of it; None inside a graph, where nothing may depend on it: both kernels run, and skip
    on the device what is the other's.
    """

    def __init__(
        self, cache: GpuKvCache, inputs: PreparedInputs, rows: Tensor, block_table: Tensor, plan: BatchPlan | None
    ) -> None:
        self._cache = cache
        self._inputs = inputs
        self._slot_mappings = inputs.slot_mapping.unbind()  # of each group
        self._rows = rows
        self._block_tables = block_table.unbind()  # of each group
        self._has_prompts = plan is None or plan.num_decodes < plan.num_reqs
        self._prompts: dict[tuple[int, int], Tensor] = {}  # plans, by the layer's key-value heads and their size
        self._metadata: PrefillMetadata | None = None
        self._num_decodes = 0 if plan is None else plan.num_decodes
        self._plan = plan
        n = self._num_decodes
        if plan is not None and self._has_prompts and plan.is_exact and cache.prefill.is_faster(plan.query_lens[n:]):
            self._metadata = PrefillMetadata.of(rows[n:], block_table, plan.query_lens[n:], plan.seq_lens[n:])
        elif self._has_prompts:
            self._prompts = self._plan_prompts()
        self._state_rows: dict[int, StateRows] = {}  # by KV group
        self._decodes: DecodeAttention | None = None
        if plan is None or plan.num_decodes:
            n = min(len(rows), len(inputs.positions))
            query_lens = inputs.query_start_loc[1 : n + 1] - inputs.query_start_loc[:n]
            lens = torch.where(query_lens == 1, inputs.seq_lens[:n], 0)
            self._decodes = DecodeAttention(cache, rows[:n], lens, block_table)

    def begin(self, positions: Tensor) -> None:
        pass

    def states(self, index: int) -> LayerStates:
        place = self._cache.states[index]
        if place.group not in self._state_rows:
            self._state_rows[place.group] = self._find_states(place.group)
        return LayerStates(place.tensors, self._state_rows[place.group])

    def _find_states(self, group: int) -> StateRows:
        """Without a plan there are none: a model with states has no graphs of batches, kernels are compiled at most."""
        plan = self._plan
        nothing = self._rows[:0]
        decodes = StateRows(nothing, nothing > 0, ())
        if plan is None:
            return decodes
        if self._decodes is not None:
            pages, begins, _ = self._decodes.state_rows(group)
            decodes = StateRows(pages[: plan.num_decodes], begins[: plan.num_decodes], ())
        assert plan.state_pages is not None
        return state_rows_of_batch(decodes, plan.query_lens.tolist(), plan.seq_lens.tolist(), plan.state_pages[group])

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        cache, positions = self._cache, self._inputs.positions
        kept = cache.layers[layer.index]
        slots = self._slot_mappings[kept.group]
        apply_rope_and_write_kv(qkv, positions, slots, cache.rope, *_norms(layer), layer.num_heads, kept.cache)
        out = self._attend_to_prompts(layer, qkv)
        if self._decodes is not None:
            self._decodes.forward_rotated(layer, qkv[: self._decodes.size], out)
        return out

    def _plan_prompts(self) -> dict[tuple[int, int], Tensor]:
        inputs, cache = self._inputs, self._cache
        where = (self._rows, inputs.query_start_loc, inputs.seq_lens, len(inputs.positions))
        return {
            (heads, head_dim): plan_prompts(*where, cache.num_heads // heads, cache.dtype, head_dim, skip_single=True)
            for heads, head_dim in cache.workspaces
        }

    def _attend_to_prompts(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim]; the decodes' rows are not written."""
        kept = self._cache.layers[layer.index]
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        if not self._has_prompts:
            return torch.empty((len(qkv), layer.num_heads * layer.head_dim), dtype=qkv.dtype, device=qkv.device)
        if self._metadata is not None:
            n = self._num_decodes
            out = self._cache.prefill.prefill(q[n:], k[n:], v[n:], kept, self._metadata, layer.scale)
            if out is not None:
                return out if n == 0 else torch.cat((out.new_empty((n, out.shape[1])), out))
            self._metadata = None
            self._prompts = self._plan_prompts()
            # The attention reads the plan ahead of its wait (kernels/varlen_attention.py): this launch is not early, so
            # the plan is written when it begins.
            qkv.new_zeros(1)
        where = (self._block_tables[kept.group], self._prompts[kept.heads], len(self._rows))
        return varlen_attention(q, kept.cache, *where, layer.scale, kept.window)


def _norms(layer: AttentionLayer) -> tuple[Tensor | None, Tensor | None, float]:
    if layer.q_norm is None or layer.k_norm is None:
        return None, None, 0.0
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
