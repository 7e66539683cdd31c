"""A worker extension, whose methods tests call on every rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from aengine.workers.loaded import WorkerContext


class Extension:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.attribute = print  # no method: not to be called

    def where(self, *args: Any) -> list[Any]:
        return [self._context.rank.index, type(self._context.runner).__name__, os.getpid(), list(args)]

    def fail(self, rank: int) -> None:
        if self._context.rank.index == rank:
            raise ZeroDivisionError("nothing to divide by")

    def unpackable(self) -> object:
        return {"found": object()}

    def unreadable(self) -> object:
        return {(1, 2): 3}

    async def with_await(self) -> None:
        raise AssertionError

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def hang(self, rank: int) -> None:
        if self._context.rank.index == rank:
            time.sleep(3600)

    def die(self, rank: int) -> None:
        if self._context.rank.index == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def _private(self) -> None:
        raise AssertionError


def function(context: WorkerContext) -> None:
    raise AssertionError
