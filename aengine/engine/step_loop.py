"""The engine's heart: a coroutine that schedules step N+1, publishes it, then awaits and applies the answer of N.

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
import time
from array import array
from collections import deque
from collections.abc import Coroutine
from typing import Any, NamedTuple

from ..errors import EngineError, InternalError, InvalidRequestError, RequestError, WorkerDiedError
from ..ipc.messages import GrammarOutput, LogprobColumns, ModelRunnerOutput, RowError, SchedulerOutput, int32
from ..outputs import FinishReason, Logprob
from ..scheduler.proposers import ForcedTokens, Proposer
from ..scheduler.request import Request, RequestStatus
from ..scheduler.scheduler import Scheduler
from ..scheduler.step import InFlightStep
from ..structured.bitmasks import Filled, Filling, MaskJob
from ..structured.service import GrammarService
from ..telemetry.metrics import Counters, LoopLag
from ..telemetry.observer import Observer
from .executor import Executor
from .in_flight_limit import Lease
from .recovery import Watchdog
from .waiting_line import WaitingLine

__all__ = ["ALWAYS", "IN_SMALL_BATCHES", "Forcing", "StepLoop"]

_NO_LOGPROBS: tuple[Logprob, ...] = ()
_TURN = 32
"""Tokens delivered before the host's loop gets a turn: some 100 us of work, their consumers' included."""
_TURN_BESIDE_FILL = 8
"""The same while rows of bitmasks are filled, which may end sooner than expected."""
_MOST_SENT_AHEAD = 4
"""Full steps of prompts that are sent while a burst is still being submitted: no stream decodes that would wait."""


class Forcing(NamedTuple):
    """When tokens that a grammar forces are drafted."""

    most_rows: int  # with a grammar in the step: to ask for each what it forces takes some 10 us
    least_tokens: float  # forced, a request of the step: below, the steps that are saved cost less than the odd one


ALWAYS = Forcing(1 << 30, 0.0)
IN_SMALL_BATCHES = Forcing(4, 2.0)
"""On a GPU, where a step of several tokens a request is no decode graph, and takes about as long as two."""


class Masks(NamedTuple):
    """The bitmask of a step that waits for it, filled or being filled."""

    step: InFlightStep
    due: list[Request]  # of each job
    batch_idx: array[int]  # of each row
    rows: bytearray | memoryview
    is_shared: bool  # the worker sees the rows
    filled: Filled | Filling


class StepLoop:
    """Runs the requests of one engine on one event loop.

    Requests leave ``line`` with their first step. `run` ends when the executor has failed; after `restart` with another
    one it goes on where it was.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        max_in_flight_steps: int,
        max_leased_steps: int = 0,
        counters: Counters,
        observer: Observer,
        line: WaitingLine,
        hang_timeout: float = math.inf,
        step_patience: float = 0.0,
        grammars: GrammarService | None = None,
        forcing: Forcing = ALWAYS,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._lease = Lease(max_in_flight_steps, max_leased_steps)
        self._max_in_flight = max_in_flight_steps
        self._counters = counters
        self._observer = observer
        self._line = line
        self._grammars = grammars
        self._forcing = forcing
        self._proposer: Proposer = ForcedTokens()
        self._gated: InFlightStep | None = None  # published, and waits for its bitmask before it samples
        self._in_flight: deque[asyncio.Future[ModelRunnerOutput | None]] = deque()
        self._must_revoke = False  # leased steps, before another step can be made
        self._is_revoking = False  # the worker was told to, and has not said yet how many it dropped
        self._work = asyncio.Event()
        self._is_idle = False
        self._num_new_tokens = 0  # of requests added since it became idle
        self._unsent: SchedulerOutput | None = None
        self._failure: EngineError | None = None  # the executor's
        loop = asyncio.get_running_loop()
        self.lag = LoopLag(loop)
        self.watchdog = Watchdog(
            loop, hang_timeout, lambda: self._executor.heartbeats(), self._on_hang, patience=step_patience
        )
        executor.set_on_failure(self._on_executor_failure)

    def add(self, request: Request) -> None:
        if request.grammar is not None and request.grammar.is_slow and request.grammar.ahead is None:
            self._fill_ahead(request)  # and is added then
            return
        self.scheduler.add_request(request)
        self._work.set()
        self.break_lease()
        if self._is_idle:
            self._num_new_tokens += len(request.token_ids)
            if self._num_new_tokens >= self.scheduler.max_num_batched_tokens:
                self._send_ahead()

    def _send_ahead(self) -> None:
        """A full step waits already, and the host's loop may be busy for long with adding more: send it now."""
        if self._unsent is not None or self._gated is not None or self._is_revoking:
            return
        if len(self._in_flight) >= min(_MOST_SENT_AHEAD, self.scheduler.max_in_flight_steps):
            return
        self._num_new_tokens = 0
        output = self.scheduler.schedule()
        if output is None:
            return
        try:
            answer = self._executor.try_execute_model(output)
        except EngineError:  # `run` meets it too, and says so
            answer = None
        if answer is None:
            self._unsent = output
            return
        self._in_flight.append(answer)
        self._note_scheduled(output)

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        self.watchdog.begin(sum(output.num_scheduled_tokens))
        newest = self.scheduler.newest_step
        if newest is not None and newest.newcomers:
            self._observer.note_scheduled(newest.newcomers)
            for request in newest.newcomers:
                self._line.leave(request.request_id)
        if newest is not None and newest.is_gated:
            self._gated = newest
            if len(newest.batch) > 1:
                for _, request in newest.constrained():
                    if request.grammar is not None and request.grammar.is_slow:
                        self.scheduler.pause(request)
        self._counters.num_steps += 1

    def drop(self, request: Request, reason: FinishReason) -> None:
        """Compute nothing more for a request that has ended. Idempotent."""
        if request.finish_reason is not None:
            return
        self.scheduler.finish(request, reason)
        self._work.set()
        self.break_lease()

    def break_lease(self) -> None:
        """Have the worker drop the leased steps that it has not begun: what has come is part of its next one."""
        newest = self.scheduler.newest_step
        if newest is not None and newest.is_leased and not self._is_revoking:
            self._must_revoke = True
            self._try_to_revoke()

    def _try_to_revoke(self) -> None:
        try:
            self._is_revoking = self._executor.try_revoke(self._on_revoked)
        except EngineError:  # `run` meets it too, and says so
            return
        self._must_revoke = not self._is_revoking

    def _on_revoked(self, num_steps: int) -> None:
        """The worker has dropped so many, the newest of those in flight."""
        self._is_revoking = False
        self.scheduler.revoke(num_steps)
        for _ in range(num_steps):
            self._in_flight.pop()
        self.watchdog.drop(num_steps)
        self._work.set()

    async def run(self) -> EngineError:
        """Until the executor fails, whose error is returned, or until cancelled. Raises what a bug raises."""
        try:
            while True:
                await self._step()
        except EngineError as error:
            self._executor.fail(error)  # if it has not failed by itself: a worker that answers nonsense is of no use
            return error.with_traceback(None)  # it is kept, and its frames hold requests
        finally:
            self.watchdog.stop()
            self.lag.pause()

    def restart(self, executor: Executor) -> list[Request]:
        """Have ``executor`` compute all requests again from the ids that are known. Returns those of which several
        workers died one after the other; they are not run again."""
        condemned = self.scheduler.preempt_all()
        self._executor = executor
        self._in_flight.clear()
        self._must_revoke = self._is_revoking = False
        self._gated = self._unsent = self._failure = None
        executor.set_on_failure(self._on_executor_failure)
        return condemned

    def _on_executor_failure(self, error: EngineError) -> None:
        """Whoever waits for an answer gets it by that; the idle loop must be woken."""
        self._failure = error
        self._work.set()

    def _on_hang(self, fault: str) -> None:
        error = WorkerDiedError(f"the worker {fault}: it was killed")
        self._executor.fail(error)

    async def _step(self) -> None:
        """One turn: keep the worker supplied, then take the oldest answer."""
        await self._unlock()
        self._max_in_flight = self._lease.num_steps(self.scheduler)
        if self._must_revoke:
            self._try_to_revoke()
        if await self._supply():
            await self._unlock()
            if len(self._in_flight) < self._max_in_flight and self._gated is None:
                return
        if self._in_flight:
            answer = await self._in_flight[0]
            if answer is None:  # revoked meanwhile
                return
            self._in_flight.popleft()
            self.watchdog.end()
            self._lease.note_answer(answer.answered_at)
            await self._apply(answer)
            if self._in_flight and self._in_flight[0].done():  # many have come: others on this loop get their turn
                await asyncio.sleep(0)
        else:
            await self._idle()

    async def _supply(self) -> bool:
        """Publish one more step, if the worker may have one and there is something to compute."""
        if len(self._in_flight) >= self._max_in_flight or self._gated is not None or self._is_revoking:
            return False
        newest = self.scheduler.newest_step
        is_leased = len(self._in_flight) >= self._lease.base or (newest is not None and newest.is_leased)
        if is_leased and not self.scheduler.is_steady:
            self.break_lease()
            return False
        output, self._unsent = self._unsent or self.scheduler.schedule(is_leased=is_leased), None
        if output is None:
            return False
        self._note_scheduled(output)
        self._in_flight.append(await self._executor.execute_model(output))
        return True

    async def _unlock(self) -> None:
        """Fill and send the bitmask of the step that waits for one, if all answers before it are known."""
        masks = self._begin_masks()
        if masks is not None:
            await self._send_masks(masks)

    def _begin_masks(self) -> Masks | None:
        """Begin to fill the bitmask of the step that waits for one, if all answers before it are known."""
        step = self._gated
        if step is None or step is not self.scheduler.oldest_step:
            return None
        assert self._grammars is not None
        due = [(i, request) for i, request in step.constrained() if request.finish_reason is None]
        bitmasks = self._grammars.bitmasks
        batch_idx_column = int32(i for i, _ in due)
        if step.drafts:
            batch_idx_column = int32(i for i, _ in due for _ in range(1 + len(step.drafts.get(i, ()))))
        num_bytes = bitmasks.row_bytes * len(batch_idx_column)
        shared = self._executor.bitmask(num_bytes)
        rows = bytearray(num_bytes) if shared is None else shared
        bitmasks.check_open()
        # Nothing may fail from here on: tokens that are taken must come to the matchers, which outlive a worker.
        jobs = []
        wants_forced = len(due) <= self._forcing.most_rows
        for batch_idx, request in due:
            grammar = request.grammar
            assert grammar is not None
            drafts = step.drafts.get(batch_idx, ()) if step.drafts else ()
            jobs.append(MaskJob(grammar, grammar.take_pending(), drafts, wants_forced and request.takes_drafts))
        filled = bitmasks.fill(jobs, rows)
        return Masks(step, [request for _, request in due], batch_idx_column, rows, shared is not None, filled)

    async def _send_masks(self, masks: Masks) -> None:
        filled = masks.filled if isinstance(masks.filled, Filled) else await self._filled(masks.filled)
        for job, error in filled.failed.items():
            failure = InternalError(f"the grammar of this request failed: {error}")
            masks.due[job].sink.mailbox.fail(failure)
        self._gated = None
        bitmask = len(masks.rows) if masks.is_shared else masks.rows
        await self._executor.send_grammar(GrammarOutput(masks.step.step_id, masks.batch_idx, bitmask))
        if sum(map(len, filled.forced.values())) >= self._forcing.least_tokens * len(masks.step.batch):
            for job, token_ids in filled.forced.items():
                request = masks.due[job]
                assert request.grammar is not None
                request.grammar.forced = token_ids
                self.scheduler.propose(request, self._proposer.propose(request))

    async def _filled(self, filling: Filling) -> Filled:
        """A grammar's row may take seconds, for which the worker is not to blame."""
        self.watchdog.pause()
        try:
            return await filling.filled
        finally:
            self.watchdog.resume()

    async def _go_on(self, masks: Masks) -> EngineError | None:
        """Send a bitmask, and the next step with it: what the worker waits for. An error is returned."""
        try:
            await self._send_masks(masks)
            await self._supply()
        except EngineError as error:
            return error
        return None

    def _fill_ahead(self, request: Request) -> None:
        """Its grammar is slow: the request takes part in a step again when its next row is there."""
        assert self._grammars is not None and request.grammar is not None
        is_new = request.status is RequestStatus.NEW

        def go_on(row: asyncio.Future[Any]) -> None:
            if not row.cancelled():
                row.exception()  # whoever takes the row gets it
            if request.finish_reason is not None:
                return
            if is_new:
                self.add(request)
            self.scheduler.resume(request)
            self._work.set()

        row = self._grammars.bitmasks.fill_ahead(request.grammar, lambda: request.finish_reason is None)
        row.add_done_callback(go_on)

    async def _idle(self) -> None:
        """Nothing can be scheduled: wait for a request, or for one to leave. Costs nothing."""
        self.lag.pause()
        self._is_idle, self._num_new_tokens = True, 0
        try:
            await self._work.wait()
        finally:
            self._is_idle = False
        self._work.clear()
        if self._failure is not None:
            raise self._failure
        self.lag.resume()
        self._lease.begin()

    async def _apply(self, output: ModelRunnerOutput) -> None:
        """Commit an answer and deliver its tokens, giving the host's loop a turn after every few.

        What the worker waits for goes first: whoever reads waits a millisecond longer.
        """
        sampled, failed, pooled, num_rows = self.scheduler.update(output)
        self._counters.generated_tokens += len(sampled)
        self._observer.note_answer(self.scheduler.begun, num_rows)
        self.scheduler.begun.clear()  # an idle engine holds no request
        for request, error in failed:
            request.sink.mailbox.fail(_request_error(error))
        for request, vector in pooled:
            request.sink.put_vector(vector)
        masks: Masks | None = None
        failure: EngineError | None = None  # raised at the end: these tokens are known, and won't be sampled again
        if self.scheduler.num_constrained:
            self._note_tokens(sampled)
            try:
                masks = self._begin_masks()
            except EngineError as error:
                failure = error
        logprobs = _by_token(output.logprobs) if output.logprobs is not None else {}
        if masks is None:
            await self._deliver_all(sampled, logprobs)
        elif isinstance(masks.filled, Filled):
            failure = await self._go_on(masks)
            await self._deliver_all(sampled, logprobs)
        else:
            failure = await self._deliver_beside(masks.filled, self._go_on(masks), sampled, logprobs)
        if failure is not None:
            raise failure

    async def _deliver_beside(
        self,
        filling: Filling,
        going_on: Coroutine[Any, Any, EngineError | None],
        sampled: list[tuple[Request, int, int]],
        logprobs: dict[int, tuple[Logprob, ...]],
    ) -> EngineError | None:
        """As many tokens as there is time for while rows are filled, and the others when the worker has all it needs:
        two threads that run Python take turns, and the one that fills would wait for all that the loop finds to do."""
        task = asyncio.get_running_loop().create_task(going_on, name="aengine-masks")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, whoever else fails meanwhile
        try:
            until = await filling.free_until
            start = 0
            while start < len(sampled) and time.perf_counter() < until:
                self._deliver(sampled[start : start + _TURN_BESIDE_FILL], logprobs)
                start += _TURN_BESIDE_FILL
                await asyncio.sleep(0)
            failure = await task
            await self._deliver_all(sampled[start:], logprobs)
            return failure
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _deliver_all(
        self, sampled: list[tuple[Request, int, int]], logprobs: dict[int, tuple[Logprob, ...]]
    ) -> None:
        self._deliver(sampled[:_TURN], logprobs)
        for start in range(_TURN, len(sampled), _TURN):
            await asyncio.sleep(0)
            self._deliver(sampled[start : start + _TURN], logprobs)

    def _note_tokens(self, sampled: list[tuple[Request, int, int]]) -> None:
        """For the grammars, whose matchers will accept them."""
        paused: set[Request] = set()
        for request, token_id, _ in sampled:
            grammar = request.grammar
            if grammar is None:
                continue
            grammar.pending.append(token_id)
            if request.is_paused and request.num_pending == 0 and request.finish_reason is None:
                paused.add(request)
        for request in paused:
            self._fill_ahead(request)

    def _deliver(self, sampled: list[tuple[Request, int, int]], logprobs: dict[int, tuple[Logprob, ...]]) -> None:
        for request, token_id, place in sampled:
            sink, reason = request.sink, request.finish_reason
            if sink.finish_reason is not None:  # its caller left while others got their turn
                continue
            if reason is not None and len(sink.token_ids) + 1 < request.num_output_tokens:
                reason = None  # others of this answer follow
            entry = logprobs.get(place, _NO_LOGPROBS) if logprobs else _NO_LOGPROBS
            if sink.put(token_id, reason, _with_token(entry, token_id) if entry else entry):
                self.scheduler.finish(request, FinishReason.STOP)
                sink.end(FinishReason.STOP)


def _by_token(columns: LogprobColumns) -> dict[int, tuple[Logprob, ...]]:
    """Place in the answer to log-probabilities: the token's own first (with -1 for its id), then the likeliest."""
    rows: dict[int, tuple[Logprob, ...]] = {}
    start = 0
    for place, sampled, count in zip(columns.token_idx, columns.sampled, columns.counts, strict=True):
        stop = start + count
        likeliest = zip(columns.token_ids[start:stop], columns.values[start:stop], strict=True)
        rows[place] = (Logprob(-1, sampled), *(Logprob(i, value) for i, value in likeliest))
        start = stop
    return rows


def _with_token(entry: tuple[Logprob, ...], token_id: int) -> tuple[Logprob, ...]:
    return (Logprob(token_id, entry[0].logprob), *entry[1:])


def _request_error(error: RowError) -> RequestError | EngineError:
    """What a request that failed by itself on the worker raises in its caller."""
    if error.type == "InvalidRequestError":
        return InvalidRequestError(error.message)
    return InternalError(error.message)
