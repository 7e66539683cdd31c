"""Attention on a GPU: the paged KV cache, and the two ways in which a step reads it.

    bind_decode         every request has one new token: norm of q and k, rotary, KV write and attention are one launch
    bind_positions      a few tokens each: one launch rotates and writes all of them, one attends as to decodes
    bind, bind_batch    any batch: one launch rotates and writes all tokens; then decodes and prompts, each its kernel

A layer's cache is [num_blocks, block_size, 2, num_kv_heads, head_dim] as it is indexed, and lies in memory as
[num_blocks, 2, num_kv_heads, block_size, head_dim], so that a head's tokens of a block are one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from ...kernels.decode_plan import lanes_of
from ...kernels.input_prep import PreparedInputs
from ...kernels.latent_attention import attend_to_decodes as attend_to_latents_of_decodes
from ...kernels.latent_attention import attend_to_prompts as attend_to_latents_of_prompts
from ...kernels.latent_attention import plan_prompts as plan_prompts_of_latents
from ...kernels.latent_attention import write_latents
from ...kernels.paged_attention import PromptLayers
from ...kernels.rotary import HeadNorms, Rope
from ...kernels.shared_prefix import SharedKeys
from ...kernels.varlen_attention import plan_prompts, varlen_attention
from ...kernels.write_qkv import apply_rope_and_write_kv
from ..block_tables import BlockTables
from ..graphs.batch_states import batch_states_of
from ..input_batch import BatchPlan, InputBatch
from ..layers.attention import AttentionLayer
from ..layers.states import LayerStates, StateRows, kept_within, state_rows_of_batch, state_rows_of_decodes
from ..request_state import RequestState
from ..rope import rope_tables
from ..speculation.states_ahead import RowsAhead
from ..weights.step_rows import StepRows
from .kv_pages import AttentionLayerKV, KvCacheSpec
from .prefill import PrefillBackend, PrefillMetadata, TritonPrefill
from .shared_prefixes import NO_PREFIXES, NoPrefixes, SharedPrefixes


class Heads(NamedTuple):
    """Number and size of a layer's heads; of latents, into how many parts its heads are divided, and values' size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    of_latents: bool = False

    @classmethod
    def of(cls, num_heads: int, kept: AttentionLayerKV) -> Heads:
        if kept.value_dim is not None:
            return cls(num_heads, lanes_of(num_heads), kept.value_dim, True)
        return cls(num_heads, *kept.heads)


class DecodePlan(NamedTuple):
    """Plan of decodes of one token each, for layers of a kind."""

    items: Tensor  # see `plan_decode`
    shared: SharedKeys | None  # sequences that read keys together; None: none do


class GpuKvCache:
    """The KV of all layers, and what the attention kernels share."""

    make_workspace: Callable[..., Any] = DecodeWorkspace
    clears_blocks = False  # the kernels never read past a sequence's end, nor before its window

    def __init__(self, spec: KvCacheSpec, prefill: PrefillBackend) -> None:
        self.pages = pages = spec.make_pages(has_spare=True)  # the spare page is where padding writes its states
        self.spare_page = spec.num_blocks
        self.states = pages.states()
        self.batch_states = batch_states_of(pages.layout, self.spare_page, spec.device)
        self.layout = pages.layout
        self.layers = pages.layers(heads_first=True)
        query_heads = spec.config.query_heads
        self.heads = {index: Heads.of(query_heads[index], kept) for index, kept in self.layers.items()}
        self.dtype = spec.dtype
        of_latents = any(heads.of_latents for heads in self.heads.values())
        self.prefill = TritonPrefill() if of_latents else prefill
        self.ropes = [rope_tables(config, spec.max_model_len, spec.device) for config in spec.config.ropes]
        self._first_lens: Tensor | None = None
        self._borders = [None if long is None else long.border for long in (c.long() for c in spec.config.ropes)]
        self.workspaces = {
            heads: self.make_workspace(max(spec.max_num_seqs, spec.max_positions), *heads[:3], spec.device)
            for heads in dict.fromkeys(self.heads.values())
        }
        self._prefixes = NO_PREFIXES
        self.kinds = dict.fromkeys((self.heads[index], kept.window) for index, kept in self.layers.items())
        self._alike = {
            index: PromptLayers(*self.heads[index][:3], self.dtype, kept.window, kept.scales is not None)
            for index, kept in self.layers.items()
        }
        self._prompt_kinds: set[PromptLayers | Heads] = {
            heads if heads.of_latents else self._alike[index] for index, heads in self.heads.items()
        }

    def watch_rows(self, first_lens: Tensor) -> None:
        """See `KvMemory`."""
        self._first_lens = first_lens

    def decode_kinds(self, requests: RequestState, tables: BlockTables, step_rows: StepRows) -> StepRows:
        """See `KvMemory`: without and with keys that rows read together."""
        heads = [heads[:3] for heads, window in self.kinds if window is None]
        groups = {kept.group for kept in self.layers.values() if kept.window is None}
        prefixes = SharedPrefixes.of(heads, self.dtype, groups, requests, tables, step_rows)
        if prefixes is None:
            return step_rows
        self._prefixes = prefixes
        for own in heads:
            self.workspaces[Heads(*own)].reserve(prefixes.sizes.num_parts)
        return prefixes

    def first_lens_of(self, rows: Tensor) -> Tensor | None:
        """int32 [n], of rows int64 [n], -1 for padding; None: no rope depends on it."""
        if self._first_lens is None or not any(self._borders):
            return None
        return self._first_lens[rows.clamp(min=0)]

    def step_ropes(self) -> list[Rope]:
        """Return the ropes as the rows are now: which part of its table is a row's."""
        if self._first_lens is None or not any(self._borders):
            return self.ropes
        return [
            rope
            if border is None
            else rope._replace(shifts=torch.where(self._first_lens > border, border, 0).to(torch.int32))
            for rope, border in zip(self.ropes, self._borders, strict=True)
        ]

    def bind(self, batch: InputBatch) -> BatchAttention:
        return BatchAttention(self, batch.inputs, batch.idx_mapping, batch.block_table, batch.plan)

    def op_by_op(self, bound: BatchAttention) -> BatchAttention:
        return bound

    def bind_batch(self, inputs: PreparedInputs, rows: Tensor, block_table: Tensor) -> BatchAttention:
        return BatchAttention(self, inputs, rows, block_table, None)

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> DecodeAttention:
        return DecodeAttention(self, rows, seq_lens, block_table, self._prefixes)

    def bind_positions(
        self, rows: Tensor, positions: Tensor, seq_lens: Tensor, block_table: Tensor
    ) -> PositionsAttention:
        return PositionsAttention(self, rows, positions, seq_lens, block_table)

    # -- how the kernels attend

    def plan_decodes(
        self, rows: Tensor, seq_lens: Tensor, prefixes: NoPrefixes
    ) -> Mapping[tuple[Heads, int | None], Any]:
        """Plan the attention of sequences with one new token each, for each kind of layer: which keys there are depends
        on the window, how they are cut on the heads. ``prefixes``: has those that are read together."""
        plans = {}
        for heads, window in self.kinds:
            shared = prefixes.of_step(rows, seq_lens, window)
            plans[heads, window] = DecodePlan(
                plan_decode(rows, seq_lens, self.workspaces[heads], window, shared), shared
            )
        return plans

    def attend_to_decodes(
        self,
        layer: AttentionLayer,
        qkv: Tensor,
        plans: Mapping[tuple[Heads, int | None], Any],
        block_tables: Sequence[Tensor],
        rope: Rope | None,
        norms: HeadNorms | None,
        out: Tensor | None,
    ) -> Tensor:
        """Return [n, num_heads * head_dim]. ``out``: where to put it, of q and k that are rotated, and k and v that are
        written, already."""
        kept, heads = self.layers[layer.index], self.heads[layer.index]
        items, shared = plans[heads, kept.window]
        return decode_step_attention(
            qkv,
            kept.cache,
            block_tables[kept.group],
            rope,
            norms,
            layer.num_heads,
            layer.scores(kept.window),
            items,
            self.workspaces[heads],
            is_raw=out is None,
            out=out,
            kv_scales=kept.scales,
            shared=shared,
        )

    def plan_prompts(self, rows: Tensor, inputs: PreparedInputs) -> Mapping[Any, Tensor]:
        """Plan the attention of sequences with several new tokens, for each kind of layer."""
        where = (rows, inputs.query_start_loc, inputs.seq_lens, len(inputs.positions))
        return {
            kind: plan_prompts_of_latents(*where, kind.num_heads, self.dtype)
            if isinstance(kind, Heads)
            else plan_prompts(*where, kind, skip_single=True)
            for kind in self._prompt_kinds
        }

    def attend_to_prompts(
        self,
        layer: AttentionLayer,
        qkv: Sequence[Tensor],
        plans: Mapping[Any, Tensor],
        block_tables: Sequence[Tensor],
        n: int,
    ) -> Tensor:
        """Return [num_tokens, num_heads * head_dim] for q, k, v [num_tokens, heads, head_dim], which are in the cache.
        ``n``: number of sequences of the step."""
        q, k, v = qkv
        kept = self.layers[layer.index]
        where = (block_tables[kept.group], plans[self._alike[layer.index]], n)
        return varlen_attention(q, kept.cache, *where, layer.scores(kept.window), kept.scales, (k, v))

    def attend_to_latents_of_decodes(
        self,
        layer: AttentionLayer,
        q: Tensor,
        plans: Mapping[Any, Any],
        block_tables: Sequence[Tensor],
        out: Tensor | None,
    ) -> Tensor:
        """Return [n, num_heads * value_dim] for q [n, num_heads, head_dim], turned; latents are written already."""
        kept, heads = self.layers[layer.index], self.heads[layer.index]
        where = kept.cache, block_tables[kept.group], layer.scale, heads.head_dim
        plan, workspace = plans[heads, None].items, self.workspaces[heads]
        return attend_to_latents_of_decodes(q, *where, plan, workspace, out)

    def attend_to_latents_of_prompts(
        self, layer: AttentionLayer, q: Tensor, plans: Mapping[Any, Tensor], block_tables: Sequence[Tensor]
    ) -> Tensor:
        """Return [num_tokens, num_heads * value_dim], likewise."""
        kept, heads = self.layers[layer.index], self.heads[layer.index]
        where = block_tables[kept.group], plans[heads]
        return attend_to_latents_of_prompts(q, kept.cache, *where, layer.scale, heads.head_dim)

    def clear_blocks(self, block_ids: Tensor) -> None:
        raise AssertionError("nothing needs to be cleared")

    def preparations(self) -> list[Callable[[], None]]:
        return self.prefill.preparations()

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        """See `KvMemory`."""
        self.pages.copy(pairs)


class DecodeAttention:
    """Attention of a step, or a part of one, whose every request has one token; all in memory that a graph may replay.

    rows: int64 [n], -1 for padding; seq_lens: int32 [n]; block_table: int32 [num_groups, max_num_seqs, width];
    ``prefixes``: has the keys that sequences of the step read together.
    """

    def __init__(
        self,
        cache: GpuKvCache,
        rows: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        prefixes: NoPrefixes = NO_PREFIXES,
    ) -> None:
        self._cache = cache
        self._block_tables = block_table.unbind()  # one for each KV group
        self._ropes = cache.step_ropes()
        self._plans = cache.plan_decodes(rows, seq_lens, prefixes)
        self.size = len(rows)
        self._rows, self._seq_lens = rows, seq_lens
        self._state_rows: dict[int, StateRows | RowsAhead] = {}  # the rows of each KV group with states

    def begin(self, positions: Tensor) -> None:
        self._positions = positions

    def first_lens(self) -> Tensor | None:
        """See `AttentionCall`."""
        return self._cache.first_lens_of(self._rows)

    def states(self, index: int) -> LayerStates:
        place = self._cache.states[index]
        if place.group not in self._state_rows:
            rows = self.state_rows(place.group)
            has_ahead = self._cache.layout.groups[place.group].num_ahead > 0
            self._state_rows[place.group] = RowsAhead.of_decodes(rows, self._seq_lens) if has_ahead else rows
        return self._state_rows[place.group].of_layer(place.tensors)

    def state_rows(self, group: int) -> StateRows:
        table, spare = self._block_tables[group], self._cache.spare_page
        return state_rows_of_decodes(table, self._rows, self._seq_lens, spare)

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        rope = None if layer.rope is None else self._ropes[layer.rope]
        return self._call(layer, qkv, rope, layer.norms)

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionCall`."""
        return _cut(layer, self._call(layer, _join(layer, q, k, v), None, None), v)

    def attend_to_latents(self, layer: AttentionLayer, q: Tensor, latents: Tensor) -> Tensor:
        """See `AttentionCall`."""
        kept = self._cache.layers[layer.index]
        rope = None if layer.rope is None else self._ropes[layer.rope]
        write_latents(q, latents, self._places(rope), self._slots[kept.group], rope, kept.cache)
        return self.attend_to_written_latents(layer, q, None)

    def attend_to_written_latents(self, layer: AttentionLayer, q: Tensor, out: Tensor | None) -> Tensor:
        """`attend_to_latents` where q is turned, and latents are written, already; into the first rows of ``out``."""
        return self._cache.attend_to_latents_of_decodes(layer, q, self._plans, self._block_tables, out)

    def _places(self, rope: Rope | None) -> Tensor:
        """int64 [n]: where each token's position is in the rope's table."""
        if rope is None or rope.shifts is None:
            return self._positions
        return self._positions + rope.shifts[self._rows.clamp(min=0)]

    @cached_property
    def _slots(self) -> list[Tensor]:
        """int64 [n] of each KV group: where the tokens are written, -1 for padding."""
        rows, own, positions = self._rows, self._rows.clamp(min=0), self._positions
        sizes = (group.block_size for group in self._cache.layout.groups)
        return [
            torch.where(rows < 0, -1, table[own, positions // size].long() * size + positions % size)
            for table, size in zip(self._block_tables, sizes, strict=True)
        ]

    def attend_to_written(self, layer: AttentionLayer, qkv: Tensor, out: Tensor) -> None:
        """`forward` where q and k are rotated, and k and v written, already; into the first rows of ``out``."""
        self._call(layer, qkv, None, None, out)

    def _call(
        self, layer: AttentionLayer, qkv: Tensor, rope: Rope | None, norms: HeadNorms | None, out: Tensor | None = None
    ) -> Tensor:
        return self._cache.attend_to_decodes(layer, qkv, self._plans, self._block_tables, rope, norms, out)


class PositionsAttention(DecodeAttention):
    """`DecodeAttention` where a row has several tokens, each of which attends to those before it: they are written
    first, as no program of the attention may wait for another's. positions: int64 [n]; the others as there."""

    def __init__(
        self, cache: GpuKvCache, rows: Tensor, positions: Tensor, seq_lens: Tensor, block_table: Tensor
    ) -> None:
        super().__init__(cache, rows, seq_lens, block_table)
        self._positions = positions

    def begin(self, positions: Tensor) -> None:
        pass

    def write(self, layer: AttentionLayer, qkv: Tensor) -> None:
        """See `AttentionCall`."""
        self._write(layer, qkv, None if layer.rope is None else self._ropes[layer.rope], layer.norms)

    def _write(self, layer: AttentionLayer, qkv: Tensor, rope: Rope | None, norms: HeadNorms | None) -> None:
        kept, places = self._cache.layers[layer.index], self._places(rope)
        slots = self._slots[kept.group]
        apply_rope_and_write_kv(qkv, places, slots, rope, norms, layer.num_heads, kept.cache, kept.scales)

    def _call(
        self, layer: AttentionLayer, qkv: Tensor, rope: Rope | None, norms: HeadNorms | None, out: Tensor | None = None
    ) -> Tensor:
        self._write(layer, qkv, rope, norms)
        out = torch.empty((len(qkv), layer.num_heads * layer.head_dim), dtype=qkv.dtype, device=qkv.device)
        return super()._call(layer, qkv, None, None, out)


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
        self._slot_mappings = inputs.slot_mapping.unbind()  # one for each KV group
        self._rows = rows
        self._block_tables = block_table.unbind()  # one for each KV group
        self._ropes = cache.step_ropes()
        self._positions = [self._places(rope) for rope in self._ropes]
        self._has_prompts = plan is None or plan.num_decodes < plan.num_reqs
        self._prompts: Mapping[Any, Tensor] = {}  # plans
        self._metadata: PrefillMetadata | None = None
        self._num_decodes = 0 if plan is None else plan.num_decodes
        self._plan = plan
        n = self._num_decodes
        prompts = None
        if plan is not None and self._has_prompts and plan.is_exact:
            prompts = plan.query_lens[n:], plan.seq_lens[n:]
        if prompts is not None and cache.prefill.is_faster(*prompts):
            self._metadata = PrefillMetadata.of(rows[n:], block_table, *prompts)
        elif self._has_prompts:
            self._prompts = cache.plan_prompts(rows, inputs)
        self._state_rows: dict[int, StateRows | RowsAhead] = {}  # the rows of each KV group with states
        self._decodes: DecodeAttention | None = None
        if plan is None or plan.num_decodes:
            n = min(len(rows), len(inputs.positions))
            query_lens = inputs.query_start_loc[1 : n + 1] - inputs.query_start_loc[:n]
            lens = torch.where(query_lens == 1, inputs.seq_lens[:n], 0)
            self._decodes = DecodeAttention(cache, rows[:n], lens, block_table)

    def begin(self, positions: Tensor) -> None:
        pass

    def first_lens(self) -> Tensor | None:
        """See `AttentionCall`."""
        return self._cache.first_lens_of(self._rows_of_tokens())

    def states(self, index: int) -> LayerStates:
        place = self._cache.states[index]
        if place.group not in self._state_rows:
            self._state_rows[place.group] = self._find_states(place.group)
        return self._state_rows[place.group].of_layer(place.tensors)

    def _find_states(self, group: int) -> StateRows | RowsAhead:
        plan = self._plan
        if plan is None:
            return self._cache.batch_states.rows(group, len(self._inputs.positions), len(self._rows))
        nothing = self._rows[:0]
        decodes = StateRows(nothing, nothing > 0)
        assert plan.state_pages is not None
        kept = kept_within(plan.kept_states, group)
        num_ahead = self._cache.layout.groups[group].num_ahead
        if num_ahead:
            of_tokens = self._block_tables[group][:, 0].index_select(0, self._rows_of_tokens()).long()
            where = of_tokens, self._inputs.positions, plan.query_lens.tolist(), plan.state_pages[group].tolist()
            return RowsAhead.of_batch(*where, 1 + num_ahead, kept)
        if self._decodes is not None:
            rows, n = self._decodes.state_rows(group), plan.num_decodes
            decodes = StateRows(rows.pages[:n], rows.begins[:n])
        lens = plan.query_lens.tolist(), plan.seq_lens.tolist()
        return state_rows_of_batch(decodes, *lens, plan.state_pages[group], kept)

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        return self._attend(layer, qkv, *self._turned(layer), layer.norms)

    def write(self, layer: AttentionLayer, qkv: Tensor) -> None:
        """See `AttentionCall`."""
        self._write(layer, qkv, *self._turned(layer), layer.norms)

    def _turned(self, layer: AttentionLayer) -> tuple[Rope | None, Tensor]:
        """Return a layer's rope, and where each token's position is in it."""
        if layer.rope is None:
            return None, self._inputs.positions
        return self._ropes[layer.rope], self._positions[layer.rope]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionCall`."""
        out = self._attend(layer, _join(layer, q, k, v), None, self._inputs.positions, None)
        return _cut(layer, out, v)

    def attend_to_latents(self, layer: AttentionLayer, q: Tensor, latents: Tensor) -> Tensor:
        """See `AttentionCall`."""
        kept = self._cache.layers[layer.index]
        rope, positions = self._turned(layer)
        write_latents(q, latents, positions, self._slot_mappings[kept.group], rope, kept.cache)
        if self._has_prompts:
            out = self._cache.attend_to_latents_of_prompts(layer, q, self._prompts, self._block_tables)
        else:
            out = q.new_empty((len(q), layer.num_heads * self._cache.heads[layer.index].head_dim))
        if self._decodes is not None:
            self._decodes.attend_to_written_latents(layer, q[: self._decodes.size], out)
        return out

    def _write(
        self, layer: AttentionLayer, qkv: Tensor, rope: Rope | None, positions: Tensor, norms: HeadNorms | None
    ) -> AttentionLayerKV:
        kept = self._cache.layers[layer.index]
        slots = self._slot_mappings[kept.group]
        apply_rope_and_write_kv(qkv, positions, slots, rope, norms, layer.num_heads, kept.cache, kept.scales)
        return kept

    def _attend(
        self, layer: AttentionLayer, qkv: Tensor, rope: Rope | None, positions: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        kept = self._write(layer, qkv, rope, positions, norms)
        out = self._attend_to_prompts(layer, qkv, kept)
        if self._decodes is not None:
            self._decodes.attend_to_written(layer, qkv[: self._decodes.size], out)
        return out

    def _places(self, rope: Rope) -> Tensor:
        """int64 [num_tokens]: where each token's position is in the rope's table."""
        positions = self._inputs.positions
        if rope.shifts is None:
            return positions
        return positions + rope.shifts[self._rows_of_tokens().clamp(min=0)]

    def _rows_of_tokens(self) -> Tensor:
        """int64 [num_tokens]: the row of each token's request."""
        ends = self._inputs.query_start_loc[1:]
        tokens = torch.arange(len(self._inputs.positions), dtype=ends.dtype, device=ends.device)
        return self._rows[torch.searchsorted(ends, tokens, right=True).clamp_(max=len(self._rows) - 1)]

    def _attend_to_prompts(self, layer: AttentionLayer, qkv: Tensor, kept: AttentionLayerKV) -> Tensor:
        """[num_tokens, num_heads * head_dim]; the decodes' rows are not written."""
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        if not self._has_prompts:
            return torch.empty((len(qkv), layer.num_heads * layer.head_dim), dtype=qkv.dtype, device=qkv.device)
        if self._metadata is not None:
            n, how = self._num_decodes, layer.scores(kept.window)
            out = self._cache.prefill.prefill(q[n:], k[n:], v[n:], kept, self._metadata, how)
            if out is not None:
                return out if n == 0 else torch.cat((out.new_empty((n, out.shape[1])), out))
            self._metadata = None
            self._prompts = self._cache.plan_prompts(self._rows, self._inputs)
            # The attention reads the plan ahead of its wait (kernels/varlen_attention.py): this launch is not early, so
            # the plan is written when it begins.
            qkv.new_zeros(1)
        return self._cache.attend_to_prompts(layer, (q, k, v), self._prompts, self._block_tables, len(self._rows))


def _join(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q, k, and v widened by zeros."""
    return torch.cat((q, k, F.pad(v, (0, layer.head_dim - v.shape[2]))), 1).flatten(1)


def _cut(layer: AttentionLayer, out: Tensor, v: Tensor) -> Tensor:
    """Return the first elements of each head of ``out``, as many as v's heads have."""
    if v.shape[2] == layer.head_dim:
        return out
    return out.unflatten(1, (-1, layer.head_dim))[..., : v.shape[2]].flatten(1)
