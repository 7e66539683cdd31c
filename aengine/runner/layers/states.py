"""States of fixed size (a linear attention's, a convolution's) as a layer gets at them in one step.

A request's state lies in its page of the layer's KV group, and is read and written in place. Requests of one token lead
the batch and are taken together, by page ids on the device, so that a graph may replay it. The others follow: an op may
take them together too (`Sequences`), or one by one, by views of the memory (`StateSpan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.gated_delta import gated_delta_of_prompts, gated_delta_of_tokens
from ...kernels.sequences import Sequences
from ...kernels.short_conv import conv_of_prompts, conv_of_tokens
from ..transfer import to_device


class StateSpan(NamedTuple):
    """The tokens of one request in the batch, and its page."""

    start: int
    stop: int
    page: int
    begins: bool  # the span has the first tokens of its sequence: there is no state yet


class StateRows(NamedTuple):
    """Where the requests of a step keep their states, in one KV group."""

    pages: Tensor  # int64 [n]: page of each leading request of one token; padding has the spare page
    begins: Tensor  # bool [n]: whether the token is its request's first
    spans: Sequence[StateSpan]  # spans of all other requests
    sequences: Sequences | None = None  # the same spans for kernels; None: there are none

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
        """Return the convolution of x [num_tokens, channels] behind the inputs that a state keeps, which move on. See
        kernels/short_conv.py."""
        memory, n, parts = self.tensors[name], self.num_decodes, []
        if n:
            parts.append(conv_of_tokens(x[:n], weight, bias, memory, self.pages, self.begins))
        if self.sequences is not None:
            parts.append(conv_of_prompts(x[n:], weight, bias, memory, self.sequences))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(x)

    def gated_conv(self, name: str, gates: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return c * `conv` of b * x, for ``gates`` [num_tokens, 3 * channels]: b, c, x."""
        b, c, x = gates.chunk(3, 1)
        return c * self.conv(name, b * x, weight, bias)

    def gated_delta(self, name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return what the gated delta rule reads out of a state, float32 [num_tokens, num_value_heads, value_dim]. See
        kernels/gated_delta.py."""
        memory, n, parts = self.tensors[name], self.num_decodes, []
        if n:
            where = memory, self.pages, self.begins
            parts.append(gated_delta_of_tokens(q[:n], k[:n], v[:n], decay[:n], beta[:n], *where))
        if self.sequences is not None:
            parts.append(gated_delta_of_prompts(q[n:], k[n:], v[n:], decay[n:], beta[n:], memory, self.sequences))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(v, dtype=torch.float32)

    def of(self, span: StateSpan, name: str) -> Tensor:
        """Return a request's state [*shape], a view of the memory that is changed in place; zero if the request begins.
        Call it once a step."""
        state = self.tensors[name][span.page]
        return state.zero_() if span.begins else state


def state_rows_of_decodes(block_table: Tensor, rows: Tensor, seq_lens: Tensor, spare_page: int) -> StateRows:
    """Return the requests of a step of one token each, without a read of the device.

    Args:
        block_table: int32 [max_num_seqs, width], of the group
        rows: int64 [n]; -1: padding
        seq_lens: int32 [n], this step's token included
        spare_page: a page that no request has; padding writes there
    """
    pages = block_table[:, 0].index_select(0, rows.clamp(min=0)).long()
    return StateRows(torch.where(rows >= 0, pages, spare_page), seq_lens <= 1, ())


def state_rows_of_batch(
    decodes: StateRows, query_lens: Sequence[int], seq_lens: Sequence[int], pages: Sequence[int] | npt.NDArray[np.int64]
) -> StateRows:
    """Return the rows of ``decodes`` and of the requests that follow them. ``query_lens`` (tokens in this step),
    ``seq_lens`` (in all) and ``pages``: host [num_reqs], of all requests of the batch."""
    first = len(decodes.pages)
    spans, start = [], first
    for length, seq_len, page in zip(query_lens[first:], seq_lens[first:], pages[first:], strict=True):
        spans.append(StateSpan(start, start + length, int(page), seq_len == length))
        start += length
    return decodes._replace(spans=spans, sequences=sequences_of_spans(spans, decodes.pages.device) if spans else None)


def sequences_of_spans(spans: Sequence[StateSpan], device: torch.device) -> Sequences:
    lens = np.array([span.stop - span.start for span in spans], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), lens.cumsum()))
    pages = np.array([span.page for span in spans], dtype=np.int64)
    begins = np.array([span.begins for span in spans], dtype=np.int64)
    columns = to_device(np.concatenate((starts, pages, begins)), device)
    on_device, pages_there, begins_there = columns.split([len(spans) + 1, len(spans), len(spans)])
    each = torch.arange(len(spans), dtype=torch.int32, device=device)
    owners = each.repeat_interleave(on_device.diff(), output_size=int(starts[-1]))
    return Sequences(
        tuple(lens.tolist()), torch.from_numpy(starts), on_device, owners, pages_there, begins_there.bool()
    )
