"""States of fixed size (a linear attention's, a convolution's) as a layer gets at them in one step.

A request's state lies in its page of the layer's KV group, and is read and written in place. A step in which each
request has one token takes them together, by page ids on the device, so that a graph may replay it. A step with others
does too, by tables that say where each request's tokens are, and where within them its states are kept
(`Sequences`; state_tables.py). Ops that know neither take requests one by one, by views of the memory (`StateSpan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...kernels.delta_memory import DeltaGates, DeltaInputs
from ...kernels.gated_delta import gated_delta_of_prompts, gated_delta_of_tokens
from ...kernels.input_prep import state_pages
from ...kernels.sequences import Cut, Sequences
from ...kernels.short_conv import TokenConv, conv_of_prompts, conv_of_tokens
from ..state_tables import sequences_of


class StateSpan(NamedTuple):
    """The tokens of one request in the batch, or a part of them, and its page."""

    start: int
    stop: int
    page: int
    begins: bool  # the span has the first tokens of its sequence: there is no state yet
    kept: int = -1  # page that gets a copy of the state behind these tokens; -1: none


class StateRows(NamedTuple):
    """Where the requests of a step keep their states, in one KV group."""

    pages: Tensor  # int64 [n]: page of each leading request of one token; padding has the spare page
    begins: Tensor  # bool [n]: whether the token is its request's first
    spans: Sequence[StateSpan] = ()  # spans of all other requests
    sequences: Sequences | None = None  # all requests, for kernels; None: each has one token

    def of_layer(self, tensors: Mapping[str, Tensor]) -> LayerStates:
        return LayerStates(tensors, self)


class LayerStates:
    """One layer's states in one step: n requests of one token each lead, those of ``spans`` follow."""

    __slots__ = ("begins", "pages", "sequences", "spans", "tensors")

    def __init__(self, tensors: Mapping[str, Tensor], rows: StateRows) -> None:
        self.tensors = tensors  # [num_pages, *shape] for each tensor, by name: the memory itself
        self.pages, self.begins, self.spans, self.sequences = rows

    @property
    def num_decodes(self) -> int:
        return len(self.pages)

    def read(self, name: str) -> Tensor:
        """Return [n, *shape]: a copy of the states of the leading requests; zero where one begins."""
        states = self.tensors[name].index_select(0, self.pages)
        # Filled and not multiplied by 0: what another request left in the page may be NaN.
        return states.masked_fill_(self.begins.view(-1, *[1] * (states.dim() - 1)), 0)

    def write(self, name: str, states: Tensor) -> None:
        """Keep the states [n, *shape] of the leading requests."""
        tensor = self.tensors[name]
        tensor.index_copy_(0, self.pages, states.to(tensor.dtype))

    def conv(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x [num_tokens, channels], or of gates, behind the inputs that a state keeps, which
        move on. See kernels/short_conv.py."""
        memory = self.tensors[name]
        if self.sequences is None:
            return conv_of_tokens(x, weight, bias, memory, self.pages, self.begins)
        return conv_of_prompts(x, weight, bias, memory, self.sequences)

    def gated_conv(self, name: str, gates: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return c * `conv` of b * x, for ``gates`` [num_tokens, 3 * channels]: b, c, x."""
        return self.conv(name, gates, weight, bias)

    def conv_of_all(self, name: str, weight: Tensor, bias: Tensor | None) -> TokenConv | None:
        """Return the convolution, if each request has one token and is certain of it; else None."""
        if self.sequences is not None:
            return None
        return TokenConv(weight, bias, self.tensors[name], self.pages, self.begins)

    def gated_delta(self, name: str, inputs: DeltaInputs, gates: DeltaGates) -> Tensor:
        """Return what the gated delta rule reads out of a state, normalised and gated, [num_tokens, values]. See
        kernels/gated_delta.py."""
        memory = self.tensors[name]
        if self.sequences is None:
            return gated_delta_of_tokens(inputs, gates, memory, self.pages, self.begins)
        return gated_delta_of_prompts(inputs, gates, memory, self.sequences)

    def of(self, span: StateSpan, name: str) -> Tensor:
        """Return a request's state [*shape], a view of the memory that is changed in place; zero if the request begins.
        Call it once a step."""
        state = self.tensors[name][span.page]
        return state.zero_() if span.begins else state

    def keep(self, span: StateSpan) -> None:
        """Keep the states behind the span, which are computed, if it says so."""
        for tensor in self.tensors.values() if span.kept >= 0 else ():
            tensor[span.kept].copy_(tensor[span.page])


def state_rows_of_decodes(block_table: Tensor, rows: Tensor, seq_lens: Tensor, spare_page: int) -> StateRows:
    """Return the requests of a step of one token each, without a read of the device.

    Args:
        block_table: int32 [max_num_seqs, width], of the group
        rows: int64 [n]; -1: padding
        seq_lens: int32 [n], this step's token included
        spare_page: a page that no request has; padding writes there
    """
    return StateRows(*state_pages(block_table, rows, seq_lens, spare_page))


def state_rows_of_batch(
    decodes: StateRows,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    pages: Sequence[int] | npt.NDArray[np.int64],
    kept: KeptWithin,
) -> StateRows:
    """Return the rows of ``decodes`` and of the requests that follow them. ``query_lens`` (tokens in this step),
    ``seq_lens`` (in all) and ``pages``: host [num_reqs], of all requests of the batch."""
    first = start = len(decodes.pages)
    if first == len(query_lens):
        return decodes
    spans: list[StateSpan] = []
    begins = [seq_len == query_len for seq_len, query_len in zip(seq_lens, query_lens, strict=True)]
    for i in range(first, len(query_lens)):
        spans += spans_of(start, query_lens[i], int(pages[i]), begins[i], kept.get(i, ()))
        start += query_lens[i]
    sequences = sequences_of(query_lens, first, pages, begins, cuts_of(kept), decodes.pages.device)
    return decodes._replace(spans=spans, sequences=sequences)


KeptWithin = Mapping[int, Sequence[tuple[int, int]]]
"""Of requests, by place in the batch: after how many tokens of the step their states are kept, ascending, and pages."""


def kept_within(kept_states: npt.NDArray[np.int64] | None, group: int) -> KeptWithin:
    """Return what `BatchPlan.kept_states` has of a KV group."""
    kept: dict[int, list[tuple[int, int]]] = {}
    if kept_states is None:
        return kept
    for place, count, _, page in kept_states[kept_states[:, 2] == group].tolist():
        kept.setdefault(place, []).append((count, page))
    return kept


def cuts_of(kept: KeptWithin, first: int = 0) -> list[Cut]:
    """Return the cuts of sequences, of which the first is request ``first``."""
    return [Cut(place - first, count, page) for place, own in sorted(kept.items()) for count, page in own]


def spans_of(
    start: int, num_tokens: int, page: int, begins: bool, kept: Sequence[tuple[int, int]]
) -> Iterator[StateSpan]:
    """Yield the parts of a request's tokens, which begin at ``start``."""
    begin = 0
    for end, target in (*kept, (num_tokens, -1)):
        yield StateSpan(start + begin, start + end, page, begins and not begin, target)
        begin = end
