"""Steps for which the device has no memory: what is left out of them, and what the requests that it was are told.

A rank that is alone leaves out the requests that need the most. Where other ranks compute the same step, they have it
in full already: then it is an InternalError, and all ranks start again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import RowError
from .input_batch import BatchPlan, SampleBatch
from .platforms.platform import Platform
from .sampling.sampler import Sampler, SamplerOutput

T = TypeVar("T")

_ON_A_RANK = (
    "the device ran out of memory in a step that other ranks compute too, so that all of them start again: lower "
    "gpu_memory_utilization, max_num_batched_tokens or max_num_seqs"
)
_TO_SAMPLE = (
    "the device has no memory for this request's penalties, log-probabilities, grammar or truncation: lower "
    "gpu_memory_utilization or max_num_seqs"
)


class OutOfMemory:
    """Runs what may need more memory than the device has."""

    def __init__(self, platform: Platform, *, is_alone: bool, may_repeat: bool) -> None:
        """``may_repeat``: a step that has failed may be run again; not so if its layers change states, some of which
        would be changed twice."""
        self._platform = platform
        self._is_alone = is_alone
        self._may_repeat = may_repeat

    def execute(self, run: Callable[[BatchPlan], T], plan: BatchPlan) -> tuple[T | None, dict[int, RowError]]:
        """Return ``run(plan)``, and the errors of requests that had to be left out of it, by position in the
        SchedulerOutput. First it is run once more, after torch's cached memory is released; then without the prompts,
        which need the most: they fail, and the requests that decode go on. None: there are none."""
        if not self._may_repeat:
            return run(plan), {}
        result, reason = self._try(run, plan)
        if result is None:
            self._platform.release_cached()
            result, reason = self._try(run, plan)
        if result is not None:
            return result, {}
        if plan.num_decodes == plan.num_reqs:
            raise torch.OutOfMemoryError(reason)
        self._platform.release_cached()
        if plan.num_decodes:
            result = run(plan.first(plan.num_decodes))
        message = (
            f"the device ran out of memory in a step of {plan.num_tokens} tokens, and this prompt was part of it: "
            f"lower max_num_batched_tokens or gpu_memory_utilization ({reason})"
        )
        failed = map(int, plan.batch_idx[plan.num_decodes :])
        return result, {i: RowError(i, "InternalError", message) for i in failed}

    def sample(self, sampler: Sampler, logits: Tensor, batch: SampleBatch) -> tuple[SamplerOutput, dict[int, RowError]]:
        """Sample the batch, and return the errors of requests that had to be left out, as `execute` does: those that
        ask the sampler for more than temperature and seed fail, the others are sampled."""
        sampled, reason = self._try(sampler.sample, logits, batch)
        if sampled is not None:
            return sampled, {}
        self._platform.release_cached()
        failed = batch.batch_idx[sampler.needs_memory(batch)]
        if not len(failed):
            raise torch.OutOfMemoryError(reason)
        message = f"{_TO_SAMPLE} ({reason})"
        errors = {i: RowError(i, "InternalError", message) for i in map(int, failed)}
        return sampler.sample_plainly(logits, batch), errors

    def fault_of_row(self) -> tuple[str, str]:
        """Return type and message of the error of a request that the sampler has no memory for from the start."""
        if not self._is_alone:
            raise InternalError(_ON_A_RANK)
        return "InternalError", _TO_SAMPLE

    def _try(self, run: Callable[..., T], *args: Any) -> tuple[T | None, str]:
        """Return (``run(*args)``, ""), or (None, torch's message) if memory runs out. The error itself, which refers to
        all that the attempt had allocated, is freed when this returns."""
        try:
            return run(*args), ""
        except torch.OutOfMemoryError as error:
            return None, self._reason(error)

    def _reason(self, error: torch.OutOfMemoryError) -> str:
        """Return torch's message about memory. Raises InternalError unless there is one rank."""
        reason = str(error).partition(". ")[0]
        if not self._is_alone:
            raise InternalError(f"{_ON_A_RANK} ({reason})") from None
        return reason
