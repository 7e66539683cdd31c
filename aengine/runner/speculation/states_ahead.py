"""`StatesAhead`: a layer's states in a step whose requests may have drafts (kernels/drafted_states.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.delta_memory import DeltaGates, DeltaInputs, DeltaMemory
from ...kernels.drafted_states import (
    conv_of_drafts,
    gated_delta_of_drafts,
    keep_last,
    nothing_pends_behind,
    settle_drafts,
)
from ...kernels.gated_delta import gated_delta_of_prompts
from ...kernels.sequences import Sequences
from ...kernels.short_conv import TokenConv
from ..layers.states import KeptWithin, LayerStates, StateRows, cuts_of
from ..state_tables import sequences_of
from ..transfer import to_device


class LongSpans(NamedTuple):
    """Requests with more tokens than may have been guessed: all of theirs are certain, and follow those of others."""

    sequences: Sequences
    firsts: Tensor  # int64 [m]: the position of each one's first token
    counts: Tensor  # int64 [m]: tokens of each
    last: Tensor  # int64: the last tokens before the end of each, and before its states are kept: as a filter reads
    last_pages: Tensor  # int64: the page that gets each of these
    kept: Tensor  # int64 [2, k]: pages of the states that are kept, and the last token before that

    @classmethod
    def of(
        cls, lens: Sequence[int], pages: Sequence[int], begin: int, most: int, positions: Tensor, kept: KeptWithin
    ) -> LongSpans:
        """``lens``, ``pages``: of the requests behind token ``begin``; ``most``: tokens that a filter may read."""
        device, starts = positions.device, [begin, *(begin + np.cumsum(lens)).tolist()]
        first_tokens, counts = to_device(np.array([starts[:-1], lens], dtype=np.int64), device)
        firsts = positions.index_select(0, first_tokens)
        cuts = cuts_of(kept)
        sequences = sequences_of(lens, 0, pages, [False] * len(lens), cuts, device)
        sequences = sequences._replace(begins=(firsts == 0).long())
        ends = [(starts[cut.sequence] + cut.num_tokens, cut.page) for cut in cuts]
        filled = [
            (place, page)
            for end, page in (*zip(starts[1:], pages, strict=True), *ends)
            for place in range(end - most, end)
        ]
        last, last_pages = _columns(filled, device)
        behind = _columns([(page, end - 1) for end, page in ends], device)
        return cls(sequences, firsts, counts, last, last_pages, behind)


def _columns(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return to_device(np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy(), device)


class RowsAhead(NamedTuple):
    """Where the requests of a step keep their states, in one KV group."""

    pages: Tensor  # int64 [num_tokens]: page of each token's request; padding has the spare page
    positions: Tensor  # int64 [num_tokens]; 0 of padding
    num_short: int  # leading tokens: those of requests that may have drafts
    long: LongSpans | None = None

    @property
    def num_decodes(self) -> int:
        return self.num_short

    def of_layer(self, tensors: Mapping[str, Tensor]) -> LayerStates:
        return StatesAhead(tensors, self)

    @classmethod
    def of_decodes(cls, rows: StateRows, seq_lens: Tensor) -> RowsAhead:
        """``rows``: of tokens that lead a batch, or are all of it; seq_lens: int32 [n], of each with those before."""
        return cls(rows.pages, (seq_lens.long() - 1).clamp_(min=0), len(seq_lens))

    @classmethod
    def of_batch(
        cls,
        pages: Tensor,
        positions: Tensor,
        query_lens: Sequence[int],
        of_requests: Sequence[int],
        most: int,
        kept: KeptWithin,
    ) -> RowsAhead:
        """``query_lens``, ``of_requests``: host [num_reqs], tokens and page of each; those of at most ``most`` tokens
        lead. States are kept behind no fewer."""
        num_short = sum(length <= most for length in query_lens)
        lens, own, long = query_lens[num_short:], of_requests[num_short:], None
        begin = sum(query_lens[:num_short])
        if lens:
            of_long = {place - num_short: cuts for place, cuts in kept.items()}
            long = LongSpans.of(lens, own, begin, most, positions, of_long)
        return cls(pages, positions, begin, long)


class StatesAhead(LayerStates):
    """One layer's states in one step. They have the form of `StateKV.with_ahead`."""

    __slots__ = ("_rows",)

    def __init__(self, tensors: Mapping[str, Tensor], rows: RowsAhead) -> None:
        self.tensors = tensors
        self._rows = rows

    def conv(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `LayerStates`."""
        rows, ring = self._rows, self.tensors[name]
        y = conv_of_drafts(x, weight, bias, ring, rows.pages, rows.positions, rows.num_short)
        if rows.long is not None:
            last = rows.long.last
            keep_last(x[last], ring, rows.long.last_pages, rows.positions[last])
        return y

    def conv_of_all(self, name: str, weight: Tensor, bias: Tensor | None) -> TokenConv | None:
        """See `LayerStates`."""
        return None

    def gated_delta(self, name: str, inputs: DeltaInputs, gates: DeltaGates) -> Tensor:
        """See `LayerStates`."""
        rows, n = self._rows, self._rows.num_short
        memory = DeltaMemory(self.tensors[name], self.tensors["pending"], self.tensors["tags"])
        parts = []
        if n:
            own = inputs.of(slice(n))
            parts.append(gated_delta_of_drafts(own, gates, memory, rows.pages[:n], rows.positions[:n]))
        if rows.long is not None:
            long, (pages, last) = rows.long, rows.long.kept
            settle_drafts(memory, long.sequences.pages, long.firsts, long.counts)
            parts.append(gated_delta_of_prompts(inputs.of(slice(n, None)), gates, memory.states, long.sequences))
            nothing_pends_behind(memory, pages, rows.positions[last])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
