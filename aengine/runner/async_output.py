"""The answer to a step on its way to the host: the one place of the runner that reads the device.

CPU                          the tensors themselves
an accelerator               copied into pinned memory on a side stream; an event says when they are there
  sampled in a graph             written by the graph's last kernel into memory that the host reads (`Published`)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ..ipc.messages import UNSAMPLED, LogprobColumns, ModelRunnerOutput, ResultColumns, RowError, float32, int32
from .input_batch import Rows
from .platforms.platform import Event, Platform
from .sampling.sampler import LogprobRows


class HostOutput(NamedTuple):
    """Sampled tokens on the host. n rows; of the log-probabilities only those of `LogprobRows` are set."""

    token_ids: np.ndarray | None = None  # [n]: sampled ids
    checks: np.ndarray | None = None  # float32 [n]: finite if the row could be sampled, see `SamplerOutput`
    counts: np.ndarray | None = None  # [requests that sample]: tokens that each gets; None: one
    side: np.ndarray | None = None  # what the step yields beside tokens, see `SideOutput`
    logprobs: np.ndarray | None = None  # int32 [n, 1 + 2 * k], see `token_logprobs`


class SideOutput:
    """What a step yields beside sampled tokens. Here: nothing."""

    tensors: Mapping[str, Tensor] = {}
    """What is copied to the host, by field of `HostOutput`."""

    def add_to(self, output: ModelRunnerOutput, host: HostOutput, errors: dict[int, RowError]) -> None:
        """Add it to the answer, and to ``errors`` those of requests that get none, by batch position."""


NO_SIDE_OUTPUT = SideOutput()


class Source(Protocol):
    """Where the sampled tokens come from."""

    def ready(self) -> bool: ...

    def get(self) -> HostOutput: ...


class AsyncOutput:
    """The answer of a step with ``num_reqs`` requests, in which n rows of logits were sampled: those of the requests at
    batch positions ``sampling`` (host int64 [n]).

    ``source``: their tokens, or only when the step was computed, if nothing was sampled; None: nothing was computed.
    ``logprobs``: whose they are. ``row_errors``: batch position to the error of a request that failed before it was
    sampled. ``side``: what the step yields beside tokens, of which ``source`` has the values.
    """

    def __init__(
        self,
        step_id: int,
        num_reqs: int,
        sampling: Rows,
        source: Source | None,
        row_errors: Mapping[int, RowError],
        logprobs: LogprobRows | None = None,
        *,
        side: SideOutput = NO_SIDE_OUTPUT,
    ) -> None:
        self._step_id = step_id
        self._num_reqs = num_reqs
        self._sampling = sampling
        self._source = source
        self._row_errors = row_errors
        self._logprobs = logprobs
        self._side = side
        self.launches = (0, 0)  # see `Launches.take`

    def ready(self) -> bool:
        """Return whether `get` returns without waiting."""
        return self._source is None or self._source.ready()

    def get(self) -> ModelRunnerOutput:
        """Wait until the device has copied the step's tokens, and return its answer."""
        host = HostOutput() if self._source is None else self._source.get()
        output, errors = self._read(host)
        self._side.add_to(output, host, errors)
        output.errors = [errors[i] for i in sorted(errors)]
        output.graph_mode, output.num_paddings = self.launches
        return output

    def _read(self, host: HostOutput) -> tuple[ModelRunnerOutput, dict[int, RowError]]:
        """Return the answer, in which each request has one token at most, and the errors by batch position."""
        errors = self._errors(host)
        return self._one_each(host, errors), errors

    def _errors(self, host: HostOutput, kept: Rows | None = None) -> dict[int, RowError]:
        """Return the error of each failed row, by batch position. ``kept``: the rows of logits that the answer has;
        None: all."""
        errors = dict(self._row_errors)
        if host.checks is not None:
            is_bad = ~np.isfinite(host.checks)
            if is_bad.any():
                for i in np.flatnonzero(is_bad) if kept is None else kept[is_bad[kept]]:
                    batch_idx = int(self._sampling[i])
                    errors.setdefault(batch_idx, _unsampled(batch_idx, float(host.checks[i])))
        return errors

    def _one_each(self, host: HostOutput, errors: Mapping[int, RowError]) -> ModelRunnerOutput:
        token_ids = np.full(self._num_reqs, -1, dtype=np.int32)
        logprobs = None
        if host.token_ids is not None:
            token_ids[self._sampling] = host.token_ids
            if errors:
                token_ids[list(errors)] = -1
            if self._logprobs is not None:
                keep = [i for i in np.argsort(self._logprobs.batch_idx) if self._logprobs.batch_idx[i] not in errors]
                logprobs = logprob_columns(self._logprobs, host, keep, self._logprobs.batch_idx)
        return ModelRunnerOutput(self._step_id, int_column(token_ids), logprobs)


class OutputCopier:
    """Copies the sampled tokens of one device to the host."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._stream = platform.side_stream()

    def __call__(self, tensors: Mapping[str, Tensor]) -> Source:
        """Copy ``tensors`` to the host, by field of `HostOutput`. A step that samples nothing gives none, and its
        answer is ready when the step was computed: otherwise all of a long prompt would be launched at once, and the
        times of its steps would not be known."""
        if not tensors:
            return _Copied({}, self._platform.record_event())
        copies, event = self._stream.to_host(list(tensors.values()))
        return _Copied(dict(zip(tensors, copies, strict=True)), event)


@dataclass(slots=True)
class _Copied:
    tensors: dict[str, Tensor]  # tensors on the CPU, by the field of HostOutput
    event: Event | None

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def get(self) -> HostOutput:
        if self.event is not None:
            self.event.synchronize()
        return HostOutput(**{name: tensor.numpy() for name, tensor in self.tensors.items()})


@dataclass(slots=True)
class Published:
    """One slot of a `commit_decode` kernel's memory, once ``event`` has come."""

    words: np.ndarray  # int32 [2, m]: ids, bits of checks
    num_rows: int
    event: Event | None
    logprobs: np.ndarray | None = None  # see HostOutput

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def get(self) -> HostOutput:
        if self.event is not None:
            self.event.synchronize()
        ids, checks = self.words[:, : self.num_rows]
        return HostOutput(ids, checks.view(np.float32), logprobs=self.logprobs)


def _unsampled(batch_idx: int, check: float) -> RowError:
    if check == -math.inf:
        features = "the grammar, min_tokens, allowed_token_ids, bad_words, logit_bias and extra_args"
        return RowError(batch_idx, "InvalidRequestError", f"{UNSAMPLED[0]}: {features} together forbid every one")
    return RowError(batch_idx, "InternalError", f"{UNSAMPLED[1]}; others are unharmed")


def logprob_columns(
    whose: LogprobRows,
    host: HostOutput,
    keep: Sequence[int],
    token_idx: Rows,
) -> LogprobColumns | None:
    """Return the entries that ``keep`` names, each cut to the alternatives that it asked for. ``token_idx``: where the
    answer has the token of each entry."""
    if not keep or host.logprobs is None:
        return None
    words = host.logprobs[whose.rows[keep]]
    most = (words.shape[1] - 1) // 2
    counts = whose.counts[keep]
    wanted = np.arange(most) < counts[:, None]
    return LogprobColumns(
        int32(token_idx[keep].tolist()),
        float_column(words[:, 0].view(np.float32)),
        int32(counts.tolist()),
        int_column(words[:, 1 : 1 + most][wanted]),
        float_column(words[:, 1 + most :][wanted].view(np.float32)),
    )


def add_results(output: ModelRunnerOutput, batch_idx: Sequence[int], sizes: Sequence[int], values: np.ndarray) -> None:
    """Add results to an answer: of the requests at these positions so many numbers each, float32 [sum(sizes)]."""
    columns = output.results = output.results or ResultColumns(int32(), int32(), float32())
    columns.batch_idx.extend(batch_idx)
    columns.sizes.extend(sizes)
    columns.values.frombytes(values.tobytes())


def int_column(values: np.ndarray) -> array[int]:
    column = int32()
    column.frombytes(values.tobytes())
    return column


def float_column(values: np.ndarray) -> array[float]:
    column = float32()
    column.frombytes(values.astype(np.float32).tobytes())
    return column
