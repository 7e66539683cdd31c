"""Attention on a GPU in an order that follows from a query's position: `KernelPolicy.batch_invariant`.

Norm, rotary and the KV write are a launch of their own for decodes, too, as they are for prompts; then prompts and what
has one token each take the two kernels of kernels/invariant_attention.py, which give a query the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...kernels.decode_plan import PartsWorkspace
from ...kernels.input_prep import PreparedInputs
from ...kernels.invariant_attention import attend_alone, attend_to_prompts, plan_prompts
from ..block_tables import BlockTables
from ..layers.attention import AttentionLayer
from ..request_state import RequestState
from ..weights.step_rows import StepRows
from .kv_pages import KvCacheSpec
from .prefill import TritonPrefill
from .shared_prefixes import NoPrefixes
from .triton_attention import DecodeAttention, GpuKvCache, Heads, PositionsAttention


class InvariantAttention:
    """An `AttentionBackend`."""

    name = TritonPrefill.name

    def join(self) -> None:
        pass

    def make_cache(self, spec: KvCacheSpec) -> InvariantKvCache:
        return InvariantKvCache(spec, TritonPrefill())


class InvariantKvCache(GpuKvCache):
    """The KV of all layers, and the kernels that attend to it in that order."""

    make_workspace = PartsWorkspace

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> DecodeAttention:
        return PositionsAttention(self, rows, (seq_lens - 1).clamp(min=0).long(), seq_lens, block_table)

    def decode_kinds(self, requests: RequestState, tables: BlockTables, step_rows: StepRows) -> StepRows:
        """See `KvMemory`: no row's keys are read together with others', as its parts would follow from theirs."""
        return step_rows

    def plan_decodes(
        self, rows: Tensor, seq_lens: Tensor, prefixes: NoPrefixes
    ) -> Mapping[tuple[Heads, int | None], Any]:
        """Nothing is planned: each query has the same number of programs."""
        return dict.fromkeys(self.kinds, (rows, seq_lens))

    def attend_to_decodes(
        self,
        layer: AttentionLayer,
        qkv: Tensor,
        plans: Mapping[tuple[Heads, int | None], Any],
        block_tables: Sequence[Tensor],
        *written: Any,
    ) -> Tensor:
        *_, out = written
        kept, heads = self.layers[layer.index], self.heads[layer.index]
        q = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.num_heads]
        table, (rows, seq_lens) = block_tables[kept.group], plans[heads, kept.window]
        attend_alone(q, kept.cache, table, rows, seq_lens, layer.scores(kept.window), self.workspaces[heads], out)
        return out

    def plan_prompts(self, rows: Tensor, inputs: PreparedInputs) -> Mapping[Any, Tensor]:
        where = (rows, inputs.query_start_loc, inputs.seq_lens, len(inputs.positions))
        return {
            heads: plan_prompts(*where, heads.num_heads // heads.num_kv_heads, heads.head_dim)
            for heads in self.workspaces
        }

    def attend_to_prompts(
        self,
        layer: AttentionLayer,
        qkv: Sequence[Tensor],
        plans: Mapping[Any, Tensor],
        block_tables: Sequence[Tensor],
        n: int,
    ) -> Tensor:
        kept = self.layers[layer.index]
        where = (block_tables[kept.group], plans[self.heads[layer.index]])
        return attend_to_prompts(qkv[0], kept.cache, *where, layer.scores(kept.window))
