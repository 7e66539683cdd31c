"""`EngineCore`: one life of an engine on one event loop, from the moment at which its workers are ready to its end.

AsyncLLM --owns--> EngineCore --owns--> Admission ───────> Replicas ──> Replica: Scheduler, StepLoop, WorkerControl
                                    | Preparation    |         |             |
                                    | AdmissionQueue    |      LoadBalancer           +──> Executor ──> worker processes

What there is once belongs to the core; what each copy of the model has, to its `Replica` (with data_parallel_size=1
there is one).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..checkpoint.pooling import PoolingConfig
from ..checkpoint.sampling_defaults import SamplingDefaults
from ..config import EngineConfig
from ..errors import EngineClosedError, EngineError, InternalError, InvalidRequestError
from ..limits.tenants import checked_tenants
from ..telemetry.listeners import Listeners
from ..telemetry.metrics import Counters, GraphStatistics, Statistics, sums_of
from ..telemetry.observer import Observer
from .adapters.adapters import NewAdapters
from .admission import Admission
from .admission_queue import AdmissionQueue
from .executor import Executor
from .keeping.keeping import Keeping
from .pacing.holds import DRAIN, PAUSE, Holds, PauseMode
from .preparation import Preparation
from .replicas.replica import Replica
from .replicas.replicas import Replicas
from .replicas.start import Started
from .sleeping.sleeping import Sleeping
from .structured.service import GrammarService
from .tenants.accounts import Accounts
from .threads.pools import end_pools
from .tokenizer.tokenizer import Tokenizer
from .updates.versions import WeightVersions
from .updates.weight_updates import WeightUpdates
from .user_request import Limits
from .worker_control import NUM_RESTARTS_TOLD

logger = logging.getLogger("aengine")


class EngineCore:
    """The parts of a started engine, which live as long as it does. Made by `EngineStart`
    (handles/start.py)."""

    def __init__(
        self,
        config: EngineConfig,
        started: Sequence[Started],
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarService | None,
        sampling: SamplingDefaults,
        listeners: Listeners,
        pooling: PoolingConfig,
        new_adapters: NewAdapters,
    ) -> None:
        """``started``: the workers of each replica; ``grammars``: of this tokenizer, warmed up ahead; None: made here,
        if there is a tokenizer."""
        self.loop = asyncio.get_running_loop()
        self._num_closers = 0  # calls of `aclose` that have not returned
        self.failure: EngineError | None = None
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.pooling = pooling
        self.config = config
        self._shutdown_timeout = config.shutdown_timeout
        self._counters = Counters()
        self._observer = Observer(config.on_request_end, listeners)
        vocab_size = started[0].ready["vocab_size"]
        if tokenizer is not None and (grammars is None or grammars.vocab_size != vocab_size):
            if grammars is not None:
                grammars.close()
            grammars = GrammarService(tokenizer, vocab_size)
        self.grammars = grammars
        wait_when_full = config.admission == "wait"
        self.queue = AdmissionQueue(config.max_num_queued_requests, self._counters, wait_when_full=wait_when_full)
        self.replicas = Replicas(
            started, config, queue=self.queue, counters=self._counters, observer=self._observer, grammars=grammars
        )
        self.adapters = new_adapters(self.replicas.running_workers)
        ready = self.ready
        self.limits = limits = Limits(
            vocab_size=vocab_size,
            max_model_len=min(
                *(one.ready["max_model_len"] for one in started),
                *(replica.scheduler.max_tokens_capacity for replica in self.replicas),
            ),
            max_num_queued_requests=config.max_num_queued_requests,
            wait_when_full=wait_when_full,
            unread_timeout=config.unread_timeout,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
            tasks=frozenset(ready.get("tasks", ("generate",))),
            is_encoder=bool(ready.get("is_encoder")),
            processors=ready.get("logits_processors", {}),
        )
        self.admission = self._new_admission(
            loop=self.loop,
            replicas=self.replicas,
            queue=self.queue,
            preparation=Preparation(tokenizer, grammars, limits, self.adapters),
            tokenizer=tokenizer,
            limits=limits,
            counters=self._counters,
            observer=self._observer,
            on_queued=lambda request: self.sleeping.note_request(request),
            on_ended=self._request_ended,
            versions=(versions := WeightVersions()),
            keeping=Keeping(self.loop, self.replicas),
            accounts=(accounts := Accounts(checked_tenants(config.tenants), self.replicas)),
        )
        self.accounts = accounts
        self.holds = Holds(self.queue, self.admission, [replica.steps.hold for replica in self.replicas])
        self.weights = WeightUpdates(self, self.holds, self.replicas, versions)
        self.sleeping: Sleeping = Sleeping(self, self.replicas, self.adapters.restore)
        for replica in self.replicas:
            replica.worker.on_restarted = partial(self._restore, replica)
            replica.task = self.loop.create_task(self._run(replica), name="aengine-step-loop")
            replica.task.add_done_callback(partial(self._loop_ended, replica))
            # Dropping an engine warns by itself, and ends the task: asyncio's own warning would add nothing.
            replica.task._log_destroy_pending = False  # type: ignore[attr-defined]

    # The following method is overridden by `aengine.testing`.

    def _new_admission(self, **parts: Any) -> Admission:
        return Admission(**parts)

    @property
    def state(self) -> str:
        """See `AsyncLLM.state`."""
        return self.holds.state

    @property
    def is_alive(self) -> bool:
        """See `Holds.is_alive`."""
        return self.holds.is_alive

    @property
    def is_closing(self) -> bool:
        """Whether a call of `aclose` is under way."""
        return self._num_closers > 0

    def check_accepts(self) -> None:
        """Raise EngineClosedError while the engine drains."""
        if self.state == "draining":
            cure = "it will be closed" if self.is_closing else "resume() lets it take them again"
            raise EngineClosedError(f"the engine is draining: running requests end, and new ones are refused; {cure}")

    @property
    def ready(self) -> dict[str, Any]:
        """The READY message that the workers agreed on; of the first replica where they differ."""
        return self.replicas[0].worker.ready

    async def _run(self, replica: Replica) -> None:
        """Run a replica's step loop, over one worker after the other."""
        worker = replica.worker
        while True:
            error = await replica.steps.run()
            if not self.is_alive:
                return
            if isinstance(error, EngineClosedError):
                self._fail(error)
                return
            worker.note_death(error)
            self.replicas.leave(replica)
            failure = await self.sleeping.replace(replica, error, lambda: self.is_alive)
            if failure is not None:
                if self.is_alive and not self.replicas.give_up(replica, failure):
                    self._fail(failure)
                return
            self.replicas.join(replica)
            del error

    def statistics(self) -> Statistics:
        """See `AsyncLLM.statistics`."""
        counters, observer, replicas = self._counters, self._observer, self.replicas
        own = [replica.statistics() for replica in replicas]
        memory = [replica.worker.executor.memory() for replica in replicas]
        restarts = sorted(
            (one for replica in replicas for one in tuple(replica.worker.restarts)), key=lambda one: one.time
        )
        return Statistics(
            **sums_of(own),
            **asdict(counters),
            num_waiting=len(self.queue) + self.admission.num_preempted,
            sleep_level=self.sleeping.level,
            block_size=self.ready["block_size"],
            graphs=GraphStatistics.sums(replica.steps.launched for replica in replicas),
            num_preemptions=sum(replica.scheduler.rows.num_preemptions for replica in replicas),
            adapters=self.adapters.statistics(),
            tenants=self.accounts.statistics(),
            loop_lag=max(replica.steps.lag.worst for replica in replicas),
            finish_reasons={reason.value: count for reason, count in observer.num_ended.items()},
            restarts=tuple(restarts[-NUM_RESTARTS_TOLD:]),
            worker_memory_bytes=_sum(resident for resident, _ in memory),
            device_memory_bytes=_sum(on_device for _, on_device in memory),
            device_memory_total_bytes=_sum(r.worker.ready.get("device_memory_total_bytes") for r in replicas),
            histograms=observer.histograms.snapshot(),
            replicas=tuple(own),
        )

    async def pause(self, mode: PauseMode) -> bool:
        """See `AsyncLLM.pause`. Ends early when the engine is resumed or drained, and when it ends."""
        self.check_accepts()
        is_paused = await self.holds.pause(mode)
        if not self.is_alive:
            raise EngineClosedError("the engine ended while it was being paused")
        return is_paused

    async def drain(self, timeout: float | None) -> bool:
        """See `AsyncLLM.drain`. Ends early when the engine is resumed, terminated or fails."""
        if self.is_alive and DRAIN not in self.holds:
            self.holds.begin(DRAIN)
            self.holds.release(PAUSE)
            self.sleeping.note_drain()
        try:
            async with asyncio.timeout(timeout):
                while self.state == "draining" and not self.admission.is_empty:
                    await self.holds.change()
        except TimeoutError:
            pass
        return self.admission.is_empty

    def resume(self) -> None:
        """See `AsyncLLM.resume`."""
        if self.is_closing:
            raise EngineClosedError("the engine is being closed: it can't be resumed")
        if self.holds.obstacle and self.state != "draining":
            raise InvalidRequestError(f"the engine can't be resumed now: {self.holds.obstacle}")
        self.holds.release(DRAIN)
        self.holds.release(PAUSE)

    async def _restore(self, replica: Replica, workers: Executor) -> None:
        await self.weights.restore(replica, workers)
        await self.adapters.restore(workers)

    def _request_ended(self) -> None:
        self.holds.note_change()
        if self.admission.is_empty:
            self.sleeping.note_idle()

    async def aclose(self, *, drain: float) -> None:
        """End the requests, then the worker. Bounded by ``drain`` plus the configured shutdown timeout.

        Of several calls the first to run out of time ends it; a cancelled one kills the worker at once.
        """
        self._num_closers += 1
        try:
            if drain > 0 and self.is_alive:
                await self.drain(drain)
            await self._end()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._num_closers -= 1

    async def _end(self) -> None:
        if self.is_alive:
            self.holds.end = "closed"
        self.admission.fail_all(EngineClosedError("the engine was closed while this request ran"))
        pools = self.admission.close()
        await self.sleeping.aclose()
        await asyncio.wait(self.replicas.cancel())
        if self.grammars is not None:
            await self.grammars.aclose()
        await self.replicas.aclose(self._shutdown_timeout)
        await end_pools(*pools)

    def abandon(self) -> None:
        """Kill the workers and end all requests, synchronously, from any thread and in any state of the loop."""
        if self.is_alive:
            self.holds.end = "closed"
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its requests with it
                self.loop.call_soon_threadsafe(self._end_requests)
        self.admission.close()
        if self.grammars is not None:
            self.grammars.close()
        self.replicas.terminate()

    def _end_requests(self) -> None:
        self.admission.fail_all(EngineClosedError("the engine was terminated while this request ran"))
        self.sleeping.cancel()
        self.replicas.cancel()

    def _fail(self, error: EngineError) -> None:
        """Fail all requests, once: the executor or the step loop has failed."""
        if not self.is_alive:
            return
        self.holds.end, self.failure = "failed", error
        logger.error("the engine failed: %s", error)
        self.admission.fail_all(error)
        self.sleeping.cancel()
        self.replicas.cancel()
        if self.grammars is not None:
            self.grammars.close()
        self.replicas.terminate()

    def _loop_ended(self, replica: Replica, task: asyncio.Task[None]) -> None:
        if replica.failure is not None and self.is_alive:  # it is given up; the engine goes on with others
            replica.scheduler.drop_tables()
            return
        if not self.is_alive:
            self._drop_tables()
            return
        # Nobody called `aclose`: either the host's loop is being closed, or `StepLoop.run` has a bug.
        if task.cancelled():
            self.holds.end = "closed"
            self.admission.fail_all(EngineClosedError("the event loop of the engine was shut down"))
        else:
            bug = task.exception()
            failure = InternalError(f"the step loop failed: {bug!r}")
            failure.__cause__ = bug
            self._fail(failure)
        self.abandon()
        self._drop_tables()

    def _drop_tables(self) -> None:
        """Free what requests needed, tens of MB, once no step loop runs: an application may keep a closed engine, or
        its streams, for long.

        ``state``, ``failure``, ``ready``, and what `aclose` has still to wait for, stay.
        """
        if self.replicas.are_running:
            return
        self.tokenizer = None
        self.admission.drop_tables()
        for replica in self.replicas:
            replica.scheduler.drop_tables()
        if self.grammars is not None:
            self.grammars.drop_tables()


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
