"""`GrammarGate`: a step in which a grammar has a say does not sample before its bitmask has come.

published ──> `step` ──begin──> rows are filled (loop or thread) ──send──> GRAMMAR frame; forced tokens are drafted
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import AEngineError, GrammarError, InternalError
from ..ipc.messages import GrammarOutput, int32
from .delivery import Sampled
from .executor import Executor
from .recovery import Watchdog
from .scheduler.request import Request
from .scheduler.scheduler import Scheduler
from .scheduler.step import NOTHING_AHEAD, InFlightStep
from .structured.bitmasks import Filled, Filling, MaskJob
from .structured.service import GrammarService

_LONG_FILLING = 0.05
"""Seconds for which other step loops wait for a bitmask, where they compute steps together; then they go on without the
step behind it, as many steps as may be in flight."""


class JumpForward(NamedTuple):
    """Jump-forward decoding: when tokens that a grammar forces, as it allows no others, are drafted."""

    most_rows: int  # most rows with a grammar in a step: to ask a grammar which tokens it forces takes some 10 us a row
    least_tokens: float  # least forced tokens a request, on average: fewer save less than the larger step costs
    verified_rows: int = 0  # requests of a step up to which they are verified as guesses are, by a graph for drafts


ALWAYS = JumpForward(1 << 30, 0.0)
IN_SMALL_BATCHES = JumpForward(4, 2.0)
"""On a GPU, where a step of several tokens a request is no decode graph, and takes about as long as two."""
BY_GRAPHS = JumpForward(1 << 30, 0.2, verified_rows=4)
"""On a GPU with graphs for drafts. These sample at each position, which needs a row of a bitmask: those of one request
are filled one after the other, so with many requests it takes less to have none."""


class Masks(NamedTuple):
    """The bitmask of a step that waits for it, filled or being filled."""

    step: InFlightStep
    due: list[Request]  # the request of each job
    batch_idx: array[int]  # the batch position of each row of the bitmask
    rows: bytearray | memoryview  # the bitmasks, one row for each sampled position
    is_shared: bool  # the rows lie in memory that the worker shares
    filled: Filled | Filling


class GrammarGate:
    """Holds the step that must not sample before its bitmask has come; fills and sends that bitmask."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarService | None,
        jump_forward: JumpForward,
        watchdog: Watchdog,
        rest: Callable[[], None],
    ) -> None:
        """``rest`` is called while a bitmask takes long, if other replicas' steps wait for the next one here."""
        self.step: InFlightStep | None = None  # the published step that waits for its bitmask before it samples
        self._scheduler = scheduler
        self._grammars = grammars
        self._jump_forward = jump_forward
        self._watchdog = watchdog
        self._rest = rest

    def close_for(self, step: InFlightStep) -> None:
        """Note that ``step`` was published and waits for its bitmask. Requests whose rows take long to fill are paused,
        and so are in none of the next steps."""
        self.step = step
        if len(step.batch) > 1:
            for _, request in step.constrained():
                if request.grammar is not None and request.grammar.is_slow:
                    self._scheduler.pause(request)

    def begin(self, executor: Executor) -> Masks | None:
        """Begin to fill the bitmask of the step that waits for one, if all answers before it are known."""
        step = self.step
        if step is None or step is not self._scheduler.oldest_step:
            return None
        assert self._grammars is not None
        due = [(i, request) for i, request in step.constrained() if request.finish_reason is None]
        bitmasks = self._grammars.bitmasks
        batch_idx_column = int32(i for i, _ in due)
        if step.ahead:
            batch_idx_column = int32(i for i, _ in due for _ in range(step.ahead.get(i, NOTHING_AHEAD).num_samples))
        num_bytes = bitmasks.row_bytes * len(batch_idx_column)
        shared = executor.bitmask(num_bytes)
        rows = bytearray(num_bytes) if shared is None else shared
        bitmasks.check_open()
        # Nothing may fail from here on: the matchers, which outlive a worker, must get the tokens taken out below.
        jobs = []
        wants_forced = len(due) <= self._jump_forward.most_rows
        for batch_idx, request in due:
            grammar = request.grammar
            assert grammar is not None
            drafts, are_certain, _ = step.ahead.get(batch_idx, NOTHING_AHEAD)
            jobs.append(MaskJob(grammar, grammar.take_pending(), drafts, are_certain, wants_forced))
        filled = bitmasks.fill(jobs, rows)
        return Masks(step, [request for _, request in due], batch_idx_column, rows, shared is not None, filled)

    async def send(self, masks: Masks, executor: Executor) -> None:
        """Send the bitmask, and propose as drafts the tokens that its grammars force."""
        filled = masks.filled if isinstance(masks.filled, Filled) else await self._filled(masks.filled)
        for job, error in filled.failed.items():
            masks.due[job].sink.fail(_failure(error))
        self.step = None
        bitmask = len(masks.rows) if masks.is_shared else masks.rows
        await executor.send_grammar(GrammarOutput(masks.step.step_id, masks.batch_idx, bitmask))
        is_verified = len(masks.step.batch) <= self._jump_forward.verified_rows
        least = 0.0 if is_verified else self._jump_forward.least_tokens * len(masks.step.batch)
        if sum(map(len, filled.forced.values())) >= least:
            for job, (_, *drafts) in filled.forced.items():  # the step in flight samples the first
                request = masks.due[job]
                # A request that wants log-probabilities of each token needs the logits of each position.
                are_certain = request.params.logprobs is None and not is_verified
                self._scheduler.rows.lookahead.propose(request, drafts, are_certain=are_certain)

    async def _filled(self, filling: Filling) -> Filled:
        """Wait until the rows are filled. The watchdog is paused, since a row may take seconds that are not the
        worker's."""
        paused = self._watchdog.pause()
        rest = asyncio.get_running_loop().call_later(_LONG_FILLING, self._rest)
        try:
            return await filling.filled
        finally:
            self._watchdog.resume(paused)
            rest.cancel()

    def note_tokens(self, sampled: Sampled) -> set[Request]:
        """Queue the sampled tokens for their grammars' matchers. Returns the paused requests whose next row can be
        filled now."""
        paused: set[Request] = set()
        for request, token_id, _ in sampled:
            grammar = request.grammar
            if grammar is None:
                continue
            grammar.pending.append(token_id)
            if request.is_paused and request.num_pending == 0 and request.finish_reason is None:
                paused.add(request)
        return paused

    def fill_ahead(self, request: Request, when_filled: Callable[[], None]) -> None:
        """Fill the next row of a request with a slow grammar while it is in no step; then call ``when_filled``."""
        assert self._grammars is not None and request.grammar is not None

        def tell(row: asyncio.Future[Any]) -> None:
            if not row.cancelled():
                row.exception()  # the caller that takes the row later gets this error
            if request.finish_reason is None:
                when_filled()

        row = self._grammars.bitmasks.fill_ahead(request.grammar, lambda: request.finish_reason is None)
        row.add_done_callback(tell)


def _failure(error: Exception) -> AEngineError:
    """Return the error of a request whose row could not be filled."""
    from .structured.backend import MatcherLimitError

    if isinstance(error, MatcherLimitError):
        return GrammarError(str(error), kind="too_complex")
    return InternalError(f"the grammar of this request failed: {error}")
