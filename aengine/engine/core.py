"""`EngineCore`: one life of an engine, from its start on one event loop to its end.

AsyncLLM --owns--> EngineCore --owns--> Admission --> StepLoop --> Scheduler
                                           |             |
                                           |             +-------> Executor --> worker process
                                           +--> Preparation, WaitingLine
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ..checkpoint.source import ModelSource, resolve_model
from ..config import EngineConfig, StartupProgress
from ..errors import EngineClosedError, EngineError, InternalError, WorkerDiedError
from ..ipc.messages import KVCacheGroup
from ..scheduler.scheduler import Scheduler
from ..streams.token_stream import error_for_waiter
from ..structured.service import GrammarService
from ..telemetry.metrics import Counters, Statistics, WorkerRestart
from ..telemetry.observer import Observer
from ..threads.pools import run_in_thread
from ..tokenizer.tokenizer import Tokenizer
from .admission import Admission
from .executor import Executor, ProcessExecutor
from .preparation import Preparation
from .recovery import RestartBudget
from .sampling_defaults import SamplingDefaults
from .step_loop import ALWAYS, IN_SMALL_BATCHES, Forcing, StepLoop
from .summary import summary_of
from .user_request import Limits
from .waiting_line import WaitingLine

__all__ = ["EngineCore"]

logger = logging.getLogger("aengine")

_GPU_PATIENCE = 30.0
"""Seconds that a step may take on a GPU, whatever those before took: some kernels are compiled at first use."""

_ALIVE = ("running", "draining")
_NUM_RESTARTS_TOLD = 5
_REASON_CHARACTERS = 500  # of what a worker died of, in the statistics

ProgressCallback = Callable[[StartupProgress], None]
ExecutorFactory = Callable[[EngineConfig], Executor]
Restart = Callable[[], tuple[Executor, Callable[[], Awaitable[dict[str, Any]]]]]


class EngineCore:
    """Everything that lives as long as a started engine does. Made by `start`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        ready: dict[str, Any],
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarService | None,
        restart: Restart,
        sampling: SamplingDefaults,
    ) -> None:
        """``grammars``: of this tokenizer, warmed up ahead; None: made here, if there is a tokenizer. ``restart``
        makes an executor that is not started, and what starts it."""
        self.loop = asyncio.get_running_loop()
        self.state = "running"  # perhaps "draining"; then "failed" or "closed"
        self._num_closers = 0  # calls of `aclose` that have not returned
        self._news: asyncio.Event | None = None  # for those who wait in `drain`
        self.failure: EngineError | None = None
        self._recovering: EngineError | None = None  # what the worker before died of, until the next one runs
        self.ready = ready
        self.tokenizer = tokenizer
        self.sampling = sampling
        self._executor = executor
        self._restart = restart
        self._budget = RestartBudget(config.max_restarts, config.restart_window)
        self._shutdown_timeout = config.shutdown_timeout
        self._counters = Counters()
        self._restarts: deque[WorkerRestart] = deque(maxlen=_NUM_RESTARTS_TOLD)
        self._observer = Observer(config.on_request_end)
        self._scheduler = Scheduler(
            num_blocks=ready["num_blocks"],
            kv_groups=KVCacheGroup.from_ready(ready),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=ready["max_num_batched_tokens"],
            max_model_len=ready["max_model_len"],
            enable_prefix_caching=config.enable_prefix_caching,
            max_in_flight_steps=max(config.max_in_flight_steps, config.max_leased_steps),
            vocab_size=ready["vocab_size"],
        )
        limits = Limits(
            vocab_size=ready["vocab_size"],
            max_model_len=min(ready["max_model_len"], self._scheduler.max_tokens_capacity),
            max_num_queued_requests=config.max_num_queued_requests,
            wait_when_full=config.admission == "wait",
            unread_timeout=config.unread_timeout,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
        )
        if tokenizer is not None and (grammars is None or grammars.vocab_size != limits.vocab_size):
            if grammars is not None:
                grammars.close()
            grammars = GrammarService(tokenizer, limits.vocab_size)
        self.grammars = grammars
        is_gpu = bool(ready.get("is_accelerator"))
        self._line = WaitingLine(limits.max_num_queued_requests, self._counters, wait_when_full=limits.wait_when_full)
        self.steps = StepLoop(
            self._scheduler,
            executor,
            max_in_flight_steps=config.max_in_flight_steps,
            max_leased_steps=config.max_leased_steps if config.tensor_parallel_size == 1 else 0,
            counters=self._counters,
            observer=self._observer,
            line=self._line,
            hang_timeout=config.hang_timeout,
            step_patience=_GPU_PATIENCE if is_gpu else 0.0,
            grammars=grammars,
            forcing=self._forcing(is_gpu),
        )
        self.admission = self._new_admission(limits)
        self._task = self.loop.create_task(self._run(), name="aengine-step-loop")
        self._task.add_done_callback(self._loop_ended)
        # Dropping an engine warns by itself, and ends the task; what asyncio would log of it besides tells nothing.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]

    @classmethod
    async def start(
        cls, config: EngineConfig, report: ProgressCallback, make_executor: ExecutorFactory = ProcessExecutor
    ) -> EngineCore:
        """Resolve the model; then load the tokenizer and start the worker side by side. Undone when it fails."""
        begun = time.monotonic()
        loop = asyncio.get_running_loop()

        def report_from_thread(progress: StartupProgress) -> None:
            loop.call_soon_threadsafe(report, progress)

        report(StartupProgress("resolve", detail=config.model))
        source = await cls._resolve(config, report_from_thread)
        report(StartupProgress("worker", detail=source.path))
        executor = make_executor(config)
        load = {"config": config.to_wire(), "source": source.to_wire()}

        def restart() -> tuple[Executor, Callable[[], Awaitable[dict[str, Any]]]]:
            another = make_executor(config)
            return another, partial(another.start, load, _log_progress)

        starting = loop.create_task(executor.start(load, report), name="aengine-worker-start")
        grammars: GrammarService | None = None
        try:
            tokenizer, eos_token_ids = await cls._load_tokenizer(config, source)
            if tokenizer is not None and config.preload_grammars:
                grammars = GrammarService(tokenizer, source.hf_config.get("vocab_size") or tokenizer.vocab_size)
                grammars.begin_warm_up()
            ready = await starting
            sampling = SamplingDefaults(source.generation_config if config.generation_config == "auto" else {})
            core = cls(config, executor, ready, tokenizer, eos_token_ids, grammars, restart, sampling)
        except BaseException:
            starting.cancel()
            executor.terminate()
            if grammars is not None:
                await grammars.aclose()
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()  # seen: at most one of the two failures is raised
            await executor.aclose(0)  # until the killed worker has gone: whoever tries again finds its memory free
            raise
        seconds = time.monotonic() - begun
        report(StartupProgress("ready", detail=f"{seconds:.1f} s"))
        logger.info("%s is ready after %.1f s: %s", config.model, seconds, summary_of(ready))
        return core

    # What is another's in `aengine.testing`.

    def _forcing(self, is_gpu: bool) -> Forcing:
        return IN_SMALL_BATCHES if is_gpu else ALWAYS

    @classmethod
    async def _resolve(cls, config: EngineConfig, report: ProgressCallback) -> ModelSource:
        """``report`` is for whatever thread."""
        return await run_in_thread("resolve", resolve_model, config, report)

    @classmethod
    async def _load_tokenizer(
        cls, config: EngineConfig, source: ModelSource
    ) -> tuple[Tokenizer | None, frozenset[int]]:
        """The tokenizer, if there is to be one, and the ids that end a completion."""
        if not config.skip_tokenizer:
            tokenizer = await run_in_thread("tokenizer", Tokenizer.load, source, config.tokenizer)
            if config.allow_special_tokens:
                tokenizer = tokenizer.allowing_special_tokens()
            return tokenizer, tokenizer.eos_token_ids
        eos = source.generation_config.get("eos_token_id", source.hf_config.get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return None, frozenset(ids)

    def _new_admission(self, limits: Limits) -> Admission:
        return Admission(**self._parts_of_admission(limits))

    def _parts_of_admission(self, limits: Limits) -> dict[str, Any]:
        return {
            "loop": self.loop,
            "steps": self.steps,
            "line": self._line,
            "preparation": Preparation(self.tokenizer, self.grammars, limits),
            "tokenizer": self.tokenizer,
            "limits": limits,
            "counters": self._counters,
            "observer": self._observer,
            "on_empty": self._tell_drainers,
        }

    @property
    def is_alive(self) -> bool:
        """Whether requests run, whether or not new ones are taken."""
        return self.state in _ALIVE

    @property
    def is_closing(self) -> bool:
        """Whether a call of `aclose` is under way."""
        return self._num_closers > 0

    def check_accepts(self) -> None:
        """Raises EngineClosedError while the engine drains."""
        if self.state == "draining":
            cure = "it will be closed" if self.is_closing else "resume() lets it take them again"
            raise EngineClosedError(f"the engine is draining: running requests end, and new ones are refused; {cure}")

    async def _run(self) -> None:
        """The step loop, over one worker after the other."""
        while True:
            error = await self.steps.run()
            if not self.is_alive:
                return
            if isinstance(error, EngineClosedError):
                self._fail(error)
                return
            await self._recover(error)
            del error

    async def _recover(self, error: EngineError) -> None:
        """Another worker instead of the one that has failed. Tries again while the budget allows; then the engine fails
        with what went wrong last."""
        begun = time.monotonic()
        self._recovering = error
        while True:
            delay = self._budget.next_delay(time.monotonic())
            if delay is None:
                self._fail(_given_up(error, self._budget))
                return
            logger.warning("the worker is started again%s: %s", f" in {delay:g} s" if delay else "", error)
            self._counters.num_restarts += 1
            self._restarts.append(WorkerRestart(time.time(), str(error)[:_REASON_CHARACTERS]))
            await self._executor.aclose(0)  # until the dead one has gone: its memory is needed
            await asyncio.sleep(delay)
            if not self.is_alive:
                return
            self._executor, start = self._restart()
            try:
                ready = await start()
            except (EngineError, OSError, RuntimeError) as again:  # the latter: no descriptor, no thread is left
                if self.state not in _ALIVE:
                    return
                if not isinstance(again, EngineError):
                    again = EngineError(f"the worker could not be started again: {again}")
                again.__cause__ = error
                error = again
                continue
            if ready["num_blocks"] < self._scheduler.num_blocks:
                error = InternalError(
                    f"the worker that was started again has memory for {ready['num_blocks']} KV blocks, and the one "
                    f"before had {self._scheduler.num_blocks}: something else has taken the device's memory"
                )
                self._executor.fail(error)
                continue
            break
        for request in self.steps.restart(self._executor):
            blame = WorkerDiedError(
                f"workers died again and again while they computed request {request.request_id}, also when it was "
                f"the only suspect: {error}"
            )
            blame.__cause__ = error
            request.sink.mailbox.fail(blame)
        self._recovering, self.ready = None, ready
        logger.warning("the worker runs again after %.1f s; all requests go on", time.monotonic() - begun)

    def statistics(self) -> Statistics:
        scheduler, counters, observer = self._scheduler, self._counters, self._observer
        worker_memory, device_memory = self._executor.memory()
        return Statistics(
            num_running=scheduler.num_running,
            num_waiting=len(self._line) + self.admission.num_preempted,
            num_blocks=scheduler.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            block_size=self.ready["block_size"],
            num_preemptions=scheduler.num_preemptions,
            num_restarts=counters.num_restarts,
            num_requests=counters.num_requests,
            num_finished=counters.num_finished,
            num_aborted=counters.num_aborted,
            num_failed=counters.num_failed,
            num_steps=counters.num_steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            loop_lag=self.steps.lag.worst,
            num_rejected=counters.num_rejected,
            finish_reasons={reason.value: count for reason, count in observer.num_ended.items()},
            restarts=tuple(self._restarts),
            worker_memory_bytes=worker_memory,
            device_memory_bytes=device_memory,
            device_memory_total_bytes=self.ready.get("device_memory_total_bytes"),
            histograms=observer.histograms.snapshot(),
        )

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """A collective call of the workers, see `Executor.call`; one that takes longer is an InternalError."""
        self.steps.break_lease()  # it comes after the steps that were given before
        try:
            return await self._executor.call(method, *args, timeout=timeout)
        except TimeoutError:
            raise InternalError(f"the worker did not answer {method} within {timeout:g} s") from None

    async def long_call(self, method: str, *args: Any, timeout: float) -> Any:
        """The same for what keeps the worker from its steps and its heart from beating: it is not taken for hung."""
        with self.steps.watchdog.suspended():
            return await self.call(method, *args, timeout=timeout)

    async def check_health(self, timeout: float) -> float:
        """See `AsyncLLM.check_health`."""
        if self._recovering is not None:
            raise WorkerDiedError(f"the worker is being started again: {self._recovering}")
        begun = time.perf_counter()  # uvloop's time() counts whole milliseconds
        await self.call("ping", timeout=timeout)
        return time.perf_counter() - begun

    async def drain(self, timeout: float | None) -> bool:
        """See `AsyncLLM.drain`. Ends early when the engine is resumed, terminated or fails."""
        if self.state == "running":
            self.state = "draining"
        try:
            async with asyncio.timeout(timeout):
                while self.state == "draining" and not self.admission.is_empty:
                    self._news = self._news or asyncio.Event()
                    await self._news.wait()
        except TimeoutError:
            pass
        return self.admission.is_empty

    def resume(self) -> None:
        """See `AsyncLLM.resume`."""
        if self.is_closing:
            raise EngineClosedError("the engine is being closed: it can't be resumed")
        if self.state == "draining":
            self.state = "running"
            self._tell_drainers()

    def _tell_drainers(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()

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
            self.state = "closed"
        self.admission.fail_all(EngineClosedError("the engine was closed while this request ran"))
        lanes = self.admission.close()
        self._task.cancel()
        await asyncio.wait([self._task])
        if self.grammars is not None:
            await self.grammars.aclose()
        await self._executor.aclose(self._shutdown_timeout)
        for lane in lanes:
            await lane.aclose()

    def abandon(self) -> None:
        """Immediate and synchronous, from any thread: kill the worker, whatever state the loop is in."""
        if self.is_alive:
            self.state = "closed"
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there
                self.loop.call_soon_threadsafe(self._end_requests)
        self.admission.close()
        if self.grammars is not None:
            self.grammars.close()
        self._executor.terminate()

    def _end_requests(self) -> None:
        self.admission.fail_all(EngineClosedError("the engine was terminated while this request ran"))
        self._task.cancel()

    def _fail(self, error: EngineError) -> None:
        """The executor or the step loop has failed: everyone who waits is told, once."""
        if not self.is_alive:
            return
        self.state, self.failure = "failed", error
        logger.error("the engine failed: %s", error)
        self.admission.fail_all(error)
        self._task.cancel()
        if self.grammars is not None:
            self.grammars.close()
        self._executor.terminate()

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if self.is_alive:
            self._note_unasked_end(task)
        self._drop_tables()

    def _drop_tables(self) -> None:
        """Free what requests needed, tens of MB: a closed engine may be kept for long, as may streams, which know it.

        What `aclose` has still to wait for stays, and what tells the end: ``state``, ``failure``, ``ready``.
        """
        self.tokenizer = None
        self.admission.drop_tables()
        self._scheduler.drop_tables()
        if self.grammars is not None:
            self.grammars.drop_tables()

    def _note_unasked_end(self, task: asyncio.Task[None]) -> None:
        """Cancelled from outside (the host's loop is being closed), or ended by a bug that run() let through."""
        if task.cancelled():
            self.state = "closed"
            self.admission.fail_all(EngineClosedError("the event loop of the engine was shut down"))
        else:
            bug = task.exception()
            failure = InternalError(f"the step loop failed: {bug!r}")
            failure.__cause__ = bug
            self._fail(failure)
        self.abandon()


def _given_up(error: EngineError, budget: RestartBudget) -> EngineError:
    """What a worker died of, and that it is not started again, as an error of the same class."""
    failure = error_for_waiter(error)
    assert isinstance(failure, EngineError)
    failure.args = (f"{error}; the engine gave up after {budget} (max_restarts, restart_window)", *error.args[1:])
    failure.__cause__ = error
    return failure


def _log_progress(progress: StartupProgress) -> None:
    logger.debug("restart: %s %s", progress.stage, progress.detail)
