"""`LoadBalancer`: chooses the replica for a request, by the tokens that it would have to compute there, and the load.

    cost of a replica = tokens of the prompt that are not cached there
                      + _WAITING_SHARE  x tokens of prompts that wait there for their first step
                      + _RUNNING_TOKENS x completions that it has, waiting or running

A chat's next turn finds the replica that has its history, unless that one has so much more to do that computing the
history anew is the lesser evil. A prefix counts as cached from the moment that a prompt with it is routed there, so
that a burst of prompts that begin alike stays together while it is short. `benchmarks/routing.py` compares the rule
with others, and shows what the two numbers are made of. Nothing here is random, and nothing reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler.kv_cache_manager import extend_hashes
from ..scheduler.request import Request
from ..scheduler.scheduler import Scheduler
from .moving import num_cached

_WAITING_SHARE = 0.5
"""Cost of a prompt token that waits there: the new request waits for it, but it is another request's work."""
_RUNNING_TOKENS = 64
"""Prompt tokens that another completion weighs as much as: it takes a place in each step from now on."""
_MARK_TOKENS = 128
"""Prompts that are not computed yet are compared at every so many tokens."""


class Load:
    """The work of one replica, as far as it matters for the choice. Kept by the ids of requests."""

    def __init__(self) -> None:
        self.num_completions = 0
        self.waiting_tokens = 0
        self._completions: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._marks: dict[str, list[bytes]] = {}
        self._coming: dict[bytes, int] = {}  # number of requests routed here whose prompt has the prefix with this hash

    def add(self, request: Request, num_to_compute: int, marks: list[bytes]) -> None:
        """Note that a call was routed here, of which ``request`` is the first completion."""
        request_id = request.request_id
        self._completions[request_id] = request.params.n
        self.num_completions += request.params.n
        self._waiting[request_id] = num_to_compute
        self.waiting_tokens += num_to_compute
        self._marks[request_id] = marks
        for mark in marks:
            self._coming[mark] = self._coming.get(mark, 0) + 1

    def begin(self, request_id: str) -> None:
        """Note that the first step of a request is made. Idempotent."""
        self.waiting_tokens -= self._waiting.pop(request_id, 0)

    def remove(self, request_id: str) -> None:
        """Note that a request has ended, or was moved."""
        self.begin(request_id)
        self.num_completions -= self._completions.pop(request_id, 0)
        for mark in self._marks.pop(request_id, ()):
            count = self._coming.pop(mark) - 1
            if count:
                self._coming[mark] = count

    def num_coming(self, marks: Sequence[bytes]) -> int:
        """Return how many of a prompt's marks, from the first on, are also those of a request on this replica."""
        low, high = 0, len(marks)
        while low < high:  # a request that has a mark has all marks before it
            middle = (low + high + 1) // 2
            if marks[middle - 1] in self._coming:
                low = middle
            else:
                high = middle - 1
        return low


class LoadBalancer:
    """Chooses among replicas, and keeps count of what each was given."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        self.loads = [Load() for _ in schedulers]

    def route(self, request: Request, candidates: Sequence[int]) -> int:
        """Choose a replica of these for a call, of which ``request`` is the first completion, and note it there. Of
        equal ones the one that has the least to do, then the lowest."""
        costs = []
        for index in candidates:
            cached = num_cached(self._schedulers[index], request)
            # marks depend on the tokens alone: they are equal for all replicas
            marks, width = _marks(request, self._schedulers[index])
            load = self.loads[index]
            num_to_compute = len(request.token_ids) - max(cached, load.num_coming(marks) * width)
            weight = cost(num_to_compute, load.waiting_tokens, load.num_completions)
            costs.append((weight, load.num_completions, index, num_to_compute))
        *_, index, num_to_compute = min(costs)
        self.loads[index].add(request, num_to_compute, marks)
        return index

    def begin(self, index: int, request_id: str) -> None:
        """Note that the first step of a request of this replica is made. Idempotent."""
        self.loads[index].begin(request_id)

    def remove(self, index: int, request_id: str) -> None:
        """Note that a request of this replica has ended, or was moved."""
        self.loads[index].remove(request_id)


class OnlyReplica:
    """Chooses where there is one replica, of which there is nothing to count."""

    def route(self, request: Request, candidates: Sequence[int]) -> int:
        """Return the replica, also when it is being started again."""
        return 0

    def begin(self, index: int, request_id: str) -> None:
        """Do nothing: nothing depends on the request."""

    def remove(self, index: int, request_id: str) -> None:
        """Do nothing: nothing depends on the request."""


def cost(num_to_compute: int, waiting_tokens: int, num_completions: int) -> float:
    """Return what a request would cost on a replica, in units of one prompt token's computation."""
    return num_to_compute + _WAITING_SHARE * waiting_tokens + _RUNNING_TOKENS * num_completions


def _marks(request: Request, scheduler: Scheduler) -> tuple[list[bytes], int]:
    """Return the hashes of the prompt's prefixes of m, 2 m, ... tokens that leave a token to compute, and m, about 128.
    The list is empty if the request shares no prefix."""
    size = scheduler.rows.kv.block_size
    step = max(1, _MARK_TOKENS // size)
    if request.root_hash is None:
        return [], step * size
    count = (len(request.token_ids) - 1) // (size * step)
    extend_hashes(request, count * step, size)
    return request.block_hashes[step - 1 : count * step : step], step * size
