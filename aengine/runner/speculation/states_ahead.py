"""`StatesAhead`: a layer's states in a step whose requests may have drafts (kernels/drafted_states.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.delta_memory import DeltaInputs, DeltaMemory
from ...kernels.drafted_states import (
    conv_of_drafts,
    gated_delta_of_drafts,
    keep_last,
    nothing_pends_behind,
    settle_drafts,
)
from ...kernels.short_conv import TokenConv
from ..layers.states import (
    KeptWithin,
    LayerStates,
    StateRows,
    StateSpan,
    Wave,
    delta_of_prompts,
    spans_of,
    waves_of_spans,
)
from ..transfer import to_device


class LongSpans(NamedTuple):
    """Requests with more tokens than may have been guessed: all of theirs are certain, and follow those of others."""

    waves: Sequence[Wave]
    pages: Tensor  # int64 [m]
    firsts: Tensor  # int64 [m]: the position of each one's first token
    counts: Tensor  # int64 [m]: tokens of each
    last: Tensor  # int64: the last tokens before the end of each, and before its states are kept: as a filter reads
    last_pages: Tensor  # int64: the page that gets each of these
    kept: Tensor  # int64 [2, k]: pages of the states that are kept, and the last token before that

    @classmethod
    def of(
        cls, spans: Sequence[StateSpan], begin: int, most: int, positions: Tensor, like: LongSpans | None
    ) -> LongSpans:
        """``spans``: those that follow token ``begin``; ``most``: tokens that a filter reads, at most."""
        device, stops = positions.device, [span.stop for span in spans if span.kept < 0]
        starts = [begin, *stops[:-1]]
        own = [span.page for span in spans if span.kept < 0], starts, np.subtract(stops, starts)
        pages, first_tokens, counts = to_device(np.array(own, dtype=np.int64), device)
        firsts = positions.index_select(0, first_tokens)
        first, *others = waves_of_spans(spans, begin, device, like.waves if like else ())
        first = first._replace(sequences=first.sequences._replace(begins=firsts == 0))
        filled = [
            (place, span.page if span.kept < 0 else span.kept)
            for span in spans
            for place in range(span.stop - most, span.stop)
        ]
        last, last_pages = _columns(filled, device)
        kept = _columns([(span.kept, span.stop - 1) for span in spans if span.kept >= 0], device)
        return cls([first, *others], pages, firsts, counts, last, last_pages, kept)


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
        like: RowsAhead | None = None,
    ) -> RowsAhead:
        """``query_lens``, ``of_requests``: host [num_reqs], tokens and page of each; those of at most ``most`` tokens
        lead. States are kept behind no fewer. ``like``: rows of another KV group in the same step."""
        num_short = sum(length <= most for length in query_lens)
        begin = start = sum(query_lens[:num_short])
        spans: list[StateSpan] = []
        for i in range(num_short, len(query_lens)):
            spans += spans_of(start, query_lens[i], of_requests[i], False, kept.get(i, ()))
            start = spans[-1].stop
        long = LongSpans.of(spans, begin, most, positions, like.long if like else None) if spans else None
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

    def gated_delta(self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See `LayerStates`."""
        rows, n = self._rows, self._rows.num_short
        memory = DeltaMemory(self.tensors[name], self.tensors["pending"], self.tensors["tags"])
        parts = []
        if n:
            short = DeltaInputs(q[:n], k[:n], v[:n], decay[:n], beta[:n])
            parts.append(gated_delta_of_drafts(short, memory, rows.pages[:n], rows.positions[:n]))
        if rows.long is not None:
            long, (pages, last) = rows.long, rows.long.kept
            settle_drafts(memory, long.pages, long.firsts, long.counts)
            inputs = q[n:], k[n:], v[n:], decay[n:], beta[n:]
            parts.append(delta_of_prompts(inputs, memory.states, long.waves))
            nothing_pends_behind(memory, pages, rows.positions[last])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
