"""`Sleeper`: the memory of a rank that goes while its engine sleeps.

              a GPU                                       a CPU
    weights   go to the host's memory, and come back      stay, as they are in the host's memory
    KV        is dropped, and comes back zeroed           is dropped

All that knows the addresses of this memory, graphs and tapes above all, stays as it is. Meanwhile no step may come, and
no graph is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...config import EngineConfig
from ...errors import InternalError
from ..lazy_zeros import NewZeros, lazy_zeros
from ..model_runner import ModelRunner
from ..platforms.platform import Platform
from .arena import Arena
from .moving import made_in

logger = logging.getLogger("aengine.runner")


class Sleeper:
    """See above. This one is of a rank that gives its memory back by its end alone."""

    can_sleep = False
    zeros: NewZeros = staticmethod(lazy_zeros)  # makes the memory of KV
    calls: Mapping[str, Callable[..., Any]] = {}

    def places_weights(self, join: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which all that is on the device for weights is made. ``join``: waits until no other
        thread makes anything there."""
        return nullcontext()

    def attach(self, runner: ModelRunner, settle: Callable[[], None]) -> None:
        """Take the runner that computes with this memory. ``settle``: waits until no other thread writes there."""


class ArenaSleeper(Sleeper):
    """A `Sleeper` that gives memory back and keeps its addresses. ``weights``: None: they stay."""

    can_sleep = True

    def __init__(self, platform: Platform, weights: Arena | None, kv: Arena) -> None:
        self._platform = platform
        self._arenas = {"kv_cache": kv} if weights is None else {"weights": weights, "kv_cache": kv}
        self._weights = weights
        self.zeros = kv.zeros
        self._runner: ModelRunner | None = None
        self._settle: Callable[[], None] = lambda: None
        self.calls = {"sleep": self.sleep, "wake_up": self.wake_up}

    def places_weights(self, join: Callable[[], None]) -> AbstractContextManager[None]:
        if self._weights is None:
            return nullcontext()
        join()
        return made_in(self._weights, self._platform)

    def attach(self, runner: ModelRunner, settle: Callable[[], None]) -> None:
        self._runner, self._settle = runner, settle

    def sleep(self, tags: Sequence[str]) -> str:
        """Give the memory of these back, of "weights" and "kv_cache", as far as it can go. Returns "", or why that
        can't be: then nothing has changed."""
        assert self._runner is not None
        self._runner.may_prepare = False
        self._settle()
        try:
            for tag, arena in self._arenas.items():  # the weights first: what can fail is to keep them
                if tag in tags:
                    arena.give_back()
        except MemoryError as error:
            self._runner.may_prepare = all(arena.is_mapped for arena in self._arenas.values())
            return str(error)
        self._platform.release_cached()
        return ""

    def wake_up(self, tags: Sequence[str]) -> str:
        """Take memory for these again. Returns "", or why there is none: then what slept before sleeps on."""
        assert self._runner is not None
        taken: list[Arena] = []
        try:
            for tag in tags:
                arena = self._arenas.get(tag)
                if arena is not None and not arena.is_mapped:
                    arena.take_back()
                    taken.append(arena)
        except torch.OutOfMemoryError as error:
            for arena in taken:
                arena.give_back()
            memory = self._platform.memory()
            missing = sum(self._arenas[tag].num_bytes for tag in tags if tag in self._arenas)
            return f"{missing} bytes are needed, and {memory.free} are free on {self._platform.name} ({error})"
        self._runner.may_prepare = all(arena.is_mapped for arena in self._arenas.values())
        return ""


def choose_sleeper(config: EngineConfig, platform: Platform) -> Sleeper:
    """Choose what of a rank's memory can go. On a GPU memory of this kind is an option (enable_sleep_mode)."""
    if platform.is_accelerator and not config.enable_sleep_mode:
        return Sleeper()
    try:
        memory = platform.virtual_memory
        memory.open()
    except (OSError, InternalError) as error:
        logger.warning("sleep(level=1) will end the worker, as its memory can't be given back otherwise: %s", error)
        return Sleeper()
    weights = Arena(memory, platform, keeps=True) if platform.is_accelerator else None
    return ArenaSleeper(platform, weights, Arena(memory, platform, keeps=False))
