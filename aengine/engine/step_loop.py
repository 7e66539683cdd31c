"""The step loop: a coroutine that schedules step N+1, publishes it, then awaits and applies the answer of N.

    schedule() --SchedulerOutput--> executor --frame--> worker
    update()   <-ModelRunnerOutput- future   <--frame-- worker

Up to ``max_in_flight_steps`` steps are on their way at once, so that the worker finds the next one in its ring when it
ends the last. What the loop decides from is the scheduler's state alone; what it says of a request, its tokens, its end
and its failure, goes to the request's ``sink`` (a `ChoiceOutput`). `Admission`, which gave it the request, hears of an
end from there, and takes what is left of the request out by `drop`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from time import perf_counter

from ..errors import EngineError
from ..ipc.messages import ModelRunnerOutput, SchedulerOutput
from ..outputs import FinishReason
from ..telemetry.metrics import Counters, LoopLag
from ..telemetry.observer import Observer
from .delivery import Delivery, logprobs_by_token, request_error
from .executor import Executor
from .grammar_gate import ALWAYS, GrammarGate, JumpForward, Masks
from .pacing.peers import Peers
from .pacing.step_hold import StepHold
from .pacing.step_time import StepTime
from .pacing.steps_in_flight import StepsInFlight
from .recovery import Watchdog, hang_error
from .scheduler.request import Request, RequestStatus
from .scheduler.scheduler import Scheduler
from .speculation.drafts import Speculation
from .structured.bitmasks import Filled
from .structured.service import GrammarService

_MOST_SENT_AHEAD = 4
"""Full steps of prompts that are sent while a burst is still being submitted: no stream decodes that would wait."""


class StepLoop:
    """Runs the requests of one replica on the engine's event loop.

    `run` ends when the executor has failed; after `preempt_all` and `restart` with another one it goes on where it was.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        work: asyncio.Event,
        *,
        in_flight: StepsInFlight,
        step_time: StepTime,
        counters: Counters,
        observer: Observer,
        on_begun: Callable[[str], None],
        hang_timeout: float = math.inf,
        step_patience: float = 0.0,
        grammars: GrammarService | None = None,
        jump_forward: JumpForward = ALWAYS,
        speculation: Speculation,
        peers: Peers,
    ) -> None:
        """``peers``: asked before each step, and told of each. ``speculation``: asked for guesses before each step.

        ``work`` wakes the idle loop, which then finds what there is to do; a failing executor sets it. ``on_begun``
        is told the id of each request with its first step, once for each of n completions."""
        self.scheduler = scheduler
        self._executor = executor
        self._step_time = step_time
        self._counters = counters
        self._observer = observer
        self._on_begun = on_begun
        self.in_flight = in_flight
        self._work = work
        self._is_idle = False
        self._answered = perf_counter()  # when the last step was answered, in seconds of `perf_counter`
        self._num_new_tokens = 0  # tokens of the requests added since the loop became idle
        self._unsent: SchedulerOutput | None = None
        loop = asyncio.get_running_loop()
        self.lag = LoopLag(loop)
        self._peers = peers
        watchdog = Watchdog(loop, hang_timeout, lambda: self._executor.liveness(), self._on_hang)
        peers.attach(scheduler.quarantine, work, watchdog)
        self.watchdog = peers.watchdog
        self.watchdog.patience = step_patience
        in_flight.attach(scheduler, executor, self.watchdog, work)
        self.hold = StepHold(self._is_resting, in_flight.cancel_queued, work.set)
        self._gate = GrammarGate(scheduler, grammars, jump_forward, self.watchdog, self._peers.note_idle)
        self._speculation = speculation
        self._delivery = Delivery(scheduler)
        self.launched: Counter[tuple[int, bool, str]] = Counter()  # see `GraphStatistics.sums`

    def add(self, request: Request) -> None:
        """Start to compute a request. Its tokens, its end and its failure go to its sink."""
        if request.grammar is not None and request.grammar.is_slow and request.grammar.ahead is None:
            self._fill_ahead(request)  # the request is added when its row has been filled
            return
        self.scheduler.add_request(request)
        self._work.set()
        self.in_flight.cancel_queued()
        if self._is_idle:
            self._num_new_tokens += len(request.token_ids)
            if self._num_new_tokens >= self.scheduler.max_num_batched_tokens:
                self._send_ahead()

    def wake(self) -> None:
        """Look for something to compute: a request that waited for another scheduler's may have a row."""
        self._work.set()

    def _send_ahead(self) -> None:
        """Publish a step in the middle of a burst of `add` calls, if enough prompt tokens for a full step have come:
        the loop may be busy for long with adding more."""
        if self._unsent is not None or self._gate.step is not None or self.in_flight.is_cancelling:
            return
        if len(self.in_flight.answers) >= min(_MOST_SENT_AHEAD, self.scheduler.max_in_flight_steps):
            return
        if self.hold.is_held or not self._peers.may_step:
            return
        self._num_new_tokens = 0
        output = self.scheduler.schedule()
        if output is None:
            return
        try:
            is_given = self.in_flight.try_give(output)
        except EngineError:  # `run` meets the same error and reports it
            is_given = False
        if is_given:
            self._note_scheduled(output)
        else:
            self._unsent = output

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        self._peers.note_given(sum(output.num_scheduled_tokens))
        newest = self.scheduler.newest_step
        assert newest is not None
        if newest.newcomers:
            self._observer.note_scheduled(newest.newcomers)
            for request in newest.newcomers:
                self._on_begun(request.request_id)
                # the other completions find the prompt of index 0 in the cache
                if request.index == 0 and request.sink.mailbox is not None:
                    request.sink.mailbox.cached_tokens = request.num_cached_tokens
        if newest.is_gated:
            self._gate.close_for(newest)
        self._counters.num_steps += 1

    def drop(self, request: Request, reason: FinishReason) -> None:
        """Stop computing a request that has ended. Idempotent."""
        if request.finish_reason is not None:
            return
        self.scheduler.finish(request, reason)
        self._work.set()
        self.in_flight.cancel_queued()

    async def run(self) -> EngineError:
        """Run until the executor fails, and return its error. Raises CancelledError, and whatever a bug raises."""
        generation = self._peers.generation
        self.in_flight.is_running = True
        try:
            while True:
                await self._step()
        except EngineError as error:
            # A worker with invalid answers can't be used; this has no effect on an executor that has failed already.
            self._executor.fail(error)
            return error.with_traceback(None)  # the error is kept, and the frames of its traceback hold requests
        finally:
            self.in_flight.is_running = False
            if self._peers.generation == generation:  # the watchdog does not watch other workers yet
                self.watchdog.stop()
            self.lag.pause()
            self.hold.note_rest()

    def preempt_all(self, exception: str = "") -> list[Request]:
        """Put all requests back into the queue after the worker has died; they will be computed again from their known
        ids. ``exception``: what the worker raised, if it could say. Returns the requests that are held to be the cause
        of several deaths, which should not be run again."""
        self.in_flight.clear()
        self._gate.step = self._unsent = None
        return self.scheduler.preempt_all(exception)

    def restart(self, executor: Executor) -> None:
        """Give the next `run` another executor, after `preempt_all`."""
        self._executor = executor
        self.in_flight.restart(executor)

    def _on_hang(self, fault: str) -> None:
        self._executor.fail(hang_error(fault))

    def _is_resting(self) -> bool:
        is_idle = self._is_idle and not self.in_flight.answers and self._unsent is None
        return is_idle or not self.in_flight.is_running

    async def _step(self) -> None:
        """Run one turn: keep the worker supplied, then take the oldest answer."""
        await self._send_due_bitmask()
        in_flight = self.in_flight
        in_flight.begin_turn()
        if await self._publish_next():
            await self._send_due_bitmask()
            if in_flight.has_room and self._gate.step is None:
                return
        if not in_flight.has_answer:
            self._peers.note_idle()
        if not in_flight.answers:
            await self._idle()
            return
        answer = await in_flight.next_answer()
        if answer is None:
            return
        self._peers.note_answered()
        await self._apply(answer)
        if in_flight.has_answer:  # more answers have come: let other tasks of this loop run first
            await asyncio.sleep(0)

    async def _publish_next(self) -> bool:
        """Publish one more step, if the worker may have one and there is something to compute."""
        if self._gate.step is not None or not self.in_flight.has_room:
            return False
        # A step that was made before a hold began is given: the scheduler counts it as one in flight.
        if (self.hold.is_held and self._unsent is None) or not self._peers.may_step:
            return False
        if not self._speculation.propose():
            return False
        output, self._unsent = self._unsent or self.in_flight.schedule(), None
        if output is None:
            return False
        self._note_scheduled(output)
        await self.in_flight.give(output)
        return True

    async def _send_due_bitmask(self) -> None:
        """Fill and send the bitmask of the step that waits for one, if all answers before it are known."""
        masks = self._gate.begin(self._executor)
        if masks is not None:
            await self._gate.send(masks, self._executor)

    async def _send_and_publish(self, masks: Masks | None) -> EngineError | None:
        """Send a bitmask, if there is one, and publish the next step: the worker waits for both. Returns an EngineError
        instead of raising it."""
        try:
            if masks is not None:
                await self._gate.send(masks, self._executor)
            await self._publish_next()
        except EngineError as error:
            return error
        return None

    def _fill_ahead(self, request: Request) -> None:
        """Fill the next row of a request with a slow grammar while it is paused; then resume it."""
        is_new = request.status is RequestStatus.NEW
        num_pauses = request.num_pauses

        def go_on() -> None:
            if is_new and request.status is RequestStatus.NEW:  # the request was not moved meanwhile
                self.add(request)
            if request.num_pauses == num_pauses:  # the request was not preempted and paused again meanwhile
                self.scheduler.resume(request)
            self._work.set()

        self._gate.fill_ahead(request, go_on)

    async def _idle(self) -> None:
        """Wait until a request comes or leaves, while nothing can be scheduled. Uses no CPU. Raises the executor's
        failure."""
        self.lag.pause()
        self._is_idle, self._num_new_tokens = True, 0
        self.hold.note_rest()
        try:
            await self._work.wait()
        finally:
            self._is_idle = False
        self._work.clear()
        self._answered = perf_counter()  # a request that comes from another replica has not waited for this one
        if self._executor.failure is not None:
            raise self._executor.failure
        self.lag.resume()
        self.in_flight.note_idle()

    async def _apply(self, output: ModelRunnerOutput) -> None:
        """Commit an answer and deliver its tokens, giving the host's loop a turn after every few.

        What the worker waits for goes first: readers wait a millisecond longer.
        """
        step = self.scheduler.oldest_step
        sampled, failed, results, num_rows, begun = self.scheduler.update(output)
        assert step is not None, "update has found it"
        if output.seconds and step.num_prompt_tokens and not step.is_gated:
            self._step_time.learn(step.num_tokens, output.seconds)
        self._speculation.note_answer(step, output.answered_at, sampled)
        kind = output.graph_mode, step.num_prompt_tokens > 0
        counts = {"num_steps": 1, "num_tokens": step.num_tokens, "num_paddings": output.num_paddings}
        self.launched.update({(*kind, name): count for name, count in counts.items()})
        self._counters.generated_tokens += len(sampled)
        self._answered = self._observer.note_answer(begun, num_rows, self._answered)
        begun.clear()  # an idle engine must hold no request
        for request, error in failed:
            request.sink.fail(request_error(error, request.params.extra_args))
        for request, result in results:
            request.sink.put_result(result, None if request.samples else request.finish_reason)
        masks: Masks | None = None
        failure: EngineError | None = None  # raised at the end: these tokens are known, and not sampled again
        if self.scheduler.num_constrained:
            for request in self._gate.note_tokens(sampled):
                self._fill_ahead(request)
            try:
                masks = self._gate.begin(self._executor)
            except EngineError as error:
                failure = error
        logprobs = logprobs_by_token(output.logprobs) if output.logprobs is not None else {}
        if masks is not None and not isinstance(masks.filled, Filled):
            failure = await self._delivery.deliver_beside(
                masks.filled, self._send_and_publish(masks), sampled, logprobs
            )
        else:
            if failure is None and (masks is not None or not self.in_flight.answers):
                failure = await self._send_and_publish(masks)
            await self._delivery.deliver_all(sampled, logprobs)
        if failure is not None:
            raise failure
