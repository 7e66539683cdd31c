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
    settle_drafts,
)
from ...kernels.gated_delta import gated_delta_of_prompts
from ...kernels.sequences import Sequences
from ..layers.states import LayerStates, StateRows, StateSpan, sequences_of_spans
from ..transfer import to_device


class LongSpans(NamedTuple):
    """Requests with more tokens than may have been guessed: all of theirs are certain, and follow those of others."""

    sequences: Sequences
    firsts: Tensor  # int64 [m]: the position of each one's first token
    counts: Tensor  # int64 [m]: tokens of each
    last: Tensor  # int64: the tokens of the batch that are the last ones of each, as many as a filter reads


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
        cls, pages: Tensor, positions: Tensor, query_lens: Sequence[int], of_requests: Sequence[int], most: int
    ) -> RowsAhead:
        """``query_lens``, ``of_requests``: host [num_reqs], tokens and page of each; those of at most ``most`` tokens
        lead."""
        lens = np.array(query_lens, dtype=np.int64)
        num_short = int(np.count_nonzero(lens <= most))
        ends = lens.cumsum()
        begin = int(ends[num_short - 1]) if num_short else 0
        if num_short == len(lens):
            return cls(pages, positions, begin)
        own, device = lens[num_short:], positions.device
        starts = ends[num_short:] - own
        spans = [
            StateSpan(int(start - begin), int(start - begin + length), int(page), False)
            for start, length, page in zip(starts, own, of_requests[num_short:], strict=True)
        ]
        sequences = sequences_of_spans(spans, device)
        firsts = positions.index_select(0, sequences.starts[:-1] + begin)
        last = np.concatenate([np.arange(end - most, end) for end in ends[num_short:]])
        long = LongSpans(
            sequences._replace(begins=firsts == 0), firsts, sequences.starts.diff(), to_device(last, device)
        )
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
            keep_last(x[last], ring, rows.pages[last], rows.positions[last])
        return y

    def gated_delta(self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See `LayerStates`."""
        rows, n = self._rows, self._rows.num_short
        memory = DeltaMemory(self.tensors[name], self.tensors["pending"], self.tensors["tags"])
        parts = []
        if n:
            short = DeltaInputs(q[:n], k[:n], v[:n], decay[:n], beta[:n])
            parts.append(gated_delta_of_drafts(short, memory, rows.pages[:n], rows.positions[:n]))
        if rows.long is not None:
            sequences, firsts, counts, _ = rows.long
            settle_drafts(memory, sequences.pages, firsts, counts)
            long = q[n:], k[n:], v[n:], decay[n:], beta[n:]
            parts.append(gated_delta_of_prompts(*long, memory.states, sequences))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
