"""`Replica`: a copy of the model with all that runs it: scheduler, step loop, executor, recovery.

What an engine has once (tokenizer, grammars, admission, queue, statistics) is given to each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...config import EngineConfig
from ...errors import EngineError
from ...ipc.messages import KVCacheGroup
from ...telemetry.metrics import Counters, KVTierStatistics, ReplicaStatistics
from ...telemetry.observer import Observer
from ..grammar_gate import ALWAYS, BY_GRAPHS, IN_SMALL_BATCHES
from ..keeping.kept_blocks import KeptBlocks, KeptHits
from ..pacing.multi_step import MultiStep
from ..pacing.step_time import StepTime
from ..pacing.steps_in_flight import StepsInFlight
from ..recovery import RestartBudget
from ..scheduler.block_pool import IdleBlocks
from ..scheduler.kv_elsewhere import KVElsewhere
from ..scheduler.rows import forget_prefixes, num_to_compute, recompute_all
from ..scheduler.scheduler import Scheduler
from ..scheduler.swapped_requests import SwappedRequests
from ..speculation.choice import new_speculation
from ..speculation.drafts import Drafts
from ..step_loop import StepLoop
from ..structured.service import GrammarService
from ..tiers.choice import new_tiers
from ..worker_control import WorkerControl
from .start import Started

_GPU_PATIENCE = 30.0
"""Seconds that a step may take on a GPU, whatever those before took: some kernels are compiled at first use."""


class Replica:
    """A copy of the model: its scheduler, its step loop, its workers and their restarts."""

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        started: Started,
        *,
        counters: Counters,
        observer: Observer,
        on_begun: Callable[[str], None],
        grammars: GrammarService | None,
    ) -> None:
        """``on_begun`` is called with the id of each request whose first step was made, perhaps more than once."""
        ready, peers = started.ready, started.peers
        is_gpu = bool(ready.get("is_accelerator"))
        self._step_time = step_time = StepTime(config.max_step_seconds or math.inf, ready.get("prompt_step_sizes", ()))
        self.index = index
        self.failure: EngineError | None = None  # the error for which the replica was given up
        self.task: asyncio.Task[None] | None = None  # the task that runs the replica
        self.is_independent = peers.is_independent  # its workers live and die without those of other replicas
        # No leases where other replicas would have to drop theirs too, nor over machines, which share no `Lead`.
        may_lease = peers.is_independent and not config.may_span_machines
        in_flight: StepsInFlight = StepsInFlight(config.steps_in_flight)
        if may_lease and config.max_leased_steps > config.steps_in_flight:
            in_flight = MultiStep(config.steps_in_flight, config.max_leased_steps)
        tiers = new_tiers(started.memory, lambda: self.worker.executor, self._resume, self._seconds_of)
        self._kept_hits = KeptHits()
        new_idle = partial(KeptBlocks, fraction=config.kept_kv_fraction, hits=self._kept_hits)
        self.scheduler = _new_scheduler(config, ready, step_time, in_flight.capacity, new_idle, tiers)
        self.scheduler.rows.lookahead = self._drafts = Drafts(self.scheduler.rows)
        # A step may wait for those of other stages, or of other replicas.
        alone = config.pipeline_parallel_size == 1 and peers.is_independent
        speculation = new_speculation(config, ready, self.scheduler, in_flight, steps_alone=alone)
        self.steps = StepLoop(
            self.scheduler,
            started.executor,
            started.work,
            in_flight=in_flight,
            step_time=step_time,
            counters=counters,
            observer=observer,
            on_begun=on_begun,
            hang_timeout=config.hang_timeout,
            step_patience=_GPU_PATIENCE if is_gpu else 0.0,
            grammars=grammars,
            jump_forward=ALWAYS if not is_gpu else IN_SMALL_BATCHES if config.speculation == "none" else BY_GRAPHS,
            speculation=speculation,
            peers=peers,
        )
        budget = RestartBudget(config.max_restarts, config.restart_window)
        self._work = started.work
        where = (started.executor, ready, started.restart, self.steps, budget, counters)
        self.worker = WorkerControl(*where, peers.name, reports_deaths=peers.reports_deaths)

    @property
    def state(self) -> str:
        """ "running", "asleep", "restarting", or "failed": its restarts are used up."""
        if self.failure is not None:
            return "failed"
        if self.worker.resting:
            return "asleep"
        return "running" if self.worker.recovering is None else "restarting"

    def _seconds_of(self, num_tokens: int) -> float:
        """Return how long so many tokens of a prompt are expected to take, behind those that are being computed; 0: no
        step with prompts was measured yet."""
        return self._step_time.expected(num_tokens + num_to_compute(self.scheduler.rows))

    def _resume(self, may_begin: bool = True) -> None:
        """Have the loop look at what waits in the queue: there are more free blocks; ``may_begin``: and requests."""
        self._work.set()
        if may_begin:
            self.steps.in_flight.cancel_queued()

    def reset_prefix_cache(self, *, everywhere: bool = True) -> int:
        """See `AsyncLLM.reset_prefix_cache`. ``everywhere``: not on the device alone."""
        return forget_prefixes(self.scheduler.rows, everywhere=everywhere)

    def recompute_all(self) -> None:
        """Drop the KV of what runs, at rest: its tokens so far are computed again."""
        recompute_all(self.scheduler.rows)

    def statistics(self) -> ReplicaStatistics:
        """See `Statistics.replicas`."""
        scheduler = self.scheduler
        num_swapped, drafts = scheduler.rows.preempted.num_kept, self._drafts.statistics()
        return ReplicaStatistics(
            state=self.state,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            num_swapped_blocks=num_swapped,
            swapped_bytes=num_swapped and num_swapped * self.worker.ready["kv_cache_bytes"] // scheduler.num_blocks,
            num_restarts=self.worker.num_restarts,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_kept_blocks=scheduler.rows.kv.pool.idle.num_kept,
            kept_block_hits=self._kept_hits.num_blocks,
            num_drafts=sum(each.num_drafts for each in drafts),
            drafted_tokens=sum(each.drafted_tokens for each in drafts),
            accepted_tokens=sum(each.accepted_tokens for each in drafts),
            drafts=drafts,
            kv_tiers=tuple(KVTierStatistics(*kept) for kept in scheduler.rows.elsewhere.counts()),
        )


def _new_scheduler(
    config: EngineConfig,
    ready: dict[str, Any],
    step_time: StepTime,
    max_in_flight_steps: int,
    new_idle: Callable[[int], IdleBlocks],
    elsewhere: KVElsewhere,
) -> Scheduler:
    groups, num_places = KVCacheGroup.from_ready(ready), ready.get("num_swap_pages", 0)
    return Scheduler(
        num_blocks=ready["num_blocks"],
        kv_groups=groups,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=ready["max_num_batched_tokens"],
        max_model_len=ready["max_model_len"],
        enable_prefix_caching=config.enable_prefix_caching and not ready.get("is_encoder"),
        max_in_flight_steps=max_in_flight_steps,
        vocab_size=ready["vocab_size"],
        rope_border=ready.get("rope_border"),
        computes_whole_prompts=bool(ready.get("is_encoder")),
        prompt_limit=step_time.prompt_limit,
        num_batches=config.pipeline_parallel_size,
        preempted=SwappedRequests(num_places, groups) if num_places else None,
        new_idle=new_idle,
        elsewhere=elsewhere,
    )
