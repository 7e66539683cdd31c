"""Attention of a recorded model on a CPU: compiled ops over the pages of `KvCache`, and the memory that they read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.ops import attend, gated_conv, write_qkv
from ...kernels.cpu.tape import NotRecorded
from ...kernels.rotary import Rope
from ...kernels.short_conv import TokenConv
from ..input_batch import InputBatch
from ..layers.attention import AttentionLayer
from ..layers.states import LayerStates
from ..rope import RopeConfig, rope_tables
from .kv_pages import LayerStatePlace
from .torch_attention import KvCache

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class StepMemory:
    """What the ops of a tape read of a step's tokens: memory of one address for all steps."""

    def __init__(self, max_tokens: int, tables: Tensor) -> None:
        """``tables``: int32 [num_groups, max_num_seqs, width], the persistent block tables."""
        self.tables = tables.unbind()
        self.positions = torch.zeros(max_tokens, dtype=torch.int64)
        self.rows = torch.zeros(max_tokens, dtype=torch.int64)  # row of the block tables, of each token
        self._slots = torch.zeros(len(tables), max_tokens, dtype=torch.int64)
        self.slots = self._slots.unbind()  # one for each KV group
        self._kept_pages = torch.zeros(len(tables), max_tokens, dtype=torch.int64)
        self.kept_pages = self._kept_pages.unbind()  # one for each KV group: see `gated_conv`

    def fill(self, batch: InputBatch) -> None:
        plan, inputs = batch.plan, batch.inputs
        n = plan.num_tokens
        self.positions[:n] = inputs.positions
        self._slots[:, :n] = inputs.slot_mapping
        self.rows.numpy()[:n] = plan.rows if n == len(plan.rows) else np.repeat(plan.rows, plan.query_lens)
        self._kept_pages[:, :n] = 0
        if plan.kept_states is not None:
            place, count, group, page = plan.kept_states.T
            begins = plan.query_lens.cumsum() - plan.query_lens
            self._kept_pages.numpy()[group, begins[place] + count - 1] = 1 + page


class TapeStates(LayerStates):
    """A layer's states, which ops find by the rows of the block table. What a step's requests are is not known when an
    op is recorded: who asks has an op that is not."""

    __slots__ = ("_kept", "_memory", "_table")

    def __init__(self, place: LayerStatePlace, memory: StepMemory) -> None:
        self.tensors = place.tensors
        self._memory, self._table, self._kept = memory, memory.tables[place.group], memory.kept_pages[place.group]

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded("a layer with states")

    def conv_of_all(self, name: str, weight: Tensor, bias: Tensor | None) -> TokenConv | None:
        return None

    def gated_conv(self, name: str, gates: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        where = self._memory.positions, self._memory.rows, self._table
        return gated_conv(gates, weight, bias, self.tensors[name], *where, self._kept)


class TapeAttention:
    """See `AttentionCall`: records what a step's layers launch."""

    def __init__(self, cache: KvCache, memory: StepMemory, ropes: list[Rope]) -> None:
        self._cache = cache
        self._memory = memory
        self._ropes = ropes

    def begin(self, positions: Tensor) -> None:
        assert positions is self._memory.positions

    def first_lens(self) -> Tensor | None:
        return None

    def states(self, index: int) -> LayerStates:
        return TapeStates(self._cache.states[index], self._memory)

    def write(self, layer: AttentionLayer, qkv: Tensor) -> None:
        raise NotRecorded("a layer that attends to nothing")

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotRecorded("a layer that turns its heads itself")

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        kept, memory = self._cache.layers[layer.index], self._memory
        heads, head_dim = kept.cache.shape[3:]
        if kept.cache.dtype not in _DTYPES or head_dim % 16 or layer.num_heads > 16 * heads:
            raise NotRecorded(f"attention of {layer.num_heads} heads over {heads} of {head_dim} in {kept.cache.dtype}")
        rope = None if layer.rope is None else self._ropes[layer.rope]
        pages = kept.cache, kept.scales
        write_qkv(qkv, memory.positions, memory.slots[kept.group], rope, layer.norms, layer.num_heads, *pages)
        where = memory.positions, memory.rows, memory.tables[kept.group]
        return attend(qkv, *where, kept.cache, layer.scores(kept.window), kept.scales)


def tape_rope(config: RopeConfig, num_positions: int) -> Rope:
    """Cosines and sines of all positions. Raises NotRecorded: they depend on more than the position."""
    if config.long() is not None:
        raise NotRecorded("a rotary embedding that depends on a request's length")
    return rope_tables(config, num_positions, torch.device("cpu"))
