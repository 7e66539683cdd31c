"""Decode steps as CUDA graphs: one launch each, whatever the model.

    rows of the batch ─> [ gather inputs ─> layers ─> logits ─> sample ─> ids into the rows and to the host ]   SAMPLED
    (static memory)      [ gather inputs ─> layers ─> logits ][ bitmasks ─> sample ─> ids as above ]            MASKED
                         [ gather inputs ─> layers ] ─> logits                                                  LOGITS

A graph replays the launches of one shape, so a batch is padded to the next size that has been captured; padding has row
-1, reads nothing and writes nothing. All graphs share one memory pool, and are captured largest first, so that the
smaller ones fit into what the largest took. What follows from the rows and bitmasks alone is inside; whatever else
needs the host (penalties, log-probabilities) samples outside, and the logits are made there too: a graph keeps its
outputs, and those of all sizes together would take a GB.

MASKED is two graphs: the second is launched when the host has sent the bitmasks, which it fills during the first. It
finds the first one's logits in the pool, since no other graph is launched in between; so they need not be kept.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.bitmask import apply_bitmask
from ...kernels.gumbel import gumbel_sample
from ...kernels.input_prep import DecodeInputs, commit_decode, prepare_decode
from ..async_output import Published
from ..input_batch import Rows
from ..platforms.platform import Graph, Platform
from ..request_state import COLUMNS, RequestState
from ..sampling.bitmask_memory import HostBitmasks, MaskMemory
from ..transfer import to_device

__all__ = ["BatchDescriptor", "CudaGraphManager", "DecodeStep", "GraphKind", "fits", "graph_sizes"]

logger = logging.getLogger("aengine.runner")

_LEAST_SLOTS = 160


class GraphKind(Enum):
    SAMPLED = "sampled"
    MASKED = "masked"
    LOGITS = "logits"


class BatchDescriptor(NamedTuple):
    """The shape of a decode batch: what a graph is captured for, and looked up by."""

    size: int  # requests, padding included
    kind: GraphKind


def graph_sizes(max_num_seqs: int, most: int = 512) -> list[int]:
    """1, 2, 4, 8, then in steps of 8 to 64, of 16 to 256, of 32 from there on; ends with ``max_num_seqs`` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    largest = min(max_num_seqs, most)
    return [size for size in sizes if size < largest] + [largest]


def fits(capture: Callable[[], None], what: str, platform: Platform) -> bool:
    """Capture a graph. False: there is no memory for it, not even when torch has given back what
    it keeps; steps, which need less, then run op by op."""
    reason: str | None = None
    for _ in range(2):
        try:
            capture()
        except RuntimeError as error:
            reason = _out_of_memory(error)
            if reason is None:
                raise
        else:
            return True
        platform.release_cached()
    advice = "such steps run op by op, more slowly: lower gpu_memory_utilization"
    logger.warning("no memory for the graph of %s (%s); %s", what, reason, advice)
    return False


def _out_of_memory(error: BaseException | None) -> str | None:
    """Return the message of an out-of-memory error of torch, or of CUDA in making a graph, also if it is the cause of
    ``error``; None for other errors."""
    while error is not None:
        if "out of memory" in str(error):
            return str(error).partition(". ")[0].partition("\n")[0]
        error = error.__context__
    return None


class DecodeModel(Protocol):
    """The computation of a step (runner/model_runner.py's Model and KvMemory together)."""

    def decode(self, input_ids: Tensor, positions: Tensor, rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Hidden states [n, hidden_size]; rows int64 [n], seq_lens int32 [n]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size]."""


class Unmasked(NamedTuple):
    """State of a MASKED step between its two halves."""

    logits: Tensor  # float32 [size, vocab_size]
    inputs: DecodeInputs


class DecodeStep:
    """A decode step over static memory: the same calls whether they run at once or are captured."""

    def __init__(
        self,
        requests: RequestState,
        model: DecodeModel,
        max_size: int,
        max_in_flight_steps: int,
        bitmasks: HostBitmasks,
        platform: Platform,
    ) -> None:
        """``max_in_flight_steps``: most answers that may be under way or unread."""
        num_slots = max(_LEAST_SLOTS, 2 * max_in_flight_steps)
        self._requests = requests
        self._model = model
        self._device = requests.token_ids.device
        self._platform = platform
        self._rows = torch.full((max_size,), -1, dtype=torch.int64, device=self._device)
        self._rows_host = np.full(max_size, -1, dtype=np.int64)  # what _rows holds, or will when its copies have run
        self._filled = (0, 0)  # how many rows set_rows was given last, and the size that it padded them to
        self._published = torch.zeros((num_slots, 2, max_size), dtype=torch.int32, pin_memory=platform.pins_memory)
        self._published_host = self._published.numpy()
        self._cursor = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._next_slot = 0  # what the cursor will be when all steps launched so far have run
        self._masks = MaskMemory(max_size, bitmasks, self._device)

    def set_rows(self, rows: Rows, size: int) -> Tensor:
        """Put the batch's rows where the step reads them; int64 [size], on the device."""
        n = len(rows)
        if (n, size) != self._filled or not np.array_equal(self._rows_host[:n], rows):
            padded = np.full(size, -1, dtype=np.int64)
            padded[:n] = rows
            self._rows[:size].copy_(to_device(padded, self._device), non_blocking=True)
            # Noted when it is sent, not before: there may have been no memory for it.
            self._rows_host[:size], self._filled = padded, (n, size)
        return self._rows[:size]

    def rows(self, num_rows: int) -> Tensor:
        """The first rows that `set_rows` was given last: int64 [num_rows], on the device."""
        return self._rows[:num_rows]

    def run(self, descriptor: BatchDescriptor) -> Tensor | Unmasked | None:
        """Queue the step. LOGITS: hidden states [size, hidden_size]; MASKED: what `run_masked` continues with; SAMPLED:
        None, and `published` fetches the answer."""
        requests = self._requests
        rows = self._rows[: descriptor.size]
        token_ids, scalars = requests.token_ids, requests.scalars.words
        inputs = prepare_decode(token_ids, scalars, COLUMNS, rows)
        hidden = self._model.decode(inputs.input_ids, inputs.positions, rows, inputs.seq_lens)
        if descriptor.kind is GraphKind.LOGITS:
            return hidden
        unmasked = Unmasked(self.compute_logits(hidden), inputs)
        if descriptor.kind is GraphKind.MASKED:
            return unmasked
        self._sample(unmasked)
        return None

    def set_bitmasks(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, size: int) -> None:
        """Set the bitmasks of the next `run_masked`: ``bits`` [n, row_bytes] are of the batch's ``rows`` [n]."""
        self._masks.set(rows, bits, size)

    def run_masked(self, unmasked: Unmasked) -> None:
        """Queue the second half of a MASKED step; `published` fetches the answer."""
        size = len(unmasked.logits)
        apply_bitmask(unmasked.logits, self._masks.rows[:size], self._masks.bits[:size])
        self._sample(unmasked)

    def _sample(self, unmasked: Unmasked) -> None:
        logits, inputs = unmasked
        ids, checks = gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions)
        self.commit(self._rows[: len(logits)], ids, checks)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)

    def commit(self, rows: Tensor, ids: Tensor, checks: Tensor) -> None:
        """Put the sampled ids into the rows and where the host reads them; see `commit_decode`."""
        requests = self._requests
        where = (requests.token_ids, requests.scalars.words, COLUMNS, rows)
        commit_decode(*where, ids, checks, self._published, self._cursor)

    def published(self, num_rows: int) -> Published:
        """Return the memory of the answer of the SAMPLED or MASKED step queued last."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._published_host)
        return Published(self._published_host[slot], num_rows, self._platform.record_event())

    def run_padded(self, descriptor: BatchDescriptor) -> None:
        """Run the step with nothing but padding: kernels and libraries load what they need, no row changes."""
        no_rows = np.empty(0, dtype=np.int64)
        self.set_rows(no_rows, descriptor.size)
        half = self.run(descriptor)
        if isinstance(half, Unmasked):
            self.set_bitmasks(no_rows, None, descriptor.size)
            self.run_masked(half)
        if descriptor.kind is not GraphKind.LOGITS:
            self._next_slot = (self._next_slot + 1) % len(self._published_host)


class CudaGraphManager:
    """Captures `DecodeStep.run` for batches of the given sizes, and replays it.

    With ``enforce_eager``, and where there is no memory for a graph, it runs the step as it is, padded alike, so that
    both give the same bits.
    """

    def __init__(self, step: DecodeStep, sizes: list[int], platform: Platform, *, enforce_eager: bool) -> None:
        self._platform = platform
        self.step = step
        self._sizes = sorted(sizes)
        self._is_eager = enforce_eager
        self._graphs: dict[BatchDescriptor, tuple[Graph, Tensor | None]] = {}
        self._loaded: set[BatchDescriptor] = set()  # these ran once: kernels and libraries have loaded what they need
        self._too_large: set[BatchDescriptor] = set()  # there was no memory for these
        self._second: dict[int, Graph] = {}  # by size: of MASKED steps
        self._unmasked: tuple[int, Unmasked | None] | None = None  # size of the MASKED step that waits
        self._pool: Any = None

    @property
    def max_size(self) -> int:
        return self._sizes[-1]

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def size_for(self, num_reqs: int) -> int | None:
        """The smallest size that holds ``num_reqs``; None if there is none."""
        place = bisect.bisect_left(self._sizes, num_reqs)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Capture every size, sampling included. ``progress(done, total)``. Nothing may be in flight."""
        if self._is_eager:
            return
        descriptors = [BatchDescriptor(size, GraphKind.SAMPLED) for size in reversed(self._sizes)]
        for descriptor in descriptors:
            self.load(descriptor)
        self._platform.release_cached()  # what the largest left would not be there for the graphs
        for i, descriptor in enumerate(descriptors):
            progress(i, len(descriptors))
            self.capture(descriptor)
        progress(len(descriptors), len(descriptors))

    def missing(self) -> list[BatchDescriptor]:
        """Return the graphs to be captured: those of steps that ran first, then the smallest first."""
        if self._is_eager:
            return []
        wanted = [BatchDescriptor(size, kind) for size in self._sizes for kind in GraphKind]
        missing = [one for one in wanted if one not in self._graphs and one not in self._too_large]
        return sorted(missing, key=lambda descriptor: descriptor not in self._loaded)

    def prepare(self, descriptor: BatchDescriptor) -> None:
        """Do the next part, some 10 ms, of what a graph needs: a run with padding alone, then the capture."""
        if descriptor not in self._loaded:
            self.load(descriptor)
        elif not fits(lambda: self.capture(descriptor), f"{descriptor.size} decodes", self._platform):
            self._too_large.add(descriptor)

    def _runs_as_graph(self, descriptor: BatchDescriptor) -> bool:
        """Whether there is a graph: from the second step on, unless idle times had room to capture it before."""
        if descriptor in self._graphs:
            return True
        if self._is_eager or descriptor in self._too_large or descriptor not in self._loaded:
            return False
        self.prepare(descriptor)
        return descriptor in self._graphs

    def run(self, rows: Rows, kind: GraphKind) -> Tensor | None:
        """Queue a step of these requests, of a MASKED one the first half. LOGITS: float32 [len(rows), vocab_size]."""
        size = self.size_for(len(rows))
        assert size is not None, f"a batch of {len(rows)} has no graph"
        descriptor = BatchDescriptor(size, kind)
        if not self._runs_as_graph(descriptor):
            self.step.set_rows(rows, size)
            hidden = self.step.run(descriptor)
            self._loaded.add(descriptor)
            if isinstance(hidden, Unmasked):
                self._unmasked = (size, hidden)
                return None
        else:
            self.step.set_rows(rows, size)
            graph, hidden = self._graphs[descriptor]
            graph.replay()
            if kind is GraphKind.MASKED:
                self._unmasked = (size, None)
        # Of the padding too: the shape chooses the product's kernel, and with it the bits.
        return None if hidden is None else self.step.compute_logits(hidden)[: len(rows)]

    def run_masked(self, rows: Rows, bits: npt.NDArray[np.uint8] | None) -> None:
        """Queue the second half of the MASKED step: ``bits`` [n, row_bytes] are of the batch's ``rows`` [n]."""
        assert self._unmasked is not None, "there is no first half"
        (size, unmasked), self._unmasked = self._unmasked, None
        self.step.set_bitmasks(rows, bits, size)
        if unmasked is not None:
            self.step.run_masked(unmasked)
        else:
            self._second[size].replay()

    def load(self, descriptor: BatchDescriptor) -> None:
        """Run a step with padding alone: what is done once (loading a kernel) may not be captured."""
        self.step.run_padded(descriptor)
        self._loaded.add(descriptor)

    def capture(self, descriptor: BatchDescriptor) -> None:
        """Capture one graph, of a step that has run before. Others may be under way."""
        if self._pool is None:
            self._pool = self._platform.graph_pool()
        with self._platform.capture(self._pool) as graph:
            output = self.step.run(descriptor)
        if isinstance(output, Unmasked):
            with self._platform.capture(self._pool) as second:
                self.step.run_masked(output)
            self._second[descriptor.size], output = second, None
        self._graphs[descriptor] = (graph, output)
