"""Multi-step scheduling: steps given ahead while the host's loop is late, and taken back when something comes.

    in flight    [step 7][step 8] [step 9 ... step 40]          with a new request, an abort, a deadline:
                  given anyway     leased                       REVOKE; those not begun are dropped, and undone here

The scheduler can make steps far ahead: a token in flight counts as known, lengths are known too, and what is sampled
past a stop is dropped. A leased step does nothing but continue requests that decode (`Scheduler.is_steady`), so it can
be taken back, and nobody waits for more than the steps that are given anyway.

An answer is followed by two steps at most, so their number grows by one with each answer, and begins anew when some
were taken back: requests that come one after the other have no more steps made for nothing than are answered meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ...errors import EngineError, InternalError
from ...ipc.messages import ModelRunnerOutput, SchedulerOutput
from ..executor import Executor
from ..recovery import Watchdog
from ..scheduler.request import Request, RequestStatus
from ..scheduler.rows import Rows
from ..scheduler.scheduler import Scheduler
from ..scheduler.step import InFlightStep
from .in_flight_limit import InFlightLimit
from .steps_in_flight import StepsInFlight


class MultiStep(StepsInFlight):
    """Steps in flight, of which the newest may be leased: the worker has got them early, and they can be revoked."""

    def __init__(self, base: int, most: int) -> None:
        """``base``: most steps in flight while the host's loop is on time; ``most``: while it is late."""
        super().__init__(base)
        self.capacity = most
        self.limit = InFlightLimit(base, most)
        self._leased: deque[InFlightStep] = deque()  # leased steps that the worker may not have begun, oldest first
        self._must_revoke = False  # a REVOKE must be sent before another step is made
        self._is_publishing = False  # a step is being sent to the workers, and has no entry in ``answers`` yet
        self._is_revoking = False  # a REVOKE was sent, and REVOKED has not come

    def attach(self, scheduler: Scheduler, executor: Executor, watchdog: Watchdog, work: asyncio.Event) -> None:
        super().attach(scheduler, executor, watchdog, work)
        self._watchdog = watchdog
        self._work = work

    def clear(self) -> None:
        super().clear()
        self._leased.clear()
        self._must_revoke = self._is_revoking = False
        self.most = self.limit.base

    def begin_turn(self) -> None:
        self.most = min(self.most, self.limit.num_steps(self.scheduler))
        if self._must_revoke:
            self._try_to_revoke()

    @property
    def has_room(self) -> bool:
        return not self._is_revoking and super().has_room

    @property
    def num_cancellable(self) -> int:
        return len(self._leased)

    @property
    def next_is_cancellable(self) -> bool:
        return bool(self._leased) or len(self.answers) >= self.limit.base

    @property
    def is_cancelling(self) -> bool:
        return self._is_revoking

    def schedule(self) -> SchedulerOutput | None:
        if not self.next_is_cancellable:
            return self.scheduler.schedule()
        if not self.scheduler.is_steady:
            self.cancel_queued()
            return None
        output = self.scheduler.schedule(can_be_undone=True)
        if output is not None:
            output.is_leased = True
            newest = self.scheduler.newest_step
            assert newest is not None
            self._leased.append(newest)
        return output

    async def give(self, output: SchedulerOutput) -> None:
        self._is_publishing = True
        try:
            await super().give(output)
        finally:
            self._is_publishing = False
        if self._must_revoke:
            self._try_to_revoke()

    async def next_answer(self) -> ModelRunnerOutput | None:
        oldest = self.answers[0]
        answer = await oldest
        if answer is None:  # the step was revoked while it was awaited
            assert not self.answers or self.answers[0] is not oldest, "a step was revoked, and is awaited"
            return None
        self.answers.popleft()
        if self._leased and self._leased[0].step_id == answer.step_id:
            self._leased.popleft()
        self.limit.note_answer(answer.answered_at)
        self.most += 1
        return answer

    def note_idle(self) -> None:
        self.limit.begin()

    def cancel_queued(self) -> None:
        """Revoke the leased steps that the worker has not begun, so that the next one can contain what has come."""
        if self._leased and not self._is_revoking:
            self.most = self.limit.base
            self._must_revoke = True
            self._try_to_revoke()

    def _try_to_revoke(self) -> None:
        if self._is_publishing:  # REVOKED would count from the newest answer, which is not the newest step yet
            return
        try:
            self._is_revoking = self.executor.try_revoke(self._on_revoked)
        except EngineError:  # the step loop meets the same error and reports it
            return
        self._must_revoke = not self._is_revoking

    def _on_revoked(self, num_steps: int) -> None:
        """Undo the newest ``num_steps`` steps, which the worker has dropped."""
        if not self.is_running:  # the engine is being closed, and its requests have ended
            return
        self._is_revoking = False
        if num_steps > len(self._leased):
            raise InternalError(f"the worker dropped {num_steps} steps, of which {len(self._leased)} were leased")
        undo_steps(self.scheduler.rows, num_steps)
        self._leased.clear()  # the worker has begun those that it did not drop
        for _ in range(num_steps):
            self.answers.pop()
        self._watchdog.drop(num_steps)
        self._work.set()


def undo_steps(rows: Rows, num_steps: int) -> None:
    """Undo the newest ``num_steps`` steps, made with ``can_be_undone``: the scheduler's state becomes what it was
    before them."""
    requests: dict[Request, None] = {}
    leavers: list[Request] = []
    for _ in range(num_steps):
        step = rows.steps.take_back()
        requests |= dict.fromkeys(_undo(step, rows))
        leavers += step.leavers
    for batch in rows.batches:
        batch.refresh()
        own = (request for request in requests if request.batch_index == batch.index)
        rows.join([request for request in own if request.status is RequestStatus.DRAINING])
    for request in requests:
        rows.set_limit(request)
    if rows.steps:
        rows.steps[-1].leavers += leavers
        return
    for request in leavers:
        rows.release(request)


def _undo(step: InFlightStep, rows: Rows) -> list[Request]:
    """Undo one step: take back its blocks and computed tokens. Returns its requests that still have a row."""
    requests = {request.req_idx: request for request in step.batch if request.req_idx >= 0}
    for row, group in zip(step.grown_rows, step.grown_groups, strict=True):
        if row in requests:
            rows.kv.take_back(requests[row], group)
    for request in requests.values():
        request.num_computed_tokens -= 1
    return list(requests.values())
