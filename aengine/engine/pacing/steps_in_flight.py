"""The steps that the workers were given and have not answered: as many as keep a worker busy whose host is on time.

    Scheduler.schedule ──> give ──> [oldest ... newest] ──> next_answer

`MultiStep` has the same verbs, and gives more of them while the host's loop is late.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ...ipc.messages import ModelRunnerOutput, SchedulerOutput
from ..executor import AnswerFuture, Executor
from ..recovery import Watchdog
from ..scheduler.scheduler import Scheduler


class StepsInFlight:
    """The futures of the steps in flight, oldest first. No step is cancelled here."""

    def __init__(self, most: int) -> None:
        """``most``: the limit of steps in flight."""
        self.most = self.capacity = most
        self.answers: deque[AnswerFuture] = deque()
        self.is_running = False  # the step loop, which takes the answers, runs

    def attach(self, scheduler: Scheduler, executor: Executor, watchdog: Watchdog, work: asyncio.Event) -> None:
        """Connect with a step loop's scheduler, executor and watchdog; setting ``work`` wakes the loop."""
        self.scheduler = scheduler
        self.executor = executor

    def restart(self, executor: Executor) -> None:
        """Give the next steps to another executor; those in flight are forgotten."""
        self.clear()
        self.executor = executor

    def clear(self) -> None:
        """Forget all steps: they won't be answered."""
        self.answers.clear()

    def begin_turn(self) -> None:
        """Called at the begin of each turn of the step loop."""

    @property
    def has_room(self) -> bool:
        """Whether another step may be made now."""
        return len(self.answers) < self.most

    @property
    def num_cancellable(self) -> int:
        """Number of steps queued at the worker that may be cancelled: the next tokens of requests are in them."""
        return 0

    @property
    def next_is_cancellable(self) -> bool:
        """Whether the next step would be one that may be cancelled."""
        return False

    @property
    def is_cancelling(self) -> bool:
        """Whether queued steps are being cancelled, and none can be made before that is done."""
        return False

    def cancel_queued(self) -> None:
        """Cancel the queued steps, so that a request, an abort or the like is part of the worker's next step. Here none
        can be."""

    def schedule(self) -> SchedulerOutput | None:
        """Make the next step. None: there is nothing to compute now."""
        return self.scheduler.schedule()

    async def give(self, output: SchedulerOutput) -> None:
        """Publish the step, awaiting room for it. Raises the executor's failure."""
        self.answers.append(await self.executor.execute_model(output))

    def try_give(self, output: SchedulerOutput) -> bool:
        """Publish the step if that can be done at once; False: it has not been. Raises the executor's failure."""
        answer = self.executor.try_execute_model(output)
        if answer is not None:
            self.answers.append(answer)
        return answer is not None

    async def next_answer(self) -> ModelRunnerOutput | None:
        """Await the answer of the oldest step and take it. None: another step is the oldest by now. Raises the
        executor's failure."""
        answer = await self.answers[0]
        self.answers.popleft()
        return answer

    @property
    def has_answer(self) -> bool:
        """Whether the oldest step was answered."""
        return bool(self.answers) and self.answers[0].done()

    def note_idle(self) -> None:
        """Called after a time in which there was nothing to compute."""
