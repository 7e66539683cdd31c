"""Counters of one engine, and the frozen snapshot that `AsyncLLM.statistics` returns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

__all__ = ["Counters", "LoopLag", "Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The engine at one moment. Counts are since its start."""

    num_running: int  # requests with a row on the worker
    num_waiting: int  # requests in the queue, those being tokenised included
    num_blocks: int  # KV blocks in all
    num_free_blocks: int  # of them not in use by a request (the prefix cache may still remember their content)
    block_size: int  # tokens in a block
    num_preemptions: int
    num_restarts: int  # of worker processes
    num_requests: int  # accepted so far
    num_finished: int  # of them ended by themselves
    num_aborted: int  # of them ended by their callers
    num_failed: int  # of them ended by an error
    num_steps: int
    prompt_tokens: int  # of accepted requests
    generated_tokens: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # of them found
    loop_lag: float  # seconds by which the host's loop was late lately, at worst; 0.0 when idle


@dataclass(slots=True)
class Counters:
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_restarts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class LoopLag:
    """How late the host's loop runs its timers, sampled ten times a second while requests run, and not when idle."""

    PERIOD = 0.1
    DECAY = 0.9  # of the remembered worst, each period: a stall fades from view in a few seconds

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._worst = 0.0

    @property
    def worst(self) -> float:
        return self._worst

    def resume(self) -> None:
        if self._timer is None:
            self._arm()

    def pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._worst = 0.0

    def _arm(self) -> None:
        due = self._loop.time() + self.PERIOD
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._worst = max(self._worst * self.DECAY, self._loop.time() - due)
        self._arm()
