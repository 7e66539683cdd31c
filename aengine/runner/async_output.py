"""The answer to a step on its way to the host: the one place of the runner that reads the device.

CPU                          the tensors themselves
an accelerator               copied into pinned memory on a side stream; an event says when they are there
  sampled in a graph             written by the graph's last kernel into memory that the host reads (`Published`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ..ipc.messages import LogprobColumns, ModelRunnerOutput, RowError, float32, int32
from .input_batch import Rows
from .platforms.platform import Event, Platform
from .sampling.sampler import LogprobTensors, SamplerOutput

__all__ = ["AsyncOutput", "OutputCopier", "Published"]


class HostOutput(NamedTuple):
    """What was sampled, on the host. n rows; of the log-probabilities those of `LogprobTensors`."""

    token_ids: np.ndarray  # [n]
    checks: np.ndarray  # float32 [n]
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # sampled, token_ids, values


class Source(Protocol):
    """Where the sampled tokens come from."""

    def ready(self) -> bool: ...

    def get(self) -> HostOutput: ...


class AsyncOutput:
    """Of a step with ``num_reqs`` requests; those at batch positions ``sampling`` (host int64 [n]) got a token.

    ``source``: their tokens; None if nothing was sampled. ``logprobs``: whose they are. ``row_errors``: batch position
    to the error of a request that failed before it was sampled.
    """

    def __init__(
        self,
        step_id: int,
        num_reqs: int,
        sampling: Rows,
        source: Source | None,
        row_errors: Mapping[int, RowError],
        logprobs: LogprobTensors | None = None,
    ) -> None:
        self._step_id = step_id
        self._num_reqs = num_reqs
        self._sampling = sampling
        self._source = source
        self._row_errors = row_errors
        self._logprobs = logprobs

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._source is None or self._source.ready()

    def get(self) -> ModelRunnerOutput:
        """Wait for the device and put the answer together."""
        token_ids = np.full(self._num_reqs, -1, dtype=np.int32)
        errors = dict(self._row_errors)
        logprobs = None
        if self._source is not None:
            host = self._source.get()
            finite = np.isfinite(host.checks)
            if not finite.all():
                for i in np.flatnonzero(~finite):
                    batch_idx = int(self._sampling[i])
                    errors.setdefault(batch_idx, _unsampled(batch_idx, float(host.checks[i])))
            token_ids[self._sampling] = host.token_ids
            if errors:
                token_ids[list(errors)] = -1
            if self._logprobs is not None and host.logprobs is not None:
                logprobs = _columns(self._logprobs, host.logprobs, errors)
        column = int32()
        column.frombytes(token_ids.tobytes())
        return ModelRunnerOutput(self._step_id, column, logprobs, [errors[i] for i in sorted(errors)])


class OutputCopier:
    """Brings samples of one device to the host."""

    def __init__(self, platform: Platform) -> None:
        self._stream = platform.copy_stream()

    def __call__(self, sampled: SamplerOutput) -> Source:
        tensors = [sampled.token_ids, sampled.checks]
        if sampled.logprobs is not None:
            tensors += [sampled.logprobs.sampled, sampled.logprobs.token_ids, sampled.logprobs.values]
        return _Copied(*self._stream.to_host(tensors))


@dataclass(slots=True)
class _Copied:
    tensors: list[Tensor]  # on the CPU
    event: Event | None

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def get(self) -> HostOutput:
        if self.event is not None:
            self.event.synchronize()
        token_ids, checks, *rest = (t.numpy() for t in self.tensors)
        return HostOutput(token_ids, checks, (rest[0], rest[1], rest[2]) if rest else None)


@dataclass(slots=True)
class Published:
    """One slot of a `commit_decode` kernel's memory, once ``event`` has come."""

    words: np.ndarray  # int32 [2, m]: ids, bits of checks
    num_rows: int
    event: Event | None

    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def get(self) -> HostOutput:
        if self.event is not None:
            self.event.synchronize()
        ids, checks = self.words[:, : self.num_rows]
        return HostOutput(ids, checks.view(np.float32), None)


def _unsampled(batch_idx: int, check: float) -> RowError:
    if check == -math.inf:
        return RowError(
            batch_idx,
            "InvalidRequestError",
            "no token is left to sample: the grammar, min_tokens and logit_bias together forbid every one",
        )
    return RowError(
        batch_idx, "InternalError", "the model's logits hold NaN or infinity for this request; others are unharmed"
    )


def _columns(
    whose: LogprobTensors, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], errors: Mapping[int, RowError]
) -> LogprobColumns | None:
    """Cut each row to the alternatives that it asked for, leave out failed rows, order by batch position."""
    keep = [i for i in np.argsort(whose.batch_idx) if int(whose.batch_idx[i]) not in errors]
    if not keep:
        return None
    sampled, token_ids, values = arrays
    counts = whose.counts[keep]
    wanted = np.arange(values.shape[1]) < counts[:, None]
    return LogprobColumns(
        int32(whose.batch_idx[keep].tolist()),
        float32(sampled[keep].tolist()),
        int32(counts.tolist()),
        int32(token_ids[keep][wanted].tolist()),
        float32(values[keep][wanted].tolist()),
    )
