"""Keeps a step loop from giving steps, for those who need its workers at rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StepHold:
    """Whether a step loop may give steps. A hold outlives the workers' deaths."""

    def __init__(self, is_resting: Callable[[], bool], stop: Callable[[], object], go_on: Callable[[], object]) -> None:
        """``is_resting``: whether no step is in flight, and the loop has done with the answer of the last; ``stop`` is
        called when a hold begins, ``go_on`` when it has ended."""
        self._is_resting = is_resting
        self._stop = stop
        self._go_on = go_on
        self._waiting: list[asyncio.Future[None]] = []
        self.is_held = False

    def take(self) -> None:
        """Let no more steps be given; those in flight go on. Idempotent."""
        was_held, self.is_held = self.is_held, True
        if not was_held:
            self._stop()

    def release(self) -> None:
        """Let steps be given again. Idempotent."""
        was_held, self.is_held = self.is_held, False
        if was_held:
            self._go_on()

    async def at_rest(self) -> None:
        """Wait, while the hold lasts, until no step is in flight: their answers have come, or the workers have died."""
        while self.is_held and not self._is_resting():
            rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(rest)
            await rest

    def note_rest(self) -> None:
        """Called when the loop may have come to rest."""
        waiting, self._waiting = self._waiting, []
        for rest in waiting:
            if not rest.done():
                rest.set_result(None)
