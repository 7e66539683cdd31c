"""Steps with prompts in them as CUDA graphs, up to a few thousand tokens; larger ones keep the GPU busy without.

    columns of the batch ─> [ gather inputs ─> layers ] ─> hidden states ─> the end of the step (cuda_graphs.py)
    (static memory)

Padded in two ways: to a number of tokens and to a number of requests. A request that pads has row -1 and no tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.input_prep import PreparedInputs, prepare_inputs
from ..block_tables import BlockTables
from ..distributed.group import ALONE, Peers
from ..input_batch import BatchPlan
from ..platforms.platform import Graph, Platform
from ..profiler import phase
from ..request_state import RequestState
from ..transfer import send
from ..weights.step_rows import ROWS_UNSEEN, StepRows
from .batch_states import NO_STATES, BatchStates
from .cuda_graphs import fits
from .launches import Launches

_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2304)
_REQUESTS = (8, 64, 256, 1024)
_READY_REQUESTS = 127  # shapes up to so many are captured at the start: 8, and 64 or the most if it is less than 128

Forward = Callable[[PreparedInputs, Tensor], Tensor]
"""Hidden states [num_tokens, hidden_size] of prepared inputs and rows (int64 [num_reqs], on the device)."""


class BatchShape(NamedTuple):
    num_tokens: int
    num_reqs: int
    kind: int = 0  # kind of the step, see `StepRows`


class BatchOutputs(NamedTuple):
    """What a step leaves on the device."""

    hidden: Tensor  # [num_tokens, hidden_size], padding included
    rows: Tensor  # int64 [num_reqs]
    seq_lens: Tensor  # int32 [num_reqs]
    last: Tensor  # int32 [num_reqs]: the last token of each request


class BatchGraphs:
    """Captures the shapes of few requests at the start, others in idle times. A step whose shape is not captured yet
    runs op by op, padded alike, and the second one of that shape captures it, which takes little longer."""

    def __init__(
        self,
        requests: RequestState,
        tables: BlockTables,
        forward: Forward,
        max_num_seqs: int,
        max_tokens: int,
        platform: Platform,
        group: Peers = ALONE,
        step_rows: StepRows = ROWS_UNSEEN,
        states: BatchStates = NO_STATES,
    ) -> None:
        """``group``: the ranks that exchange tensors in these steps; each captures its graphs when it can.
        ``step_rows``: has the kinds of steps; ``states``: is told what layers with states compute."""
        self._step_rows = step_rows
        self._platform = platform
        self._group = group
        self._requests = requests
        self._tables = tables
        self._forward = forward
        self._states = states
        self._tokens = [t for t in _TOKENS if t <= max_tokens and states.may_be_graphs]
        self._reqs = [*(r for r in _REQUESTS if 2 * r <= max_num_seqs), max_num_seqs]
        self._words = torch.empty(2 * max_num_seqs, dtype=torch.int64, device=requests.token_ids.device)
        self._graphs: dict[BatchShape, tuple[Graph, BatchOutputs]] = {}
        self._loaded: set[BatchShape] = set()  # shapes that ran once, and loaded what they need
        self._too_large: set[BatchShape] = set()  # shapes for which there was no memory
        self._pool: Any = None
        self.launches = Launches()

    @property
    def num_tokens(self) -> list[int]:
        """Numbers of tokens to which steps are padded, ascending."""
        return list(self._tokens)

    @property
    def largest(self) -> BatchShape | None:
        return BatchShape(self._tokens[-1], self._reqs[-1], self._step_rows.kinds[-1]) if self._tokens else None

    def missing(self) -> list[BatchShape]:
        """Return the shapes to be captured: those that ran first, then the smallest first."""
        sizes = list(pairwise([0, *self._reqs]))  # more requests than the first, at most the second
        shapes = [(tokens, most) for tokens in self._tokens for fewer, most in sizes if fewer < tokens]
        wanted = [BatchShape(*shape, kind) for kind in self._step_rows.kinds for shape in shapes]
        missing = [shape for shape in wanted if shape not in self._graphs and shape not in self._too_large]
        return sorted(missing, key=lambda shape: shape not in self._loaded)

    def tokens_for(self, num_tokens: int) -> int | None:
        """Return the least number of tokens of a graph that holds so many; None if there are too many."""
        place = bisect.bisect_left(self._tokens, num_tokens)
        return self._tokens[place] if place < len(self._tokens) else None

    def shape_for(self, plan: BatchPlan, num_tokens: int) -> BatchShape | None:
        """Return the smallest shape of ``num_tokens``, one of `num_tokens` here, that holds the batch; None if there is
        no memory for its graph.

        With several ranks it is the shape all the same, op by op: those that have the graph exchange padded tensors.
        """
        num_reqs = self._reqs[bisect.bisect_left(self._reqs, plan.num_reqs)]
        shape = BatchShape(num_tokens, num_reqs, self._step_rows.kind)
        if shape in self._loaded and shape not in self._graphs and shape not in self._too_large:
            self.prepare(shape)
        return None if shape in self._too_large and self._group.size == 1 else shape

    def run(self, plan: BatchPlan, shape: BatchShape) -> BatchOutputs:
        """Queue the step, in the shape that `shape_for` gave. What it returns is valid until the next step."""
        outputs = self._run(plan, shape)
        return BatchOutputs(outputs.hidden, *(column[: plan.num_reqs] for column in outputs[1:]))

    def run_empty(self, num_tokens: int) -> None:
        """Queue a step of ``num_tokens``, all of them padding: for what ranks exchange in it."""
        self._run(None, BatchShape(num_tokens, self._reqs[0], self._step_rows.kind))

    def _run(self, plan: BatchPlan | None, shape: BatchShape) -> BatchOutputs:
        is_graph = self._send(plan, shape) and shape in self._graphs
        if plan is not None:
            self.launches.note(is_graph=is_graph, num_paddings=shape.num_tokens - plan.num_tokens)
        if is_graph:
            graph, outputs = self._graphs[shape]
            graph.replay()
            return outputs
        outputs = self._step(shape)
        self._loaded.add(shape)
        return outputs

    def prepare_first(self) -> None:
        """Prepare what the first requests after a start would wait for: all shapes but those of many requests."""
        for shape in self.missing():
            if shape.num_reqs <= max(_READY_REQUESTS, self._reqs[0]):
                self.prepare(shape)
                if shape in self._loaded:
                    self.prepare(shape)

    def prepare(self, shape: BatchShape) -> None:
        """Do the next part, some 10 ms, of what a graph needs: a run with padding alone, then the capture."""
        what = f"{shape.num_tokens} tokens of {shape.num_reqs} requests"
        if shape not in self._loaded:
            with self._group.rehearsal():
                self.load(shape)
        elif not fits(lambda: self.capture(shape), what, self._platform):
            self._too_large.add(shape)

    def load(self, shape: BatchShape) -> None:
        """Run a step with padding alone: what is done once (loading a kernel) may not be captured."""
        self._send(None, shape)
        with self._step_rows.only(shape.kind):
            self._step(shape)
        self._loaded.add(shape)

    @phase("capture")
    def capture(self, shape: BatchShape) -> None:
        """Capture one graph, of a step that has run before. Others may be under way."""
        if self._pool is None:
            self._pool = self._platform.graph_pool()
        self._send(None, shape)
        with self._step_rows.only(shape.kind), self._platform.capture(self._pool) as graph:
            outputs = self._step(shape)
        self._graphs[shape] = (graph, outputs)

    def _send(self, plan: BatchPlan | None, shape: BatchShape) -> bool:
        """Tell what the step computes; None: nothing. False: a graph can't hold it."""
        columns = np.empty((2, shape.num_reqs), dtype=np.int64)
        columns[0], columns[1] = -1, 0
        if plan is not None:
            columns[0, : plan.num_reqs], columns[1, : plan.num_reqs] = plan.rows, plan.query_lens
        send(columns, self._columns(shape))
        return self._states.send(plan, shape.num_tokens, shape.num_reqs)

    def _columns(self, shape: BatchShape) -> Tensor:
        """Return the rows and query lengths, int64 [2, shape.num_reqs], in memory without gaps, so that they are one
        copy."""
        return self._words[: 2 * shape.num_reqs].view(2, shape.num_reqs)

    def _step(self, shape: BatchShape) -> BatchOutputs:
        requests = self._requests
        rows, query_lens = self._columns(shape)
        inputs = prepare_inputs(
            requests.token_ids,
            requests.scalars.num_computed_tokens,
            self._tables.table,
            rows,
            query_lens,
            self._tables.block_sizes,
            shape.num_tokens,
        )
        return BatchOutputs(self._forward(inputs, rows), rows, inputs.seq_lens, inputs.query_start_loc[1:] - 1)
