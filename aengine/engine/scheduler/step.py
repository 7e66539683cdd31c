"""Steps in flight, on the host."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...errors import InternalError
from ...ipc.messages import ModelRunnerOutput, SchedulerOutput, int32
from .request import Request

NOTHING: array[int] = int32()
"""An empty column, shared: columns of a step are replaced, never changed in place."""
_NOT_SETTLED = NOTHING, NOTHING


class AheadTokens(NamedTuple):
    """Tokens that a row computes in a step behind its known ones: it gets one token more than these, or fewer."""

    token_ids: list[int]
    are_certain: bool = False  # it gets all of them, and samples after the last alone
    proposer: str = ""

    @property
    def num_samples(self) -> int:
        """Number of positions at which the row samples."""
        return 1 if self.are_certain else 1 + len(self.token_ids)


NOTHING_AHEAD = AheadTokens([])


class Lookahead:
    """Tokens that requests compute behind their known ones: none here. Speculation overrides these methods."""

    def propose(
        self, request: Request, token_ids: Sequence[int], *, are_certain: bool = False, proposer: str = "grammar"
    ) -> int:
        """Guess that ``token_ids`` follow what the request has sampled, all steps in flight included. ``are_certain``:
        nothing else can be sampled. Returns how many of them its next step computes, as far as there is room."""
        return 0

    def extend(self, request: Request, end: int, most: int, num_logits: int) -> AheadTokens:
        """Return what a request computes in the step being planned behind its ``end`` known tokens, ``most`` at most.
        ``num_logits``: rows of logits that the step may have without them."""
        return NOTHING_AHEAD

    def tell(self, output: SchedulerOutput, ahead: dict[int, AheadTokens]) -> None:
        """Put into a step's message what rows compute ahead in it, by batch index."""

    def settle(self, request: Request, ahead: AheadTokens, count: int) -> None:
        """Take back what was counted for the request in a step that has brought it ``count`` tokens."""

    def may_reject(self, request: Request) -> bool:
        """Return whether what the request computes ahead in steps in flight may be rejected."""
        return False

    def drop(self, request: Request) -> None:
        """Forget what is proposed for a request that has lost its row."""


class InFlightStep:
    """A step that was made and has not been answered."""

    __slots__ = (
        *("ahead", "batch", "chunks", "copies_aside", "grown_groups", "grown_rows", "is_gated"),
        *("leavers", "newcomers", "num_prompt_tokens", "num_tokens", "removed", "settled", "step_id"),
    )

    def __init__(
        self,
        step_id: int,
        batch: list[Request],
        chunks: dict[int, int],
        ahead: dict[int, AheadTokens],
        num_tokens: int,
        num_prompt_tokens: int,
    ) -> None:
        self.step_id = step_id
        self.batch = batch
        self.chunks = chunks  # for each row that does not sample, by batch index: its computed tokens after this step
        self.ahead = ahead  # what rows compute behind their known tokens, by batch index
        self.num_tokens = num_tokens  # tokens that the step computes
        self.num_prompt_tokens = num_prompt_tokens  # tokens of the requests that compute more than one, such as prompts
        self.is_gated = False  # a GRAMMAR frame must be sent before the step samples
        self.newcomers: list[Request] = []  # requests whose first step this is
        self.leavers: list[Request] = []  # requests whose blocks are freed once this step is answered
        self.removed: array[int] = NOTHING  # rows that the step has told as removed
        self.settled = _NOT_SETTLED  # rows that the step has told as settled, and how many tokens fewer each has
        self.grown_rows: list[int] = []  # row of each block that the step has given out
        self.grown_groups: list[int] = []  # KV group of each block that the step has given out
        self.copies_aside = False  # the step begins with copies of pages that may be free already

    def check(self, answer: ModelRunnerOutput, token_ids: list[int], vocab_size: int) -> None:
        """Raise InternalError unless ``answer``, with these ids, has the form that an answer to this step must have."""
        num_reqs = len(self.batch)
        is_odd = answer.errors or answer.results or self.ahead or self.chunks or answer.counts is not None
        if not is_odd and len(token_ids) == num_reqs and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return  # the usual answer: one token each
        with_results = () if answer.results is None else answer.results.batch_idx
        if (
            (answer.counts is None) == bool(self.ahead)
            or len(token_ids if answer.counts is None else answer.counts) != num_reqs
            or not all(0 <= error.batch_idx < num_reqs for error in answer.errors)
            or not all(0 <= i < num_reqs for i in with_results)
            or max(token_ids, default=0) >= vocab_size
        ):
            raise InternalError(f"the worker's answer to step {self.step_id} does not have the form of its batch")
        ended = {i for i in with_results if not self.batch[i].samples}
        excused = self.chunks.keys() | {error.batch_idx for error in answer.errors} | ended
        for i, (request, count) in enumerate(zip(self.batch, answer.num_tokens(), strict=True)):
            ahead = self.ahead.get(i, NOTHING_AHEAD)
            most = 0 if i in self.chunks or not request.samples else 1 + len(ahead.token_ids)
            if count > most:
                raise InternalError(f"step {self.step_id} sampled {count} tokens for {request}, but {most} were due")
            least = most if ahead.are_certain else 1
            if count < least and i not in excused and request.finish_reason is None:
                raise InternalError(f"step {self.step_id} should have sampled for {request}, but did not")
        if answer.counts is not None and min(token_ids, default=0) < 0:
            raise InternalError(f"step {self.step_id} sampled tokens that the model does not have")

    def constrained(self) -> list[tuple[int, Request]]:
        """Return (batch index, request) of the requests that sample under a grammar in this step."""
        chunks = self.chunks
        return [(i, r) for i, r in enumerate(self.batch) if r.grammar is not None and i not in chunks]


class UnansweredSteps(deque[InFlightStep]):
    """The steps that were made and have not been answered, oldest first; and what the next one tells of rows."""

    def __init__(self) -> None:
        super().__init__()
        self._removed: list[int] = []  # rows that the worker is to remove
        self._settled: list[int] = []  # rows that have fewer tokens than was counted
        self._num_rejected: list[int] = []  # how many fewer each of these has

    @property
    def copy_aside(self) -> bool:
        """Whether a page that is free may yet be read by a copy that a step in flight makes. Steps, which come later,
        may write it; a copy from elsewhere, which waits for no step, may not."""
        return any(step.copies_aside for step in self)

    def remove_row(self, row: int) -> None:
        self._removed.append(row)

    def settle_rows(self, rows: Iterable[int], num_rejected: Iterable[int]) -> None:
        """Tell the worker in the next step how many tokens fewer than was counted these rows have."""
        self._settled += rows
        self._num_rejected += num_rejected

    def add(self, step: InFlightStep) -> None:
        """Put a new step behind the others. It tells what there is to tell of rows."""
        step.removed, self._removed = int32(self._removed), []
        if self._settled:
            step.settled = int32(self._settled), int32(self._num_rejected)
            self._settled, self._num_rejected = [], []
        self.append(step)

    def take_back(self) -> InFlightStep:
        """Take out the newest step, which the worker has not begun: the next one tells what it told."""
        step = self.pop()
        self._removed += step.removed
        self.settle_rows(*step.settled)
        return step

    def requests(self) -> set[Request]:
        return {request for step in self for request in step.batch}
