"""Whose turn it is: work of several accounts for the same few threads, and places in the same bounded queues.

on whose behalf a task acts   `acting_for`, a variable of its context
threads of a pool             `Turns`: by start-time fair queuing; of one account in the order of its calls
places in a bounded queue     `Places`: each account has its part of them, which others can't fill
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from contextvars import ContextVar
from typing import Protocol


class Account(Hashable, Protocol):
    """One of those who share threads and queues."""

    @property
    def weight(self) -> float:
        """Its share beside others'."""


class _Nobody:
    weight = 1.0


NOBODY: Account = _Nobody()
acting_for: ContextVar[Account] = ContextVar("acting_for", default=NOBODY)


class Turns:
    """Gives each piece of work its turn, a number: those of an account follow each other at a distance that its weight
    says, and none is earlier than what is being done."""

    __slots__ = ("_last", "now")

    def __init__(self) -> None:
        self.now = 0.0  # the turn of the work that was begun last
        self._last: dict[Account, float] = {}

    def next(self, *, is_idle: bool) -> float:
        """Return the turn of the work that is being asked for. ``is_idle``: nothing waits, so nothing need be
        remembered."""
        account = acting_for.get()
        if is_idle:
            self._last.clear()
        turn = max(self.now, self._last.get(account, 0.0)) + 1 / account.weight
        self._last[account] = turn
        return turn


class Places:
    """How many places of a queue each account has. Of ``limit`` places none is lost to an account that has less than
    its part: when all are taken, it gets one more than there are."""

    __slots__ = ("_counts", "_total", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts: Counter[Account] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def count(self, account: Account) -> int:
        return self._counts[account]

    def has_room(self, account: Account) -> bool:
        """Whether another of this account may have a place."""
        if self._total < self.limit:
            return True
        counts = self._counts
        weights = sum(one.weight for one in counts if one is not account) + account.weight
        return counts[account] + 1 <= self.limit * account.weight / weights

    def take(self, account: Account) -> None:
        self._counts[account] += 1
        self._total += 1

    def leave(self, account: Account) -> None:
        self._total -= 1
        self._counts[account] -= 1
        if not self._counts[account]:
            del self._counts[account]
