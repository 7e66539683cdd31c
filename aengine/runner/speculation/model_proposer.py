"""`ModelProposer`: guesses by a model, small beside the one that it guesses for, or a head on that one's states.

    row       x  x  x  x  x | d1 d2 d3        first pass: the last tokens whose keys and values it has not yet, and d1
              └─first pass──┘ └┘ └┘           then a pass a guess: each writes keys and values behind those of the first

A head reads, beside a token, the model's states at the token before: it is one token behind (`DraftHead.captured`). Its
layers keep keys and values in the same pool and under the same block tables as the model's, so that whatever holds for
those (hits in the prefix cache, copies, swaps) holds for its own. Steps with prompts are followed at once. What rows
that decode get is computed when they are to have guesses, or when `LAG` tokens have gathered: where guesses don't pay,
the model costs a small part of a step. So what a head makes of the states is kept of as many tokens of each row.

What is computed for guesses that turn out wrong is behind the row's end, and is computed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...ipc.messages import SchedulerOutput
from ...kernels.input_prep import PreparedInputs
from ..distributed.group import TensorGroup
from ..input_batch import BatchPlan, InputBatch, Rows
from ..layers.attention import AttentionCall, AttentionLayer
from ..models.heads.draft_head import DraftHead
from ..platforms.platform import Graph
from ..sampling.vocabulary import Vocabulary
from ..transfer import send, to_device
from .proposer import Proposer, ProposerSource, RunnerParts

LAG = 32
"""Most tokens of a row that decodes whose keys and values the proposer has not computed."""
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows for which there are graphs."""
_MOST_LATE = 8  # rows of a launch in which each has `LAG` positions
_KEPT = LAG + 16
"""Tokens of each row of which states are kept: those of guesses that were wrong are among the last 16."""


class Tokens(NamedTuple):
    """What a pass computes, in one order: n tokens, int64 where nothing else is said."""

    rows: Tensor  # -1: padding, and the others are any numbers
    positions: Tensor
    ids: Tensor
    received: Tensor | None  # [n, hidden size of the head]: see `DraftHead.forward`
    seq_lens: Tensor  # so many places of its row each token sees
    are_drafted: Tensor | None = None  # bool: see `OnePassHead.draft`; None: none of them

    @classmethod
    def of(cls, rows: Tensor, positions: Tensor, ids: Tensor, received: Tensor | None) -> Tokens:
        """Each sees those before it."""
        return cls(rows, positions, ids, received, positions + 1)


class KeepingLayer:
    """A layer of a model that keeps a copy of the residual stream that comes to it."""

    def __init__(self, model: Any, index: int, kept: dict[int, Tensor]) -> None:
        self._layer, self._kept, self._index = model.layers[index], kept, index
        self._copied: Callable[[Tensor], Tensor] = torch.clone
        if model.weights.formats.is_compiled and model.config.hidden_size % 16 == 0:
            from ...kernels.cpu.ops import copied

            self._copied = copied  # a tape may have it

    def __call__(self, residual: Tensor, attn: AttentionCall) -> None:
        self._kept[self._index] = self._copied(residual)
        self._layer(residual, attn)


class ModelProposerSource(ProposerSource):
    """A loaded `DraftHead`."""

    def __init__(
        self,
        head: DraftHead,
        target: Any,
        group: TensorGroup,
        *,
        num_tokens: int,
        max_num_seqs: int,
        num_bytes: int,
        described: dict[str, Any],
    ) -> None:
        """``target``: the model for which it guesses, at most ``num_tokens`` a row; ``group``: the ranks that share
        both."""
        self.head, self.group, self.num_tokens, self.num_bytes = head, group, num_tokens, num_bytes
        self.configs = (head.config,)
        self.num_layers, self.num_ropes = len(target.config.kv_layers), len(target.config.ropes)
        self.vocab_size = target.config.vocab_size
        self.dtype = target.weights.formats.dtype
        self.sizes = [size for size in _SIZES if size < max_num_seqs] + [min(max_num_seqs, _SIZES[-1])]
        self.most_positions = max(self.sizes[-1] * self.most_places, min(_MOST_LATE, max_num_seqs) * LAG)
        self.streams: dict[int, Tensor] = {}  # those that the model's layers have kept
        self._described = described
        for index in head.captured:
            if index < target.config.num_layers:
                target.layers[index] = KeepingLayer(target, index, self.streams)

    @property
    def most_places(self) -> int:
        """Tokens of a row that a pass of its drafts computes, at most."""
        return self.num_tokens + 1

    def make(self, parts: RunnerParts) -> Proposer:
        return ModelProposer(self, parts)

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of rows and of guesses of which there are graphs, the largest first."""
        for size in self.sizes[::-1]:
            yield from ((size, most) for most in range(self.num_tokens, 0, -1))
            if size <= _MOST_LATE:
                yield size, 0

    def received(self, hidden: Tensor) -> Tensor:
        """Return what the head makes of the streams of a step whose layers have returned ``hidden``: the states of
        pairs, [n, hidden size of the head]."""
        found = [self.streams.get(index, hidden)[: len(hidden)] for index in self.head.captured]
        return self.head.combine(found[0] if len(found) == 1 else torch.cat(found, 1))

    def described(self) -> dict[str, Any]:
        return self._described | {"num_bytes": self.num_bytes}


class AttentionBehind:
    """The attention of a step for the layers of a model whose keys and values lie behind those of another one."""

    def __init__(self, attn: Any, source: ModelProposerSource, layers: dict[int, AttentionLayer]) -> None:
        self._attn, self._source, self._layers = attn, source, layers
        self.begin, self.first_lens, self.states = attn.begin, attn.first_lens, attn.states

    def forward(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        out: Tensor = self._attn.forward(self._behind(layer), qkv)
        return out

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._attn.attend(self._behind(layer), q, k, v)
        return out

    def attend_to_latents(self, layer: AttentionLayer, q: Tensor, latents: Tensor) -> Tensor:
        out: Tensor = self._attn.attend_to_latents(self._behind(layer), q, latents)
        return out

    def write(self, layer: AttentionLayer, qkv: Tensor) -> None:
        self._attn.write(self._behind(layer), qkv)

    def _behind(self, layer: AttentionLayer) -> AttentionLayer:
        found = self._layers.get(layer.index)
        if found is None:
            source = self._source
            rope = None if layer.rope is None else layer.rope + source.num_ropes
            found = self._layers[layer.index] = replace(layer, index=layer.index + source.num_layers, rope=rope)
        return found


class ModelProposer(Proposer):
    """See the module. On an accelerator the rows are padded to a size, each of which has a graph for each number of
    guesses; on a CPU they are as they are."""

    def __init__(self, source: ModelProposerSource, parts: RunnerParts) -> None:
        super().__init__(parts)
        self._source, self._parts = source, parts
        self._head: Any = source.head
        self._vocabulary = Vocabulary(source.head.vocabulary, source.group)
        max_num_seqs, device = len(parts.requests.in_use), parts.requests.token_ids.device
        self._shift = int(bool(source.head.captured))  # tokens of a row that the head is behind
        # Of each row, how many of its last tokens have no keys and values of this model: no more than so many.
        self._num_late = np.zeros(max_num_seqs, dtype=np.int64)
        self._first = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of each that others had computed
        self._layers: dict[int, AttentionLayer] = {}
        self._block_size = min(group.block_size for group in parts.tables.groups)
        # The states of the last pairs of each row, by position; the last row is for those that nobody wants.
        shape = ((max_num_seqs + 1) * self._shift, _KEPT, source.head.config.hidden_size)
        self._states = torch.zeros(shape, dtype=source.dtype, device=device)
        self._words = torch.zeros(5 * source.sizes[-1], dtype=torch.int64, device=device)
        self._is_padded = parts.platform.is_accelerator
        self._graphs: dict[
            tuple[int, int], Graph
        ] = {}  # graphs by number of rows and of guesses; 0: what is late alone

    def update(self, out: SchedulerOutput) -> None:
        """A row that is freed is completed, if others may find a block of it that has tokens which are not computed, or
        if it may be one of those whose pages this step copies aside: these come back with what is computed now."""
        if out.removed:
            rows = np.array(out.removed, dtype=np.int64)
            ends, lag, size = self._requests.num_tokens[rows], self._num_late[rows], self._block_size
            is_found = (ends - 1) // size > (ends - lag) // size
            # Of its last token there are no keys and values, and there may be no place for them.
            self._catch_up(rows[is_found | (lag > 1) & (len(out.page_copies) > 0)], without_last=True)
        for request in out.new_requests:
            self._num_late[request.req_idx], self._first[request.req_idx] = 1, request.num_computed_tokens

    def catch_up(self, plan: BatchPlan) -> None:
        lag = self._num_late[plan.rows]
        self._catch_up(plan.rows[(lag > 1) & (lag + plan.query_lens > LAG)])

    def propose(self, rows: Rows, counts: Rows) -> None:
        if self._is_padded:
            self._catch_up(rows[self._num_late[rows] > self._source.num_tokens + 1])
        self._launch(rows, counts, self._source.sizes[-1])

    def advance(self, plan: BatchPlan) -> None:
        num_new = np.zeros(len(plan.rows), dtype=np.int64)  # tokens that the rows get by sampling, at most
        num_new[plan.sampling] = 1 if plan.num_samples is None else plan.num_samples[plan.sampling]
        lag = self._num_late[plan.rows]
        known = plan.query_lens - np.maximum(num_new - 1, 0)  # tokens of the step that are no guesses
        if plan.is_decode:
            lag += num_new
        else:
            lag = np.maximum(1, np.where(lag <= known, 0, lag + known - 1) + num_new)
        self._num_late[plan.rows] = np.minimum(lag, LAG)

    def prefill(self, inputs: PreparedInputs, rows: Tensor, hidden: Tensor, attn: Any) -> None:
        head, ids, received = self._head, inputs.input_ids, None
        if self._shift:
            owners, places, received = _owners(inputs), inputs.positions, self._source.received(hidden[: len(ids)])
            row, token_ids = rows.index_select(0, owners), self._requests.token_ids
            is_last = (places >= inputs.seq_lens.index_select(0, owners) - LAG) & (inputs.slot_mapping[0] >= 0)
            self._put(torch.where(is_last, row, -1), places, received)
            ids = token_ids[row.clamp(min=0), (places + 1).clamp(max=token_ids.shape[1] - 1)].long()
        behind = AttentionBehind(self._parts.kv_memory.op_by_op(attn), self._source, self._layers)
        head.remember(ids, inputs.positions, behind, received)

    def run_behind(self, batch: InputBatch, hidden: Tensor, attn: Any) -> None:
        if not batch.plan.is_decode:
            self.prefill(batch.inputs, batch.idx_mapping, hidden, attn)
        elif self._shift:
            self.store_states(batch.idx_mapping.index_select(0, _owners(batch.inputs)), batch.inputs.positions, hidden)

    def store_states(self, rows: Tensor, positions: Tensor, hidden: Tensor) -> None:
        if self._shift:
            self._put(rows, positions, self._source.received(hidden))

    def _put(self, rows: Tensor, positions: Tensor, states: Tensor) -> None:
        """Keep the states [n, hidden size] of pairs at positions of rows, int64 [n]; -1: nobody wants them."""
        self._states[torch.where(rows < 0, len(self._states) - 1, rows), positions % _KEPT] = states

    def _catch_up(self, rows: Rows, *, without_last: bool = False) -> None:
        """Compute what the rows lack, without a guess."""
        self._launch(rows, np.zeros_like(rows), min(_MOST_LATE, self._source.sizes[-1]), without_last)

    def _launch(self, rows: Rows, counts: Rows, most_rows: int, without_last: bool = False) -> None:
        sizes, left_out = self._source.sizes, np.full_like(rows, max(self._shift, without_last))
        columns = np.stack((rows, counts, np.maximum(1, self._num_late[rows]), self._first[rows], left_out))
        for begin in range(0, len(rows), most_rows):
            own = columns[:, begin : begin + most_rows]
            most, late = int(own[1].max()), int(own[2].max())
            if not self._is_padded:
                self._draft(to_device(own, self._words.device), late, most)
                continue
            size = sizes[bisect_left(sizes, own.shape[1])]
            padded = np.full((5, size), -1, dtype=np.int64)
            padded[:, : own.shape[1]] = own
            send(padded, self._columns(size))
            if (size, most) in self._graphs:
                self._graphs[size, most].replay()
            else:
                self._step(size, most)
        self._num_late[rows] = 0

    def _columns(self, size: int) -> Tensor:
        """Return the columns of `_draft`, int64 [5, size], in memory without gaps, so that they are one copy."""
        return self._words[: 5 * size].view(5, size)

    def _step(self, size: int, most: int) -> None:
        self._draft(self._columns(size), self._source.num_tokens + 1 if most else LAG, most)

    def _draft(self, columns: Tensor, width: int, most: int) -> None:
        """Compute the last tokens of rows, then write guesses behind them. ``columns``: int64 [5, n]: rows, -1 for
        padding; how many guesses, at most ``most``; how many tokens are to be computed, at most ``width``; the first
        place from which on they may be; and how many are left out behind them."""
        late, ends = self._late(columns, width)
        if most:
            self._guess(late, ends, columns, most)
        else:
            self._compute(late)

    def _late(self, columns: Tensor, width: int) -> tuple[Tokens, Tensor]:
        """Return the tokens that are to be computed, [n * width], and the place behind the last of each row, [n]. See
        `_draft`."""
        rows, _, lags, first, left_out = columns
        requests, own = self._requests, rows.clamp(min=0)
        ends = requests.scalars.num_tokens.index_select(0, own).long() - left_out
        places = ends[:, None] - width + torch.arange(width, device=rows.device)
        is_wanted = (rows >= 0)[:, None] & (places >= torch.maximum(first, ends - lags)[:, None])
        owners = torch.where(is_wanted, rows[:, None], -1).flatten()
        places = places.clamp_(min=0)
        ids = requests.token_ids[own[:, None], places + self._shift].long().flatten()
        received = self._states[own[:, None], places % _KEPT].flatten(0, 1) if self._shift else None
        return Tokens.of(owners, places.flatten(), ids, received), ends

    def _guess(self, late: Tokens, ends: Tensor, columns: Tensor, most: int) -> None:
        """Compute ``late``, and write guesses behind the rows' tokens, a pass for each. See `_draft` and `_late`."""
        rows, counts, _, _, left_out = columns
        head, own = self._head, rows.clamp(min=0)
        hidden = self._compute(late).unflatten(0, (len(rows), -1))[:, -1]
        for number in range(most):
            guesses = self._best(hidden)
            places = ends + left_out + number
            write_guesses(self._requests.token_ids, own, places, guesses, (rows >= 0) & (counts > number))
            if number + 1 < most:
                goes_on = (rows >= 0) & (counts > number + 1)
                where = torch.where(goes_on, rows, -1), (ends + number).clamp_(min=0)
                hidden = self._compute(Tokens.of(*where, guesses, head.recycled(hidden)))

    def _compute(self, tokens: Tokens) -> Tensor:
        """Return what the head's layers return, [n, hidden size]: for padding any numbers."""
        if self._is_padded:
            return self._forward(tokens)
        places = (tokens.rows >= 0).nonzero()[:, 0]
        if len(places) == len(tokens.rows):
            return self._forward(tokens)
        hidden = torch.zeros((len(tokens.rows), self._head.config.hidden_size), dtype=self._source.dtype)
        if len(places):
            own: list[Any] = [None if column is None else column[places] for column in tokens]
            hidden[places] = self._forward(Tokens(*own))
        return hidden

    def _forward(self, tokens: Tokens) -> Tensor:
        rows, head = tokens.rows, self._head
        seq_lens = torch.where(rows < 0, 0, tokens.seq_lens).int()
        attn = self._parts.kv_memory.bind_positions(rows, tokens.positions, seq_lens, self._parts.tables.table)
        how = tokens.ids, tokens.positions, AttentionBehind(attn, self._source, self._layers), tokens.received
        hidden: Tensor = head.forward(*how) if tokens.are_drafted is None else head.draft(*how, tokens.are_drafted)
        return hidden

    def _best(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token of each, int64 [n]."""
        zeros = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        ids, _ = self._vocabulary.draw(self._head.compute_logits(hidden), zeros.float(), zeros, zeros)
        ids = ids.clamp(0, self._head.vocabulary.vocab_size - 1)  # while kernels are compiled they are any numbers
        return self._head.token_ids(ids).clamp_(max=self._source.vocab_size - 1)

    def rehearse(self) -> None:
        for size, most in self._source.shapes():
            self._columns(size).fill_(-1)
            self._step(size, most)

    def capture(self, progress: Callable[[int, int], None], *, largest_only: bool = False) -> None:
        platform = self._parts.platform
        if not self._is_padded or self._parts.enforce_eager:
            return
        shapes = list(self._source.shapes())[: 1 if largest_only else None]
        pool = platform.graph_pool()
        for done, (size, most) in enumerate(shapes):
            progress(done, len(shapes))
            self._columns(size).fill_(-1)
            self._step(size, most)  # what a first run does may not be captured
            platform.synchronize()
            with platform.capture(pool) as graph:
                self._step(size, most)
            self._graphs[size, most] = graph
        progress(len(shapes), len(shapes))


def _owners(inputs: PreparedInputs) -> Tensor:
    """Return the request of each token of a batch, int64 [num_tokens]."""
    ends = inputs.query_start_loc[1:]
    tokens = torch.arange(len(inputs.positions), dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)


def write_guesses(token_ids: Tensor, rows: Tensor, places: Tensor, guesses: Tensor, are_asked: Tensor) -> None:
    """Write guesses at places of rows; where they are not asked for, what is there stays."""
    places = torch.where(are_asked, places, token_ids.shape[1] - 1)
    token_ids[rows, places] = torch.where(are_asked, guesses.int(), token_ids[rows, places])
