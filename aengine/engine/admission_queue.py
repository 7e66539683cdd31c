"""`AdmissionQueue`: the queue of one engine, from a request's registration to its first step.

join ──> inside (prepared, then in the scheduler's queue) ──leave──>  its first step is made, or it has ended
    └──> held (the queue was full, or closed) ──> inside, as soon as there is room: the most urgent first

Of several accounts each has its part of the places (`Places`); the next to be let in is of the one that has the fewest
by its weight, and whose quota allows it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from typing import NamedTuple

from ..errors import EngineOverloadedError
from ..telemetry.metrics import Counters
from .tenants.accounts import Payer
from .threads.turns import Places

_Place = tuple[int, int, str]  # place of a held request: priority, order of arrival, request_id


class _Turn(NamedTuple):
    """A held request: its place, and the future that is done when it is admitted."""

    place: _Place
    account: Payer
    num_tokens: int
    future: asyncio.Future[None]


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
        self._places = Places(limit)  # those of the requests that are inside
        self._inside: dict[str, Payer] = {}
        self._held: dict[Payer, list[_Place]] = {}  # held requests, sorted: the next one to be admitted first
        self._turns: dict[str, _Turn] = {}  # held requests by request_id
        self._timer: asyncio.TimerHandle | None = None  # it goes off when a quota allows another request

    def __len__(self) -> int:
        return len(self._inside) + len(self._turns)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.limit

    @property
    def num_held(self) -> int:
        return len(self._turns)

    def close(self) -> None:
        """Hold all that come from now on, and those that are held. Idempotent."""
        self._is_closed = True

    def open(self) -> None:
        """Undo `close`: admit as many as there is room for. Idempotent."""
        self._is_closed = False
        self._admit()

    def check_quota(self, account: Payer) -> None:
        """Raise QuotaExceededError if requests over a quota are not held, and another of the account would be."""
        if not self._wait_when_full:
            account.check_quota(self._places.count(account) + len(self._held.get(account, ())))

    def check_room(self, account: Payer, num_coming: int = 0) -> None:
        """Raise EngineOverloadedError if requests are not held when the queue is full, and it is full for the account
        or will be after ``num_coming`` more."""
        if len(self) + num_coming < self.limit or self._wait_when_full or self._has_part(account):
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

    def _has_part(self, account: Payer) -> bool:
        return len(self._places) >= self.limit and self._places.has_room(account)

    def join(self, request_id: str, priority: int, account: Payer, num_tokens: int) -> asyncio.Future[None] | None:
        """Add a request, which is expected to need so many tokens. Returns None if there is room, otherwise a future
        that is done when the request is admitted."""
        if not self._is_closed and account not in self._held and self._may_enter(account):
            self._enter(request_id, account, num_tokens)
            return None
        self._num_joined += 1
        place = (priority, self._num_joined, request_id)
        insort(self._held.setdefault(account, []), place)
        future = asyncio.get_running_loop().create_future()
        self._turns[request_id] = _Turn(place, account, num_tokens, future)
        self._admit()
        return future

    def _may_enter(self, account: Payer) -> bool:
        return self._places.has_room(account) and not account.bucket.seconds()

    def _enter(self, request_id: str, account: Payer, num_tokens: int) -> None:
        self._inside[request_id] = account
        self._places.take(account)
        account.bucket.take(num_tokens)

    def leave(self, request_id: str) -> None:
        """Remove a request whose first step is made, or that has ended; admit others if there is room. Idempotent."""
        if request_id in self._inside:
            self._places.leave(self._inside.pop(request_id))
        elif request_id in self._turns:
            self._unhold(request_id)
        if self._turns or self._timer is not None:
            self._admit()

    def _unhold(self, request_id: str) -> _Turn:
        turn = self._turns.pop(request_id)
        held = self._held[turn.account]
        del held[bisect_left(held, turn.place)]
        if not held:
            del self._held[turn.account]
        return turn

    def _admit(self) -> None:
        while self._turns and not self._is_closed:
            allowed = [account for account in self._held if self._may_enter(account)]
            if not allowed:
                break
            account = min(allowed, key=lambda one: (self._places.count(one) / one.weight, self._held[one][0]))
            turn = self._unhold(self._held[account][0][2])
            self._enter(turn.place[2], account, turn.num_tokens)
            if not turn.future.done():
                turn.future.set_result(None)
        self._await_quotas()

    def _await_quotas(self) -> None:
        """Look again when the first quota allows it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = [due for account in self._held if (due := account.bucket.seconds())]
        if seconds and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(min(seconds), self._admit)
