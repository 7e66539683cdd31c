"""`EngineCore`: one life of an engine, from its start on one event loop to its end.

AsyncLLM --owns--> EngineCore --owns--> Admission ───────> StepLoop ──> Scheduler
                         |          | Preparation    |
                         |          | WaitingLine    +──> Executor ──> worker process
                         |                           |
                         +──owns──> WorkerControl ───+     replaces the executor when its worker dies
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ..checkpoint.pooling import PoolingConfig
from ..checkpoint.sampling_defaults import SamplingDefaults
from ..checkpoint.source import ModelSource, resolve_model
from ..config import EngineConfig
from ..errors import EngineClosedError, EngineError, InternalError
from ..ipc.messages import KVCacheGroup
from ..outputs import StartupProgress
from ..scheduler.scheduler import Scheduler
from ..structured.service import GrammarService
from ..telemetry.listeners import Listeners
from ..telemetry.metrics import Counters, Statistics
from ..telemetry.observer import Observer
from ..telemetry.summary import summary_of
from ..threads.pools import run_in_thread
from ..tokenizer.tokenizer import Tokenizer
from .admission import Admission
from .executor import Executor
from .grammar_gate import ALWAYS, IN_SMALL_BATCHES
from .pacing.step_time import StepTime
from .preparation import Preparation
from .recovery import RestartBudget
from .step_loop import StepLoop
from .user_request import Limits
from .waiting_line import WaitingLine
from .worker_control import Restart, WorkerControl

__all__ = ["EngineCore"]

logger = logging.getLogger("aengine")

_GPU_PATIENCE = 30.0
"""Seconds that a step may take on a GPU, whatever those before took: some kernels are compiled at first use."""

_ALIVE = ("running", "draining")

ProgressCallback = Callable[[StartupProgress], None]
ExecutorFactory = Callable[[EngineConfig], Executor]


class EngineCore:
    """The parts of a started engine, which live as long as it does. Made by `start`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        work: asyncio.Event,
        ready: dict[str, Any],
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarService | None,
        restart: Restart,
        sampling: SamplingDefaults,
        listeners: Listeners,
        pooling: PoolingConfig,
    ) -> None:
        """``work``: set when an executor fails, see `StepLoop`; ``grammars``: of this tokenizer, warmed up ahead; None:
        made here, if there is a tokenizer. ``restart`` makes an executor that is not started, and what starts it."""
        self.loop = asyncio.get_running_loop()
        self.state = "running"  # perhaps "draining"; then "failed" or "closed"
        self._num_closers = 0  # calls of `aclose` that have not returned
        self._news: asyncio.Event | None = None  # set when calls of `drain` are to check again
        self.failure: EngineError | None = None
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.pooling = pooling
        self.config = config
        self._shutdown_timeout = config.shutdown_timeout
        self._counters = Counters()
        self._observer = Observer(config.on_request_end, listeners)
        step_time = StepTime(config.max_step_seconds or math.inf, ready.get("prompt_step_sizes", ()))
        self._scheduler = _new_scheduler(config, ready, step_time)
        self.limits = limits = Limits(
            vocab_size=ready["vocab_size"],
            max_model_len=min(ready["max_model_len"], self._scheduler.max_tokens_capacity),
            max_num_queued_requests=config.max_num_queued_requests,
            wait_when_full=config.admission == "wait",
            unread_timeout=config.unread_timeout,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
            tasks=frozenset(ready.get("tasks", ("generate",))),
            is_encoder=bool(ready.get("is_encoder")),
        )
        if tokenizer is not None and (grammars is None or grammars.vocab_size != limits.vocab_size):
            if grammars is not None:
                grammars.close()
            grammars = GrammarService(tokenizer, limits.vocab_size)
        self.grammars = grammars
        is_gpu = bool(ready.get("is_accelerator"))
        self.line = WaitingLine(limits.max_num_queued_requests, self._counters, wait_when_full=limits.wait_when_full)
        self.steps = StepLoop(
            self._scheduler,
            executor,
            work,
            max_in_flight_steps=config.max_in_flight_steps,
            max_leased_steps=config.max_leased_steps if config.tensor_parallel_size == 1 else 0,
            step_time=step_time,
            counters=self._counters,
            observer=self._observer,
            line=self.line,
            hang_timeout=config.hang_timeout,
            step_patience=_GPU_PATIENCE if is_gpu else 0.0,
            grammars=grammars,
            forcing=IN_SMALL_BATCHES if is_gpu else ALWAYS,
        )
        budget = RestartBudget(config.max_restarts, config.restart_window)
        self.worker = WorkerControl(executor, ready, restart, self.steps, budget, self._counters)
        self.admission = self._new_admission(
            loop=self.loop,
            steps=self.steps,
            line=self.line,
            preparation=Preparation(tokenizer, grammars, limits),
            tokenizer=tokenizer,
            limits=limits,
            counters=self._counters,
            observer=self._observer,
            on_empty=self._tell_drainers,
        )
        self._task = self.loop.create_task(self._run(), name="aengine-step-loop")
        self._task.add_done_callback(self._loop_ended)
        # Dropping an engine warns by itself, and ends the task: asyncio's own warning would add nothing.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        report: ProgressCallback,
        make_executor: ExecutorFactory,
        listeners: Listeners,
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
        work = asyncio.Event()
        load = {"config": config.to_wire(), "source": source.to_wire()}

        def restart() -> tuple[Executor, Callable[[], Awaitable[dict[str, Any]]]]:
            another = make_executor(config)
            return another, partial(another.start, _load_again(load, ready), _log_progress, work.set)

        starting = loop.create_task(executor.start(load, report, work.set), name="aengine-worker-start")
        grammars: GrammarService | None = None
        try:
            tokenizer, eos_token_ids = await cls._load_tokenizer(config, source)
            if tokenizer is not None and config.preload_grammars:
                grammars = GrammarService(tokenizer, source.hf_config.get("vocab_size") or tokenizer.vocab_size)
                grammars.begin_warm_up()
            ready = await starting
            sampling = SamplingDefaults(source.generation_config if config.generation_config == "auto" else {})
            core = cls(
                config,
                executor,
                work,
                ready,
                tokenizer,
                eos_token_ids,
                grammars,
                restart,
                sampling,
                listeners,
                PoolingConfig.from_wire(source.pooling),
            )
        except BaseException:
            starting.cancel()
            executor.terminate()
            if grammars is not None:
                await grammars.aclose()
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()  # retrieved: only one of the two failures is raised
            await executor.aclose(0)  # until the killed worker has gone, and its memory is free
            raise
        seconds = time.monotonic() - begun
        report(StartupProgress("ready", detail=f"{seconds:.1f} s"))
        logger.info("%s is ready after %.1f s: %s", config.model, seconds, summary_of(ready))
        return core

    # What `aengine.testing` overrides.

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

    def _new_admission(self, **parts: Any) -> Admission:
        return Admission(**parts)

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
            failure = await self.worker.replace(error, lambda: self.is_alive)
            if failure is not None:
                self._fail(failure)
                return
            del error

    def statistics(self) -> Statistics:
        """See `AsyncLLM.statistics`."""
        scheduler, counters, observer = self._scheduler, self._counters, self._observer
        worker_memory, device_memory = self.worker.executor.memory()
        return Statistics(
            num_running=scheduler.num_running,
            num_waiting=len(self.line) + self.admission.num_preempted,
            num_blocks=scheduler.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            block_size=self.worker.ready["block_size"],
            num_preemptions=scheduler.rows.num_preemptions,
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
            restarts=tuple(self.worker.restarts),
            worker_memory_bytes=worker_memory,
            device_memory_bytes=device_memory,
            device_memory_total_bytes=self.worker.ready.get("device_memory_total_bytes"),
            histograms=observer.histograms.snapshot(),
        )

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
        pools = self.admission.close()
        self._task.cancel()
        await asyncio.wait([self._task])
        if self.grammars is not None:
            await self.grammars.aclose()
        await self.worker.executor.aclose(self._shutdown_timeout)
        for pool in pools:
            await pool.aclose()

    def abandon(self) -> None:
        """Immediate and synchronous, from any thread: kill the worker, whatever state the loop is in."""
        if self.is_alive:
            self.state = "closed"
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its requests with it
                self.loop.call_soon_threadsafe(self._end_requests)
        self.admission.close()
        if self.grammars is not None:
            self.grammars.close()
        self.worker.executor.terminate()

    def _end_requests(self) -> None:
        self.admission.fail_all(EngineClosedError("the engine was terminated while this request ran"))
        self._task.cancel()

    def _fail(self, error: EngineError) -> None:
        """Fail all requests, once: the executor or the step loop has failed."""
        if not self.is_alive:
            return
        self.state, self.failure = "failed", error
        logger.error("the engine failed: %s", error)
        self.admission.fail_all(error)
        self._task.cancel()
        if self.grammars is not None:
            self.grammars.close()
        self.worker.executor.terminate()

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not self.is_alive:
            self._drop_tables()
            return
        # It was not told to end: the host's loop is being closed, or `StepLoop.run` has a bug.
        if task.cancelled():
            self.state = "closed"
            self.admission.fail_all(EngineClosedError("the event loop of the engine was shut down"))
        else:
            bug = task.exception()
            failure = InternalError(f"the step loop failed: {bug!r}")
            failure.__cause__ = bug
            self._fail(failure)
        self.abandon()
        self._drop_tables()

    def _drop_tables(self) -> None:
        """Free what requests needed, tens of MB: an application may keep a closed engine, or its streams, for long.

        ``state``, ``failure``, ``ready``, and what `aclose` has still to wait for, stay.
        """
        self.tokenizer = None
        self.admission.drop_tables()
        self._scheduler.drop_tables()
        if self.grammars is not None:
            self.grammars.drop_tables()


def _new_scheduler(config: EngineConfig, ready: dict[str, Any], step_time: StepTime) -> Scheduler:
    return Scheduler(
        num_blocks=ready["num_blocks"],
        kv_groups=KVCacheGroup.from_ready(ready),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=ready["max_num_batched_tokens"],
        max_model_len=ready["max_model_len"],
        enable_prefix_caching=config.enable_prefix_caching,
        max_in_flight_steps=max(config.max_in_flight_steps, config.max_leased_steps),
        vocab_size=ready["vocab_size"],
        rope_border=ready.get("rope_border"),
        computes_whole_prompts=bool(ready.get("is_encoder")),
        pools_all_tokens=ready.get("pooling") == "mean",
        prompt_limit=step_time.prompt_limit,
    )


def _log_progress(progress: StartupProgress) -> None:
    logger.debug("restart: %s %s", progress.stage, progress.detail)


def _load_again(load: dict[str, Any], ready: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker loads in the place of one that was ready: with as much KV memory, whatever is free now."""
    sizes = [rank["kv_cache_bytes"] for rank in ready.get("ranks", ()) if "kv_cache_bytes" in rank]
    if not sizes:  # a worker of another kind, which keeps none
        return load
    return {**load, "config": {**load["config"], "kv_cache_memory_bytes": max(sizes)}}
