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

from ..ipc.messages import DraftColumns, LogprobColumns, ModelRunnerOutput, RowError, float32, int32
from .input_batch import Rows
from .platforms.platform import Event, Platform
from .sampling.sampler import LogprobRows

__all__ = ["NO_SIDE_OUTPUT", "AsyncOutput", "HostOutput", "OutputCopier", "Published", "SideOutput", "float_column"]


class HostOutput(NamedTuple):
    """Sampled tokens on the host. n rows; of the log-probabilities only those of `LogprobRows` are set."""

    token_ids: np.ndarray | None = None  # [n]: sampled ids
    checks: np.ndarray | None = None  # float32 [n]: finite if the row could be sampled, see `SamplerOutput`
    counts: np.ndarray | None = None  # [requests that sample]: tokens that each gets in a step with drafts; None: one
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
    sampled. ``drafts``: the step's, if its answer is ragged; ``places`` [n]: how many that are not certain are before
    each row. ``side``: what the step yields beside tokens, of which ``source`` has the values.
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
        drafts: DraftColumns | None = None,
        places: Rows | None = None,
        side: SideOutput = NO_SIDE_OUTPUT,
    ) -> None:
        self._step_id = step_id
        self._num_reqs = num_reqs
        self._sampling = sampling
        self._source = source
        self._row_errors = row_errors
        self._logprobs = logprobs
        self._drafts = drafts
        self._places = places
        self._side = side

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._source is None or self._source.ready()

    def get(self) -> ModelRunnerOutput:
        """Wait until the device has copied the step's tokens, and return its answer."""
        host = HostOutput() if self._source is None else self._source.get()
        # The rows of logits that the answer has, in its order, and their errors; None: all rows, in any order.
        kept = None if self._drafts is None else self._accepted(host)
        errors = self._errors(host, kept)
        if kept is None or self._drafts is None:
            output = self._one_each(host, errors)
        else:
            output = self._ragged(host, kept, errors, self._drafts)
        self._side.add_to(output, host, errors)
        output.errors = [errors[i] for i in sorted(errors)]
        return output

    def _errors(self, host: HostOutput, kept: Rows | None) -> dict[int, RowError]:
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
                logprobs = _columns(self._logprobs, host, keep, self._logprobs.batch_idx)
        return ModelRunnerOutput(self._step_id, _int_column(token_ids), logprobs)

    def _accepted(self, host: HostOutput) -> Rows:
        """Return the rows of logits whose tokens were accepted, in the order of the batch."""
        order = np.argsort(self._sampling, kind="stable")
        if host.token_ids is None:
            return order
        if host.counts is None or self._places is None:  # in place of a token that no request gets there is -1
            return order[host.token_ids[order] >= 0]
        counts = host.counts[np.cumsum(self._places == 0) - 1]  # the count of each row's request
        return order[(self._places < counts)[order]]

    def _ragged(
        self, host: HostOutput, kept: Rows, errors: Mapping[int, RowError], drafts: DraftColumns
    ) -> ModelRunnerOutput:
        if errors:
            kept = kept[~np.isin(self._sampling[kept], list(errors))]
        counts = np.bincount(self._sampling[kept], minlength=self._num_reqs).astype(np.int32)
        token_ids = np.empty(0, dtype=np.int32) if host.token_ids is None else host.token_ids[kept].astype(np.int32)
        # Drafts that are certain come before the token sampled after them.
        num_drafts, is_certain = np.array(drafts.counts), np.array(drafts.is_certain, dtype=bool)
        certain = np.where(is_certain & (counts > 0), num_drafts, 0)
        certain_ids = np.array(drafts.token_ids)[np.repeat(certain > 0, num_drafts)]
        token_ids = np.insert(token_ids, np.repeat(np.cumsum(counts) - counts, certain), certain_ids)
        counts += certain.astype(np.int32)
        logprobs = None
        if self._logprobs is not None:
            token_idx = np.full(len(self._sampling), -1, dtype=np.int64)
            token_idx[kept] = np.arange(len(kept)) + np.cumsum(certain)[self._sampling[kept]]
            token_idx = token_idx[self._logprobs.rows]
            keep = [i for i in np.argsort(token_idx) if token_idx[i] >= 0]
            logprobs = _columns(self._logprobs, host, keep, token_idx)
        return ModelRunnerOutput(self._step_id, _int_column(token_ids), logprobs, counts=_int_column(counts))


class OutputCopier:
    """Copies the sampled tokens of one device to the host."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._stream = platform.side_stream()

    def __call__(self, tensors: Mapping[str, Tensor]) -> Source:
        """``tensors``: what there is, by field of `HostOutput`. Of a step that samples nothing there are none: its
        answer is ready when it was computed all the same. Else all of a long prompt would be launched at once, and how
        long its steps take would not be known."""
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
        return RowError(
            batch_idx,
            "InvalidRequestError",
            "no token is left to sample: the grammar, min_tokens, allowed_token_ids, bad_words and logit_bias together "
            "forbid every one",
        )
    return RowError(
        batch_idx, "InternalError", "the model's logits hold NaN or infinity for this request; others are unharmed"
    )


def _columns(
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
        _int_column(words[:, 1 : 1 + most][wanted]),
        float_column(words[:, 1 + most :][wanted].view(np.float32)),
    )


def _int_column(values: np.ndarray) -> array[int]:
    column = int32()
    column.frombytes(values.tobytes())
    return column


def float_column(values: np.ndarray) -> array[float]:
    column = float32()
    column.frombytes(values.astype(np.float32).tobytes())
    return column
