"""The answer to a step on its way to the host: the one place of the runner that reads the device.

On the CPU it is ready at once. On CUDA the copies into pinned memory are to be queued on a side stream here, with an
event that `ready` asks and `get` waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import LogprobColumns, ModelRunnerOutput, RowError, float32, int32
from .input_batch import Rows
from .sampler import LogprobTensors, SamplerOutput

__all__ = ["AsyncOutput"]


class AsyncOutput:
    """Of a step with ``num_reqs`` requests; those at batch positions ``sampling`` (host int64 [n]) got a token.

    ``row_errors``: batch position to the error of a request that failed before it was sampled.
    """

    def __init__(
        self,
        step_id: int,
        num_reqs: int,
        sampling: Rows,
        sampled: SamplerOutput | None,
        row_errors: Mapping[int, RowError],
    ) -> None:
        if sampled is not None and sampled.token_ids.device.type != "cpu":
            raise InternalError("outputs can be copied from the CPU only yet: start the engine with device='cpu'")
        self._step_id = step_id
        self._num_reqs = num_reqs
        self._sampling = sampling
        self._sampled = sampled
        self._row_errors = row_errors

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""
        return True

    def get(self) -> ModelRunnerOutput:
        """Wait for the device and put the answer together."""
        token_ids = np.full(self._num_reqs, -1, dtype=np.int32)
        errors = dict(self._row_errors)
        logprobs = None
        if self._sampled is not None:
            checks = _numpy(self._sampled.checks)
            for i in np.flatnonzero(~np.isfinite(checks)):
                batch_idx = int(self._sampling[i])
                errors.setdefault(batch_idx, _unsampled(batch_idx, float(checks[i])))
            token_ids[self._sampling] = _numpy(self._sampled.token_ids)
            token_ids[list(errors)] = -1
            if self._sampled.logprobs is not None:
                logprobs = _columns(self._sampled.logprobs, errors)
        return ModelRunnerOutput(
            self._step_id, int32(token_ids.tolist()), logprobs, [errors[i] for i in sorted(errors)]
        )


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


def _columns(tensors: LogprobTensors, errors: Mapping[int, RowError]) -> LogprobColumns | None:
    """Cut each row to the alternatives that it asked for, leave out failed rows, order by batch position."""
    keep = [i for i in np.argsort(tensors.batch_idx) if int(tensors.batch_idx[i]) not in errors]
    if not keep:
        return None
    counts = tensors.counts[keep]
    wanted = np.arange(tensors.values.shape[1]) < counts[:, None]
    return LogprobColumns(
        int32(tensors.batch_idx[keep].tolist()),
        float32(_numpy(tensors.sampled)[keep].tolist()),
        int32(counts.tolist()),
        int32(_numpy(tensors.token_ids)[keep][wanted].tolist()),
        float32(_numpy(tensors.values)[keep][wanted].tolist()),
    )


def _numpy(tensor: Tensor) -> np.ndarray:
    assert not tensor.requires_grad and tensor.layout is torch.strided
    return tensor.numpy()
