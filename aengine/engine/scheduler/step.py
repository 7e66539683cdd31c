"""Steps in flight, on the host."""

from __future__ import annotations

from array import array
from collections import deque

from ...errors import InternalError
from ...ipc.messages import ModelRunnerOutput, int32
from .request import Request

__all__ = ["NOTHING", "InFlightStep", "UnansweredSteps"]


NOTHING: array[int] = int32()
"""For columns that are replaced, never changed in place."""
_NOT_SETTLED = NOTHING, NOTHING


class InFlightStep:
    """A step that was made and has not been answered."""

    __slots__ = (
        *("batch", "certain", "chunks", "drafts", "grown_groups", "grown_rows", "is_gated"),
        *("leavers", "newcomers", "num_prompt_tokens", "num_tokens", "removed", "settled", "step_id"),
    )

    def __init__(
        self,
        step_id: int,
        batch: list[Request],
        chunks: dict[int, int],
        drafts: dict[int, list[int]],
        num_tokens: int,
        num_prompt_tokens: int,
    ) -> None:
        self.step_id = step_id
        self.batch = batch
        self.chunks = chunks  # for each row that does not sample, by batch index: its computed tokens after this step
        self.drafts = drafts  # drafts of the rows that have some, by batch index
        self.certain: frozenset[int] = frozenset()  # batch indices of the rows whose drafts are all accepted
        self.num_tokens = num_tokens  # tokens that the step computes
        self.num_prompt_tokens = num_prompt_tokens  # tokens of the requests that compute more than one, such as prompts
        self.is_gated = False  # a GRAMMAR frame must be sent before the step samples
        self.newcomers: list[Request] = []  # requests whose first step this is
        self.leavers: list[Request] = []  # requests whose blocks are freed once this step is answered
        self.removed: array[int] = NOTHING  # rows that the step has told as removed
        self.settled = _NOT_SETTLED  # rows that the step has told as settled, and how many drafts of each were rejected
        self.grown_rows: list[int] = []  # row of each block that the step has given out
        self.grown_groups: list[int] = []  # KV group of each block that the step has given out

    def check(self, answer: ModelRunnerOutput, token_ids: list[int], vocab_size: int) -> None:
        """Raise InternalError unless ``answer``, with these ids, has the form that an answer to this step must have."""
        num_reqs = len(self.batch)
        is_odd = answer.errors or answer.results or self.drafts or self.chunks or answer.counts is not None
        if not is_odd and len(token_ids) == num_reqs and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return  # the usual answer: one token each
        ended = () if answer.results is None else answer.results.batch_idx
        if (
            (answer.counts is None) == bool(self.drafts)
            or len(token_ids if answer.counts is None else answer.counts) != num_reqs
            or not all(0 <= error.batch_idx < num_reqs for error in answer.errors)
            or not all(0 <= i < num_reqs and not self.batch[i].samples for i in ended)
            or max(token_ids, default=0) >= vocab_size
        ):
            raise InternalError(f"the worker's answer to step {self.step_id} does not have the form of its batch")
        excused = self.chunks.keys() | {error.batch_idx for error in answer.errors} | set(ended)
        for i, (request, count) in enumerate(zip(self.batch, answer.num_tokens(), strict=True)):
            most = 0 if i in self.chunks or not request.samples else 1 + len(self.drafts.get(i, ()))
            if count > most:
                raise InternalError(f"step {self.step_id} sampled {count} tokens for {request}, but {most} were due")
            least = most if i in self.certain else 1
            if count < least and i not in excused and request.finish_reason is None:
                raise InternalError(f"step {self.step_id} should have sampled for {request}, but did not")
        if answer.counts is not None and min(token_ids, default=0) < 0:
            raise InternalError(f"step {self.step_id} sampled tokens that the model does not have")

    def num_samples(self, batch_idx: int) -> int:
        """Return at how many positions the row at ``batch_idx``, which samples, does so."""
        return 1 if batch_idx in self.certain else 1 + len(self.drafts.get(batch_idx, ()))

    def may_reject(self, request: Request) -> bool:
        """Return whether the step has drafts of the request that may be rejected."""
        return any(self.batch[i] is request for i in self.drafts if i not in self.certain)

    def constrained(self) -> list[tuple[int, Request]]:
        """Return (batch index, request) of the requests that sample under a grammar in this step."""
        chunks = self.chunks
        return [(i, r) for i, r in enumerate(self.batch) if r.grammar is not None and i not in chunks]


class UnansweredSteps(deque[InFlightStep]):
    """The steps that were made and have not been answered, oldest first; and what the next one tells of rows."""

    def __init__(self) -> None:
        super().__init__()
        self._removed: list[int] = []  # rows that the worker is to remove
        self._settled = _NOT_SETTLED  # rows whose drafts were answered, and how many of each were rejected

    def remove_row(self, row: int) -> None:
        self._removed.append(row)

    def settle_rows(self, rows: array[int], num_rejected: array[int]) -> None:
        """Tell the worker in the next step how many drafts of these rows were rejected."""
        self._settled = self._settled[0] + rows, self._settled[1] + num_rejected

    def add(self, step: InFlightStep) -> None:
        """Put a new step behind the others. It tells what there is to tell of rows."""
        step.removed, self._removed = int32(self._removed), []
        step.settled, self._settled = self._settled, _NOT_SETTLED
        self.append(step)

    def take_back(self) -> InFlightStep:
        """Take out the newest step, which the worker has not begun: the next one tells what it told."""
        step = self.pop()
        self._removed += step.removed
        self.settle_rows(*step.settled)
        return step

    def requests(self) -> set[Request]:
        return {request for step in self for request in step.batch}
