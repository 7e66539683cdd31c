"""Decode steps as CUDA graphs: one launch each, whatever the model.

    rows of the batch ─> [ gather inputs ─> layers ─> logits ─> sample ─> ids into the rows and to the host ]   SAMPLED
    (static memory)      [ gather inputs ─> layers ─> logits ][ bitmasks ─> sample ─> ids as above ]            HALVES

A graph replays the launches of one shape, so a batch is padded to the next size that has been captured; padding has row
-1, reads nothing and writes nothing. All graphs share one memory pool, and are captured largest first, so that the
smaller ones fit into what the largest took.

HALVES is two graphs: the second is launched when the host has sent the bitmasks, if there are any, which it fills
during the first. It finds the first one's logits in the pool, since no other graph is launched in between; so they need
not be kept. There are two of the second: one samples by bitmask, temperature and seed, the other by all parameters
(`Sampler.sample_padded`).
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
from ...params import MAX_LOGPROBS
from ..async_output import Published
from ..input_batch import Rows
from ..platforms.platform import Graph, Platform
from ..request_state import COLUMNS, RequestState
from ..sampling.bitmask_memory import HostBitmasks, MaskMemory
from ..sampling.sampler import Sampler
from ..transfer import to_device

__all__ = ["BatchDescriptor", "CudaGraphManager", "DecodeStep", "GraphKind", "HalfDone", "fits", "graph_sizes"]

logger = logging.getLogger("aengine.runner")

_LEAST_SLOTS = 160
_LOGPROB_SLOTS = 16  # a divisor of the number of slots
_LOGPROB_WORDS = 1 + 2 * MAX_LOGPROBS


class GraphKind(Enum):
    SAMPLED = "sampled"
    HALVES = "halves"


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


class HalfDone(NamedTuple):
    """State of a HALVES step between its two halves."""

    logits: Tensor  # float32 [size, vocab_size]
    inputs: DecodeInputs


class DecodeStep:
    """A decode step over static memory: the same calls whether they run at once or are captured."""

    def __init__(
        self,
        requests: RequestState,
        model: DecodeModel,
        sampler: Sampler,
        max_size: int,
        max_in_flight_steps: int,
        bitmasks: HostBitmasks,
        platform: Platform,
    ) -> None:
        """``max_in_flight_steps``: most answers that may be under way or unread."""
        num_slots = max(_LEAST_SLOTS, 2 * max_in_flight_steps)
        self._requests = requests
        self._model = model
        self._sampler = sampler
        self._device = requests.token_ids.device
        self._platform = platform
        self._rows = torch.full((max_size,), -1, dtype=torch.int64, device=self._device)
        self._rows_host = np.full(max_size, -1, dtype=np.int64)  # what _rows holds, or will when its copies have run
        self._filled = (0, 0)  # how many rows set_rows was given last, and the size that it padded them to
        self._published = torch.zeros((num_slots, 2, max_size), dtype=torch.int32, pin_memory=platform.pins_memory)
        self._published_host = self._published.numpy()
        num_slots = _LOGPROB_SLOTS if 2 * max_in_flight_steps <= _LOGPROB_SLOTS else num_slots
        shape = (num_slots, max_size, _LOGPROB_WORDS)
        self._logprobs = torch.zeros(shape, dtype=torch.int32, pin_memory=platform.pins_memory)
        self._logprobs_host = self._logprobs.numpy()
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

    def run(self, descriptor: BatchDescriptor) -> HalfDone | None:
        """Queue the step. HALVES: what `run_second_half` continues with; SAMPLED: None, and `published` fetches the
        answer."""
        requests = self._requests
        rows = self._rows[: descriptor.size]
        token_ids, scalars = requests.token_ids, requests.scalars.words
        inputs = prepare_decode(token_ids, scalars, COLUMNS, rows)
        hidden = self._model.decode(inputs.input_ids, inputs.positions, rows, inputs.seq_lens)
        half = HalfDone(self._model.compute_logits(hidden), inputs)
        if descriptor.kind is GraphKind.HALVES:
            return half
        self._sample(half)
        return None

    def set_bitmasks(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, size: int) -> None:
        """Set the bitmasks of the next `run_second_half`: ``bits`` [n, row_bytes] are of the batch's ``rows`` [n]."""
        self._masks.set(rows, bits, size)

    def run_second_half(self, half: HalfDone, *, is_plain: bool) -> None:
        """Queue the second half of a HALVES step; `published` fetches the answer. ``is_plain``: bitmask, temperature
        and seed say all."""
        rows = self._rows[: len(half.logits)]
        if is_plain:
            apply_bitmask(half.logits, self._masks.rows[: len(rows)], self._masks.bits[: len(rows)])
            self._sample(half)
        else:
            ids, checks = self._sampler.sample_padded(half.logits, rows, self._masks, self._logprobs, self._cursor)
            self.commit(rows, ids, checks)

    def _sample(self, half: HalfDone) -> None:
        logits, inputs = half
        ids, checks = gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions)
        self.commit(self._rows[: len(logits)], ids, checks)

    def commit(self, rows: Tensor, ids: Tensor, checks: Tensor) -> None:
        """Put the sampled ids into the rows and where the host reads them; see `commit_decode`."""
        requests = self._requests
        where = (requests.token_ids, requests.scalars.words, COLUMNS, rows)
        commit_decode(*where, ids, checks, self._published, self._cursor)

    def published(self, num_rows: int, *, has_logprobs: bool = False) -> Published:
        """Return the memory of the answer of the step queued last."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._published_host)
        logprobs = self._logprobs_host[slot % len(self._logprobs_host)] if has_logprobs else None
        return Published(self._published_host[slot], num_rows, self._platform.record_event(), logprobs)

    def run_padded(self, descriptor: BatchDescriptor) -> None:
        """Run the step with nothing but padding: kernels and libraries load what they need, no row changes."""
        no_rows = np.empty(0, dtype=np.int64)
        self.set_rows(no_rows, descriptor.size)
        half = self.run(descriptor)
        num_answers = 1
        if half is not None:
            self.set_bitmasks(no_rows, None, descriptor.size)
            self.run_second_half(half, is_plain=True)
            self.run_second_half(half, is_plain=False)
            num_answers = 2
        self._next_slot = (self._next_slot + num_answers) % len(self._published_host)


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
        self._graphs: dict[BatchDescriptor, Graph] = {}
        self._loaded: set[BatchDescriptor] = set()  # these ran once: kernels and libraries have loaded what they need
        self._too_large: set[BatchDescriptor] = set()  # there was no memory for these
        self._second: dict[tuple[int, bool], Graph] = {}  # of HALVES steps, by size and whether they are plain
        self._half: tuple[int, HalfDone | None] | None = None  # size of the HALVES step that waits
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

    def run(self, rows: Rows, kind: GraphKind) -> None:
        """Queue a step of these requests, of a HALVES one the first half."""
        size = self.size_for(len(rows))
        assert size is not None, f"a batch of {len(rows)} has no graph"
        descriptor = BatchDescriptor(size, kind)
        half = None
        is_graph = self._runs_as_graph(descriptor)
        self.step.set_rows(rows, size)
        if is_graph:
            self._graphs[descriptor].replay()
        else:
            half = self.step.run(descriptor)
            self._loaded.add(descriptor)
        if kind is GraphKind.HALVES:
            self._half = (size, half)

    def run_second_half(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, *, is_plain: bool) -> None:
        """Queue the second half of the HALVES step: ``bits`` [n, row_bytes] are of the batch's ``rows`` [n].
        ``is_plain``: bitmask, temperature and seed say all."""
        assert self._half is not None, "there is no first half"
        (size, half), self._half = self._half, None
        self.step.set_bitmasks(rows, bits, size)
        if half is not None:
            self.step.run_second_half(half, is_plain=is_plain)
        else:
            self._second[size, is_plain].replay()

    def load(self, descriptor: BatchDescriptor) -> None:
        """Run a step with padding alone: what is done once (loading a kernel) may not be captured."""
        self.step.run_padded(descriptor)
        self._loaded.add(descriptor)

    def capture(self, descriptor: BatchDescriptor) -> None:
        """Capture one graph, of a step that has run before. Others may be under way."""
        if self._pool is None:
            self._pool = self._platform.graph_pool()
        with self._platform.capture(self._pool) as graph:
            half = self.step.run(descriptor)
        if half is not None:
            for is_plain in (True, False):
                with self._platform.capture(self._pool) as second:
                    self.step.run_second_half(half, is_plain=is_plain)
                self._second[descriptor.size, is_plain] = second
        self._graphs[descriptor] = graph
