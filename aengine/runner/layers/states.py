"""States of fixed size (a linear attention's, a convolution's) as a layer gets at them in one step.

A request's state lies in its page of the layer's KV group, and is read and written in place. Requests of one token lead
the batch and are taken together, by page ids on the device, so that a graph may replay it. The others follow: an op may
take them together too (`Sequences`), or one by one, by views of the memory (`StateSpan`).

Where a request's states are to be kept within its tokens of a step, these are parts, one after the other, and a copy is
made between two. All else of the step is computed as without. Ops take the first parts of all requests together, then
the second ones (`Wave`):

    request 1    |------ wave 0 ------|^|-- wave 1 --|
    request 2    |-- wave 0 --|^|--------- wave 1 ---------|^|--- wave 2 ---|
    request 3    |--------- wave 0 ---------|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.gated_delta import gated_delta_of_prompts, gated_delta_of_tokens
from ...kernels.input_prep import state_pages
from ...kernels.sequences import Sequences, chunks_of
from ...kernels.short_conv import TokenConv, conv_of_prompts, conv_of_tokens
from ..transfer import to_device

T = TypeVar("T")


class StateSpan(NamedTuple):
    """The tokens of one request in the batch, or a part of them, and its page."""

    start: int
    stop: int
    page: int
    begins: bool  # the span has the first tokens of its sequence: there is no state yet
    kept: int = -1  # page that gets a copy of the state behind these tokens; -1: none


class Wave(NamedTuple):
    """Parts of several requests, at most one of each, which ops take together."""

    tokens: slice | Tensor  # places of their tokens, of those behind the requests of one token
    sequences: Sequences
    kept: tuple[Tensor, Tensor] | None = None  # int64 [k]: pages that are copied when it is computed, from and to


class StateRows(NamedTuple):
    """Where the requests of a step keep their states, in one KV group."""

    pages: Tensor  # int64 [n]: page of each leading request of one token; padding has the spare page
    begins: Tensor  # bool [n]: whether the token is its request's first
    spans: Sequence[StateSpan]  # spans of all other requests
    waves: Sequence[Wave] = ()  # the same spans for kernels

    def of_layer(self, tensors: Mapping[str, Tensor]) -> LayerStates:
        return LayerStates(tensors, self)


class LayerStates:
    """One layer's states in one step: n requests of one token each lead, those of ``spans`` follow."""

    __slots__ = ("begins", "pages", "spans", "tensors", "waves")

    def __init__(self, tensors: Mapping[str, Tensor], rows: StateRows) -> None:
        self.tensors = tensors  # [num_pages, *shape] for each tensor, by name: the memory itself
        self.pages, self.begins, self.spans, self.waves = rows

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
        memory, n, parts = self.tensors[name], self.num_decodes, []
        if n:
            parts.append(conv_of_tokens(x[:n], weight, bias, memory, self.pages, self.begins))
        x = x[n:]
        if self.waves:
            parts.append(
                wave_by_wave(self.waves, memory, lambda own, seqs: conv_of_prompts(x[own], weight, bias, memory, seqs))
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_empty((0, weight.shape[1]))

    def gated_conv(self, name: str, gates: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return c * `conv` of b * x, for ``gates`` [num_tokens, 3 * channels]: b, c, x."""
        return self.conv(name, gates, weight, bias)

    def conv_of_all(self, name: str, weight: Tensor, bias: Tensor | None) -> TokenConv | None:
        """Return the convolution, if each request has one token and is certain of it; else None."""
        return None if self.spans else TokenConv(weight, bias, self.tensors[name], self.pages, self.begins)

    def gated_delta(self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return what the gated delta rule reads out of a state, float32 [num_tokens, num_value_heads, value_dim]. See
        kernels/gated_delta.py."""
        memory, n, parts = self.tensors[name], self.num_decodes, []
        if n:
            where = memory, self.pages, self.begins
            parts.append(gated_delta_of_tokens(q[:n], k[:n], v[:n], decay[:n], beta[:n], *where))
        if self.waves:
            parts.append(delta_of_prompts((q[n:], k[n:], v[n:], decay[n:], beta[n:]), memory, self.waves))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(v, dtype=torch.float32)

    def of(self, span: StateSpan, name: str) -> Tensor:
        """Return a request's state [*shape], a view of the memory that is changed in place; zero if the request begins.
        Call it once a step."""
        state = self.tensors[name][span.page]
        return state.zero_() if span.begins else state

    def keep(self, span: StateSpan) -> None:
        """Keep the states behind the span, which are computed, if it says so."""
        for tensor in self.tensors.values() if span.kept >= 0 else ():
            tensor[span.kept].copy_(tensor[span.page])


def wave_by_wave(
    waves: Sequence[Wave], memory: Tensor, compute: Callable[[slice | Tensor, Sequences], Tensor]
) -> Tensor:
    """Return what ``compute`` returns of all tokens, of which it gets places and sequences wave by wave; it changes
    states in ``memory``, which are copied as the waves say."""
    if len(waves) == 1:
        return compute(waves[0].tokens, waves[0].sequences)
    out: Tensor | None = None
    for wave in waves:
        part = compute(wave.tokens, wave.sequences)
        if out is None:
            out = part.new_empty((sum(sum(other.sequences.lens) for other in waves), *part.shape[1:]))
        out[wave.tokens] = part
        if wave.kept is not None:
            memory.index_copy_(0, wave.kept[1], memory.index_select(0, wave.kept[0]))
    assert out is not None
    return out


def delta_of_prompts(inputs: Sequence[Tensor], memory: Tensor, waves: Sequence[Wave]) -> Tensor:
    """Compute the gated delta rule of ``waves``, for its inputs q, k, v, decay and beta."""

    def compute(own: slice | Tensor, sequences: Sequences) -> Tensor:
        q, k, v, decay, beta = (x[own] for x in inputs)
        return gated_delta_of_prompts(q, k, v, decay, beta, memory, sequences)

    return wave_by_wave(waves, memory, compute)


def state_rows_of_decodes(block_table: Tensor, rows: Tensor, seq_lens: Tensor, spare_page: int) -> StateRows:
    """Return the requests of a step of one token each, without a read of the device.

    Args:
        block_table: int32 [max_num_seqs, width], of the group
        rows: int64 [n]; -1: padding
        seq_lens: int32 [n], this step's token included
        spare_page: a page that no request has; padding writes there
    """
    return StateRows(*state_pages(block_table, rows, seq_lens, spare_page), ())


def state_rows_of_batch(
    decodes: StateRows,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    pages: Sequence[int] | npt.NDArray[np.int64],
    kept: KeptWithin,
    like: StateRows | None = None,
) -> StateRows:
    """Return the rows of ``decodes`` and of the requests that follow them. ``query_lens`` (tokens in this step),
    ``seq_lens`` (in all) and ``pages``: host [num_reqs], of all requests of the batch. ``like``: rows of another KV
    group in the same step."""
    first = len(decodes.pages)
    spans: list[StateSpan] = []
    start = first
    for i in range(first, len(query_lens)):
        spans += spans_of(start, query_lens[i], int(pages[i]), seq_lens[i] == query_lens[i], kept.get(i, ()))
        start += query_lens[i]
    waves = waves_of_spans(spans, first, decodes.pages.device, like.waves if like else ()) if spans else ()
    return decodes._replace(spans=spans, waves=waves)


def rows_like(of_groups: Mapping[int, object], kind: type[T]) -> T | None:
    """Return the rows of this kind of some KV group, if there are any."""
    return next((rows for rows in of_groups.values() if isinstance(rows, kind)), None)


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


def spans_of(
    start: int, num_tokens: int, page: int, begins: bool, kept: Sequence[tuple[int, int]]
) -> Iterator[StateSpan]:
    """Yield the parts of a request's tokens, which begin at ``start``."""
    begin = 0
    for end, target in (*kept, (num_tokens, -1)):
        yield StateSpan(start + begin, start + end, page, begins and not begin, target)
        begin = end


def waves_of_spans(
    spans: Sequence[StateSpan], first: int, device: torch.device, like: Sequence[Wave] = ()
) -> list[Wave]:
    """Return the waves of ``spans``, which follow each other from token ``first`` on. ``like``: those of another KV
    group in the same step, from which these differ in pages alone."""
    parts: list[list[StateSpan]] = []
    number, before = 0, None
    for span in spans:
        number = number + 1 if before is not None and before.kept >= 0 else 0
        parts += [[]] if number == len(parts) else []
        parts[number].append(span)
        before = span
    columns: list[list[int]] = []
    for own in parts:
        kept = [span for span in own if span.kept >= 0]
        columns += [[span.page for span in own], [span.page for span in kept], [span.kept for span in kept]]
    on_device = to_device(np.concatenate(columns).astype(np.int64), device).split([len(part) for part in columns])
    waves = []
    for base, *own in zip(
        like or [_wave(part, first, device) for part in parts], *(on_device[i::3] for i in range(3)), strict=True
    ):
        pages, sources, targets = own
        pairs = (sources, targets) if len(sources) else None
        waves.append(base._replace(sequences=base.sequences._replace(pages=pages), kept=pairs))
    return waves


def _wave(spans: Sequence[StateSpan], first: int, device: torch.device) -> Wave:
    tokens: slice | Tensor = slice(spans[0].start - first, spans[-1].stop - first)
    if any(span.stop != after.start for span, after in pairwise(spans)):
        places = np.concatenate([np.arange(span.start - first, span.stop - first) for span in spans])
        tokens = to_device(places, device)
    return Wave(tokens, sequences_of_spans(spans, device))


def sequences_of_spans(spans: Sequence[StateSpan], device: torch.device) -> Sequences:
    lens = np.array([span.stop - span.start for span in spans], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), lens.cumsum()))
    pages = np.array([span.page for span in spans], dtype=np.int64)
    begins = np.array([span.begins for span in spans], dtype=np.int64)
    columns = to_device(np.concatenate((starts, pages, begins)), device)
    on_device, pages_there, begins_there = columns.split([len(spans) + 1, len(spans), len(spans)])
    each = torch.arange(len(spans), dtype=torch.int32, device=device)
    owners = each.repeat_interleave(on_device.diff(), output_size=int(starts[-1]))
    where = pages_there, begins_there.bool(), to_device(chunks_of(lens.tolist()), device)
    return Sequences(tuple(lens.tolist()), on_device, owners, *where)
