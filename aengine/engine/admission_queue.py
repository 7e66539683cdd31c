"""`AdmissionQueue`: the queue of one engine, from a request's registration to its first step.

join ──> inside (prepared, then in the scheduler's queue) ──leave──>  its first step is made, or it has ended
    └──> held (the queue was full, or closed) ──> inside, as soon as there is room: the most urgent first
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort

from ..errors import EngineOverloadedError
from ..telemetry.metrics import Counters

_Place = tuple[int, int, str]  # place of a held request: priority, order of arrival, request_id


class AdmissionQueue:
    """The waiting requests, by request_id. Its length is the number that ``max_num_queued_requests`` bounds."""

    def __init__(self, limit: int, counters: Counters, *, wait_when_full: bool) -> None:
        """``wait_when_full``: those that come when it is full are held, and not refused."""
        self.limit = limit
        self._counters = counters
        self._wait_when_full = wait_when_full
        self._started = time.monotonic()
        self._num_joined = 0
        self._is_closed = False  # all that come are held
        self._inside: set[str] = set()
        self._held: list[_Place] = []  # held requests, sorted: the next one to be admitted first
        # held requests by request_id: their places, and the futures that are done when they are admitted
        self._turns: dict[str, tuple[_Place, asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._inside) + len(self._held)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.limit

    @property
    def num_held(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Hold all that come from now on, and those that are held. Idempotent."""
        self._is_closed = True

    def open(self) -> None:
        """Undo `close`: admit as many as there is room for. Idempotent."""
        self._is_closed = False
        self._admit()

    def check_room(self, num_coming: int = 0) -> None:
        """Raise EngineOverloadedError if requests are not held when the queue is full, and it is full or will be after
        ``num_coming`` more."""
        if len(self) + num_coming < self.limit or self._wait_when_full:
            return
        self._counters.num_rejected += 1
        elapsed = time.monotonic() - self._started
        rate = self._counters.num_finished / elapsed if elapsed > 0 else 0.0
        retry_after = min(60.0, max(0.1, 1.0 / rate)) if rate else 1.0
        raise EngineOverloadedError(
            f"{len(self)} requests are waiting, and max_num_queued_requests is {self.limit}: try again in about "
            f"{retry_after:.1f} s, raise the limit, or start the engine with admission='wait'",
            retry_after=retry_after,
        )

    def join(self, request_id: str, priority: int) -> asyncio.Future[None] | None:
        """Add a request. Returns None if there is room, otherwise a future that is done when the request is
        admitted."""
        if len(self) < self.limit and not self._is_closed:
            self._inside.add(request_id)
            return None
        self._num_joined += 1
        place = (priority, self._num_joined, request_id)
        insort(self._held, place)
        turn = asyncio.get_running_loop().create_future()
        self._turns[request_id] = place, turn
        return turn

    def leave(self, request_id: str) -> None:
        """Remove a request whose first step is made, or that has ended; admit others if there is room. Idempotent."""
        if request_id in self._inside:
            self._inside.remove(request_id)
        elif request_id in self._turns:
            place, _ = self._turns.pop(request_id)
            del self._held[bisect_left(self._held, place)]
        self._admit()

    def _admit(self) -> None:
        while self._held and not self._is_closed and len(self._inside) < self.limit:
            _, _, next_id = self._held.pop(0)
            self._inside.add(next_id)
            _, turn = self._turns.pop(next_id)
            if not turn.done():
                turn.set_result(None)
