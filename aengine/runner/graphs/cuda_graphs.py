"""Decode steps as CUDA graphs, two launches each, whatever the model and the sampling parameters.

    rows of the batch ─> [ gather inputs ─> layers ─> logits ][ sample ─> ids into the rows and to the host ]
    (static memory)

    hidden states of those that sample ─> [ logits ─> sample ─> ids into the rows and to the host ]
    (static memory)

The lower line is the end of a step with prompts, one launch, whatever its layers ran as. On a rank that does not
sample, as others have the layers after its own, a decode step ends with its layers: its rows move on, and what the
layers yield is passed on behind the launch (exchange/).

A graph replays the launches of one shape, so a batch is padded to the next size that has been captured; padding has row
-1, reads nothing and writes nothing. All graphs share one memory pool, and are captured largest first, so that the
smaller ones fit into what the largest took.

The second half is launched when the host has sent the bitmasks, if there are any, which it fills during the first. It
finds the first one's logits in the pool, since no other graph is launched in between; so they need not be kept. There
is one of it for each kind of `Sampling`: what nobody in the batch asks for is not launched. The end of a step with
prompts is launched then, too, and is there for each kind. What no graph holds is queued in place of the second half,
over the same logits.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.bitmask import apply_bitmask
from ...kernels.gumbel import gumbel_sample
from ...kernels.input_prep import DecodeInputs, advance_rows, commit_decode, prepare_decode
from ...limits.bounds import MAX_LOGPROBS
from ..async_output import Published
from ..input_batch import NO_ROWS, Rows
from ..platforms.platform import Graph, Platform
from ..profiler import phase
from ..request_state import COLUMNS, RequestState
from ..sampling.bitmask_memory import HostBitmasks, MaskMemory
from ..sampling.sampler import Sampler, Sampling
from ..transfer import to_device
from ..weights.step_rows import ROWS_UNSEEN, StepRows
from .launches import Launches

logger = logging.getLogger("aengine.runner")

_LEAST_SLOTS = 160
_LOGPROB_SLOTS = 16  # a divisor of the number of slots
_LOGPROB_WORDS = 1 + 2 * MAX_LOGPROBS
_END_SIZES = (1, 4, 16, 64, 256)  # fewer than of decodes: most of an end is reading the head, whatever its size


def graph_sizes(max_num_seqs: int, most: int = 512) -> list[int]:
    """Return 1, 2, 4, 8, then in steps of 8 to 64, of 16 to 256, of 32 from there on; ends with ``max_num_seqs``
    itself."""
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
            reason = out_of_memory(error)
            if reason is None:
                raise
        else:
            return True
        platform.release_cached()
    advice = "such steps run op by op, more slowly: lower gpu_memory_utilization"
    logger.warning("no memory for the graph of %s (%s); %s", what, reason, advice)
    return False


def out_of_memory(error: BaseException) -> str | None:
    """Return the message of an out-of-memory error of torch, or of CUDA in making a graph, also if it is the cause of
    ``error``; None for other errors."""
    return _message_with("out of memory", error)


def not_captured(error: BaseException) -> str | None:
    """Return the message of the first error of an op that no graph may hold; None for other errors."""
    return _message_with("captur", error)


def _message_with(text: str, error: BaseException | None) -> str | None:
    found = None
    while error is not None:
        if text in str(error):
            found = str(error).partition(". ")[0].partition("\n")[0]
        error = error.__context__
    return found


class DecodeModel(Protocol):
    """The computation of a step (runner/model_runner.py's Model and KvMemory together)."""

    def decode(self, inputs: DecodeInputs, rows: Tensor, *, has_several: bool = False) -> Tensor:
        """Return the hidden states [n, hidden_size] of rows int64 [n]. ``has_several``: a row is named once for each of
        its positions, which follow each other."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's tokens, float32 [n, share]."""


class HalfDone(NamedTuple):
    """State of a step between its two halves."""

    logits: Tensor  # float32 [size, share]: logits of this rank's share of the vocabulary
    inputs: DecodeInputs


class PassedOn(NamedTuple):
    """What a step yields on a rank that does not sample."""

    hidden: Tensor  # [size, hidden_size]


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
        *,
        samples: bool = True,
        sampled: Tensor | None = None,
    ) -> None:
        """``max_in_flight_steps``: most answers that may be under way or unread. ``samples``: this rank has
        the head. ``sampled``: int64 [max_size or more], where the ids are left, too; None: nowhere.
        """
        num_slots = max(_LEAST_SLOTS, 2 * max_in_flight_steps)
        self._requests = requests
        self._model = model
        self._sampler = sampler
        self._device = requests.token_ids.device
        self.platform = platform
        self.samples = samples
        self._sampled = sampled
        self._rows = torch.full((max_size,), -1, dtype=torch.int64, device=self._device)
        self._rows_host = np.full(max_size, -1, dtype=np.int64)  # content of `_rows` once all copies so far have run
        self._filled = (0, 0)  # rows that `set_rows` was given last, and the size that it padded them to
        self._published = torch.zeros((num_slots, 2, max_size), dtype=torch.int32, pin_memory=platform.pins_memory)
        self._published_host = self._published.numpy()
        num_slots = _LOGPROB_SLOTS if 2 * max_in_flight_steps <= _LOGPROB_SLOTS else num_slots
        shape = (num_slots, max_size, _LOGPROB_WORDS)
        self._logprobs = torch.zeros(shape, dtype=torch.int32, pin_memory=platform.pins_memory)
        self._logprobs_host = self._logprobs.numpy()
        self._cursor = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._next_slot = 0  # value of the cursor when all steps launched so far have run
        self._masks = MaskMemory(max_size, bitmasks, self._device)
        self._max_size = max_size
        self._hidden: Tensor | None = None  # [max_size, hidden_size], for rows that end a step with prompts

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

    def run(self, size: int) -> HalfDone | PassedOn:
        """Queue the first half of the step, of the rows that were set; all of it if this rank does not sample."""
        inputs = self.prepare(size)
        hidden = self.forward(inputs, size)
        if not self.samples:
            advance_rows(self._requests.scalars.num_computed_tokens, self._rows[:size], inputs.seq_lens)
            return PassedOn(hidden)
        self._reserve_hidden(hidden)
        return HalfDone(self._model.compute_logits(hidden), inputs)

    def prepare(self, size: int) -> DecodeInputs:
        """Gather the inputs of the rows that were set."""
        requests = self._requests
        return prepare_decode(requests.token_ids, requests.scalars.words, COLUMNS, self._rows[:size])

    def forward(self, inputs: DecodeInputs, size: int) -> Tensor:
        """Return the hidden states [size, hidden_size] of the rows that were set."""
        return self._model.decode(inputs, self._rows[:size])

    def hold(self, hidden: Tensor, places: Tensor | None, rows: Rows, size: int) -> None:
        """Keep the hidden states of the batch's ``rows`` [n] for `end`: those of ``hidden`` [m, hidden_size] at
        ``places``, int32 or int64 [n] on the device; None: all, m = n."""
        self.set_rows(rows, size)
        kept = self._reserve_hidden(hidden)[: len(rows)]
        if places is None:
            kept.copy_(hidden)
        else:
            torch.index_select(hidden, 0, places, out=kept)

    def end(self, size: int, sampling: Sampling) -> None:
        """Queue the end of the step whose hidden states are held; as `sample`."""
        inputs = self.prepare(size)
        assert self._hidden is not None, "nothing is held"
        self.sample(HalfDone(self._model.compute_logits(self._hidden[:size]), inputs), sampling)

    def _reserve_hidden(self, hidden: Tensor) -> Tensor:
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._max_size, hidden.shape[1])
        return self._hidden

    def draw(self, logits: Tensor, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """Return (ids int64 [n], checks float32 [n]) by temperature and seed alone, for float32 [n, share]."""
        return self._sampler.vocabulary.draw(logits, inputs.temperature, inputs.seeds, inputs.sample_positions)

    def set_bitmasks(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, size: int) -> None:
        """Set the bitmasks of the next `sample`: ``bits`` [n, row_bytes] are of the batch's ``rows`` [n]."""
        self._masks.set(rows, bits, size)

    def sample(self, half: HalfDone, sampling: Sampling) -> None:
        """Queue the second half of the step; `published` fetches the answer. ``sampling``: of the whole batch."""
        logits, inputs = half
        rows, masks = self._rows[: len(logits)], self._masks
        if sampling > Sampling.PLAIN:
            logits = self._sampler.vocabulary.whole(logits)
        if sampling is Sampling.PLAIN:
            ids, checks = self.draw(logits, inputs)
        elif sampling is Sampling.ANY:
            ids, checks = self.sample_all(logits, rows)
        else:
            apply_bitmask(logits, masks.rows[: len(rows)], masks.bits[: len(rows)])
            cutoff = self._sampler.cutoff(logits, rows) if sampling >= Sampling.CUT else None
            ids, checks = gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions, cutoff)
        self.commit(rows, ids, checks)

    def sample_all(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Sampler.sample_padded`."""
        return self._sampler.sample_padded(logits, rows, self._masks, self._logprobs, self._cursor)

    def commit(self, rows: Tensor, ids: Tensor, checks: Tensor) -> None:
        """Put the sampled ids into the rows and where the host reads them; see `commit_decode`."""
        requests = self._requests
        if self._sampled is not None:
            self._sampled[: len(ids)].copy_(ids)
        where = (requests.token_ids, requests.scalars.words, COLUMNS, rows)
        commit_decode(*where, ids, checks, self._published, self._cursor)

    def published(self, num_rows: int, *, has_logprobs: bool = False) -> Published:
        """Return the memory of the answer of the step queued last."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._published_host)
        logprobs = self._logprobs_host[slot % len(self._logprobs_host)] if has_logprobs else None
        return Published(self._published_host[slot], num_rows, self.platform.record_event(), logprobs)

    def run_padded(self, size: int, *, has_end: bool) -> None:
        """Run the step, and the end of one with prompts if that has this size, with nothing but padding: kernels and
        libraries load what they need, no row changes."""
        self.set_rows(NO_ROWS, size)
        self.set_bitmasks(NO_ROWS, None, size)
        half = self.run(size)
        if isinstance(half, PassedOn):
            return
        for sampling in Sampling:
            self.sample(half, sampling)
        if has_end:
            for sampling in Sampling:
                self.end(size, sampling)
        num_answers = len(Sampling) * (1 + has_end)
        self._next_slot = (self._next_slot + num_answers) % len(self._published_host)


class _Graphs(NamedTuple):
    """Both halves of the decodes of a size."""

    first: Graph
    second: dict[Sampling, Graph]  # empty on a rank that does not sample
    left: HalfDone | PassedOn  # what the first graph leaves; its logits lie in the pool until another graph is launched


class _Unowned:
    """Memory of a tensor on a CUDA device, which it does not keep."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__)


def _unowned(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory, which does not keep it: other graphs of the pool may use it, too."""
    return torch.as_tensor(_Unowned(tensor), device=tensor.device) if tensor.is_cuda else tensor


class CudaGraphManager:
    """Captures `DecodeStep` for batches of the given sizes, and replays it.

    With ``enforce_eager`` it runs the step as it is, padded alike, so that both give the same bits; with
    ``captures_ends`` beside it the end of every step is a graph, that of steps with prompts.
    """

    def __init__(
        self,
        step: DecodeStep,
        sizes: list[int],
        platform: Platform,
        *,
        enforce_eager: bool,
        captures_ends: bool = False,
        has_ends: bool = True,
        step_rows: StepRows = ROWS_UNSEEN,
    ) -> None:
        """``has_ends``: also the ends of steps with prompts. ``step_rows``: has the kinds of steps."""
        self._platform = platform
        self.step = step
        self._sizes = sorted(sizes)
        self._is_eager = enforce_eager
        self._has_ends_alone = captures_ends and step.samples
        self.launches = Launches()
        self._step_rows = step_rows
        self._of_kinds: dict[int, dict[int, _Graphs]] = {kind: {} for kind in step_rows.kinds}  # those of decode steps
        self._ends: dict[int, dict[Sampling, Graph]] = {}  # graphs of the ends of steps with prompts, by size
        end_sizes = (size for size in self._sizes if size in _END_SIZES or size == self._sizes[-1])
        self._end_sizes = list(end_sizes) if has_ends else []
        self._half: tuple[int, HalfDone] | None = None  # size of the step to be sampled; what its first half leaves
        self._held = 0  # size of the end that waits
        self._pool: Any = None

    @property
    def _graphs(self) -> dict[int, _Graphs]:
        """The graphs of decode steps of the kind of the step that is run, by size."""
        return self._of_kinds[self._step_rows.kind]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the graphs, ascending."""
        return list(self._sizes)

    @property
    def max_size(self) -> int:
        return self._sizes[-1]

    @property
    def num_captured(self) -> int:
        return len(self._graphs or self._ends)

    def size_for(self, num_reqs: int) -> int | None:
        """Return the smallest size that holds ``num_reqs``; None if there is none."""
        place = bisect.bisect_left(self._sizes, num_reqs)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Capture every size. ``progress(done, total)``. Nothing may be in flight."""
        captured = [(kind, size) for size in self._sizes[::-1] for kind in self._step_rows.kinds]
        if self._is_eager:
            captured = [(self._step_rows.kinds[0], size) for size in self._end_sizes[::-1] if self._has_ends_alone]
        if not captured:
            return
        for kind, size in captured:
            # What a first run does (loading a kernel) must not be captured.
            with self._step_rows.only(kind):
                self.step.run_padded(size, has_end=size in self._end_sizes)
        self._platform.release_cached()  # the graphs need the memory that the largest run has left cached
        for i, (kind, size) in enumerate(captured):
            progress(i, len(captured))
            with self._step_rows.only(kind):
                self.capture(size)
        progress(len(captured), len(captured))

    def run(self, rows: Rows, size: int) -> Tensor | None:
        """Queue the first half of a step of these requests, padded to ``size``, one of those that there are.

        Returns the hidden states to be passed on, [len(rows), hidden_size], on a rank that does not sample.
        """
        self.step.set_rows(rows, size)
        if self._has_ends_alone:
            self._step_rows.choose(rows)
            self.launches.note(is_graph=False, num_paddings=size - len(rows))
            self.hold(self.step.forward(self.step.prepare(size), size)[: len(rows)], None, rows)
            return None
        half = self._run_first(rows, size)
        if isinstance(half, PassedOn):
            return half.hidden[: len(rows)]
        self._half = (size, half)
        return None

    def run_to_logits(self, rows: Rows, size: int) -> tuple[Tensor, HalfDone]:
        """Queue the first half of a step as `run` does, on a rank that samples, for another end than `sample`: it is to
        be queued before another graph. Returns the rows, int64 [len(rows)] on the device, too."""
        places = self.step.set_rows(rows, size)
        half = self._run_first(rows, size)
        assert isinstance(half, HalfDone)
        return places[: len(rows)], half

    def run_empty(self, size: int) -> None:
        """Queue the first half of a step of no requests, which nothing follows: for what ranks exchange in it."""
        self.step.set_rows(NO_ROWS, size)
        self._run_first(NO_ROWS, size)

    def _run_first(self, rows: Rows, size: int) -> HalfDone | PassedOn:
        self._step_rows.choose(rows)
        self.launches.note(is_graph=size in self._graphs, num_paddings=size - len(rows))
        if size not in self._graphs:
            return self.step.run(size)
        self._graphs[size].first.replay()
        return self._graphs[size].left

    def sample(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, sampling: Sampling) -> None:
        """Queue the second half of the step: ``bits`` [n, row_bytes] are of the batch's ``rows`` [n]; ``sampling``: of
        the whole batch."""
        if self._half is None:
            self.end(rows, bits, sampling)
            return
        (size, half), self._half = self._half, None
        if sampling >= Sampling.MASKED:
            self.step.set_bitmasks(rows, bits, size)
        self.launches.note(is_graph=size in self._graphs)
        if size in self._graphs:
            self._graphs[size].second[sampling].replay()
        else:
            self.step.sample(half, sampling)

    def hold(self, hidden: Tensor, places: Tensor | None, rows: Rows) -> None:
        """Keep the hidden states of those requests of a step with prompts that sample; see `DecodeStep.hold`."""
        self._held = self._end_sizes[bisect.bisect_left(self._end_sizes, len(rows))]
        self.step.hold(hidden, places, rows, self._held)

    def end(self, rows: Rows, bits: npt.NDArray[np.uint8] | None, sampling: Sampling) -> None:
        """Queue the end of the step whose hidden states are held; as `sample`."""
        size = self._held
        if sampling >= Sampling.MASKED:
            self.step.set_bitmasks(rows, bits, size)
        self.launches.note(is_graph=size in self._ends)
        if size in self._ends:
            self._ends[size][sampling].replay()
        else:
            self.step.end(size, sampling)

    @phase("capture")
    def capture(self, size: int) -> None:
        """Capture the graphs of a size, whose step has run before."""
        if self._pool is None:
            self._pool = self._platform.graph_pool()
        if not self._is_eager:
            self._capture_decode(size)
        # Ends are the same for all kinds of steps.
        if size not in self._end_sizes or size in self._ends or not self.step.samples:
            return
        ends = {}
        for sampling in Sampling:
            with self._platform.capture(self._pool) as ends[sampling]:
                self.step.end(size, sampling)
        self._ends[size] = ends

    def _capture_decode(self, size: int) -> None:
        with self._platform.capture(self._pool) as first:
            half = self.step.run(size)
        if isinstance(half, PassedOn):
            self._graphs[size] = _Graphs(first, {}, half)
            return
        second = {}
        for sampling in Sampling:
            with self._platform.capture(self._pool) as second[sampling]:
                self.step.sample(half, sampling)
        self._graphs[size] = _Graphs(first, second, half._replace(logits=_unowned(half.logits)))
