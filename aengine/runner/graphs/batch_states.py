"""States of layers in steps with prompts that run as graphs: the tables of a step's sequences, in memory that stays.

The host knows all of them, so they come with the rows, in one copy a step for each KV group with states:

    plan ─> tables, padded (state_tables.py) ─> memory of the shape ─> [ layers ]

A step with more prompts than a shape has room for, or whose states are kept at more places, runs op by op, by tables of
its own: what chunks leave for each other takes memory (of Qwen3-Next's layers 1 MiB a chunk).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.sequences import CHUNK, Sequences
from ..input_batch import BatchPlan
from ..kv_spec import KVLayout, StateKV
from ..layers.states import StateRows, cuts_of, kept_within
from ..state_tables import StepTables, TableSizes, tables_of, views_of
from ..transfer import send, to_device

_PROMPTS, _CUTS = 64, 16


class BatchStates:
    """Tables of a model in which no layer has states: there are none."""

    may_be_graphs = True

    def send(self, plan: BatchPlan | None, num_tokens: int, num_reqs: int) -> bool:
        """Tell what the next step of this shape computes; None: nothing. False: its graph can't hold that."""
        return True

    def rows(self, group: int, num_tokens: int, num_reqs: int) -> StateRows:
        """Return where the requests of that step keep their states, in a KV group."""
        raise AssertionError("no layer has states")


class StatesInMemory(BatchStates):
    def __init__(self, groups: list[int], spare_page: int, device: torch.device) -> None:
        """``groups``: KV groups with states; ``spare_page``: a page that no request has."""
        self._groups = groups
        self._spare_page = spare_page
        self._device = device
        self._words: dict[tuple[int, int], Tensor] = {}  # int64 [num_groups, num_words] of each shape
        self._apart: dict[int, Sequences] = {}  # tables by group of a step that no graph holds

    def _sizes(self, num_tokens: int, num_reqs: int) -> TableSizes:
        most = -(-num_tokens // CHUNK) + min(num_reqs, _PROMPTS) + _CUTS
        return TableSizes(num_tokens, num_reqs, min(num_tokens, num_reqs), min(num_tokens, most), _CUTS)

    def send(self, plan: BatchPlan | None, num_tokens: int, num_reqs: int) -> bool:
        """See `BatchStates`."""
        sizes = self._sizes(num_tokens, num_reqs)
        of_groups = [self._tables(plan, group) for group in self._groups]
        most = TableSizes(*map(max, *(tables.sizes for tables in of_groups), of_groups[0].sizes))
        fits = sizes.holds(most)
        if not fits:
            sizes = sizes._replace(chunks=most.chunks, cuts=most.cuts)
        words = np.stack([tables.laid_out(sizes, self._spare_page) for tables in of_groups])
        self._apart = {}
        if not fits:
            rows = to_device(words, self._device)
            self._apart = {group: views_of(own, sizes) for group, own in zip(self._groups, rows, strict=True)}
            return False
        if (num_tokens, num_reqs) not in self._words:
            with torch.inference_mode(False):  # it may be made in that mode, and is written outside of it too
                self._words[num_tokens, num_reqs] = torch.empty(words.shape, dtype=torch.int64, device=self._device)
        send(words, self._words[num_tokens, num_reqs])
        return True

    def rows(self, group: int, num_tokens: int, num_reqs: int) -> StateRows:
        """See `BatchStates`."""
        sequences = self._apart.get(group)
        if sequences is None:
            words = self._words[num_tokens, num_reqs][self._groups.index(group)]
            sequences = views_of(words, self._sizes(num_tokens, num_reqs))
        return StateRows(sequences.singles, sequences.begins, (), sequences)

    @staticmethod
    def _tables(plan: BatchPlan | None, group: int) -> StepTables:
        if plan is None:
            return tables_of([], 0, [], [], [])
        assert plan.state_pages is not None
        begins = plan.seq_lens == plan.query_lens
        cuts = cuts_of(kept_within(plan.kept_states, group))
        return tables_of(plan.query_lens, plan.num_decodes, plan.state_pages[group], begins, cuts)


class StatesOpByOp(StatesInMemory):
    """Tables of layers whose states can't be computed in a graph: kernels are compiled by steps without tokens."""

    may_be_graphs = False

    def rows(self, group: int, num_tokens: int, num_reqs: int) -> StateRows:
        """See `BatchStates`."""
        rows = super().rows(group, num_tokens, num_reqs)
        return rows._replace(pages=rows.pages[:0], begins=rows.begins[:0])


NO_STATES = BatchStates()


def batch_states_of(layout: KVLayout, spare_page: int, device: torch.device) -> BatchStates:
    """Choose for the layers of a pool. Ops take all requests together of states that can be rid of tokens; where they
    may have to be, steps with prompts run op by op."""
    states = {place.group: place.kv for place in layout.layers if place is not None and isinstance(place.kv, StateKV)}
    if not states:
        return NO_STATES
    is_any_op_by_op = any(
        kv.num_ahead or not any(tensor.per_position for tensor in kv.tensors) for kv in states.values()
    )
    return (StatesOpByOp if is_any_op_by_op else StatesInMemory)(sorted(states), spare_page, device)
