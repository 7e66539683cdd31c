"""`Replicas`: which replica computes a request, and where it goes on when that one's worker dies.

    Admission ──add──> LoadBalancer: tokens to compute + load ──> a Replica's StepLoop
    worker dies      its requests go on elsewhere, at once; those that it may have died of stay (crash_quarantine.py)
    worker is back   takes over what waits for another worker, or for room
    a request ends   its replica takes over one that waits for room elsewhere, if none waits here
    too many deaths  the replica is given up; the engine fails with its last one

A request keeps its place by priority and arrival, and its tokens: see moving.py. With one replica nothing of this is
done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ...config import EngineConfig
from ...errors import EngineError
from ...outputs import FinishReason
from ...telemetry.metrics import Counters
from ...telemetry.observer import Observer
from ..admission_queue import AdmissionQueue
from ..executor import Executor
from ..structured.service import GrammarService
from ..user_request import UserRequest
from ..worker_control import check_arguments
from .load_balancer import LoadBalancer, OnlyReplica
from .moving import can_move, is_untouched, take_out, waits_for_room
from .replica import Replica
from .start import Started

logger = logging.getLogger("aengine")

_MOST_LOOKED_AT = 16
"""Waiting requests of which one may be moved when another ends: those at the front may have begun, and stay."""


class Replicas:
    """The replicas of one engine: each request is given to one, and moved when that one fails."""

    def __init__(
        self,
        started: Sequence[Started],
        config: EngineConfig,
        *,
        queue: AdmissionQueue,
        counters: Counters,
        observer: Observer,
        grammars: GrammarService | None,
    ) -> None:
        """``queue``: the engine's, which a request leaves with its first step."""
        self._queue = queue
        self._all = [
            Replica(
                index,
                config,
                one,
                counters=counters,
                observer=observer,
                on_begun=partial(self._begun, index),
                grammars=grammars,
            )
            for index, one in enumerate(started)
        ]
        self._independent = [replica for replica in self._all if replica.is_independent]
        schedulers = [replica.scheduler for replica in self._all]
        self._balancer = LoadBalancer(schedulers) if len(schedulers) > 1 else OnlyReplica()
        self._requests: list[dict[str, UserRequest]] = [{} for _ in self._all]  # requests by id, of each replica

    def __getitem__(self, index: int) -> Replica:
        return self._all[index]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    # -- life

    @property
    def are_running(self) -> bool:
        """Whether the task of any replica has not ended."""
        return any(replica.task is not None and not replica.task.done() for replica in self._all)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel and return the tasks of all replicas."""
        tasks = [replica.task for replica in self._all if replica.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    def terminate(self) -> None:
        """Kill the workers at once, from any thread."""
        for replica in self._all:
            replica.worker.executor.terminate()

    async def aclose(self, timeout: float) -> None:
        """Shut the workers down, side by side, and kill those that take longer than ``timeout`` seconds."""
        await asyncio.gather(*(replica.worker.executor.aclose(timeout) for replica in self._all))

    # -- requests

    def add(self, request: UserRequest) -> None:
        """Give a request to the replica that suits it best."""
        replica = request.replica = self._route(request, _able_of(self._all))
        for one in request.requests:
            replica.steps.add(one)

    def drop(self, request: UserRequest, reason: FinishReason) -> None:
        """Compute nothing more for a request that has ended, in whatever phase it was."""
        replica = request.replica
        if replica is None:
            return
        for one in request.requests:
            replica.steps.drop(one, reason)
        self._forget(request, replica)
        if replica.state == "running" and not replica.scheduler.num_waiting and replica.scheduler.rows.num_free:
            self._take_one(replica)

    def _route(self, request: UserRequest, candidates: Sequence[Replica]) -> Replica:
        first = next(one for one in request.requests if one.finish_reason is None)
        index = self._balancer.route(first, [replica.index for replica in candidates])
        self._requests[index][request.request_id] = request
        return self._all[index]

    def _begun(self, index: int, request_id: str) -> None:
        self._queue.leave(request_id)
        self._balancer.begin(index, request_id)

    def _forget(self, request: UserRequest, replica: Replica) -> None:
        self._balancer.remove(replica.index, request.request_id)
        self._requests[replica.index].pop(request.request_id, None)

    # -- from one replica to another

    def _move(self, request: UserRequest, source: Replica, candidates: Sequence[Replica]) -> None:
        self._forget(request, source)
        left = take_out(source.scheduler, request.requests)
        target = request.replica = self._route(request, candidates)
        if left[0].has_begun:  # it has had its first step, of which `_begun` is told
            self._balancer.begin(target.index, request.request_id)
        for one in left:
            target.steps.add(one)

    def _take_one(self, replica: Replica) -> bool:
        """Let a replica with room have a request that waits for room elsewhere, and has had no step there. Returns
        whether there was one."""
        for other in self._all:
            if other is not replica and other.state == "running" and waits_for_room(other.scheduler):
                for one in islice(other.scheduler.waiting, _MOST_LOOKED_AT):
                    request = self._requests[other.index][one.request_id]
                    if is_untouched(request.requests) and can_move(other.scheduler, request.requests):
                        self._move(request, other, [replica])
                        return True
        return False

    def leave(self, replica: Replica) -> None:
        """Let the requests of a replica, whose worker has died, go on elsewhere, if another one runs and does not die
        with it."""
        others = [other for other in self._independent if other is not replica and other.state == "running"]
        if others:
            self._move_all(replica, others)

    def join(self, replica: Replica) -> None:
        """Let a replica whose worker runs again have what waits for another worker, and its share of what waits for
        room."""
        for other in self._independent:
            if other.state == "restarting":
                self._move_all(other, [replica])
        num_rows = replica.scheduler.rows.num_free
        while replica.scheduler.num_waiting < num_rows and self._take_one(replica):
            pass

    def _move_all(self, source: Replica, candidates: Sequence[Replica]) -> None:
        for request in list(self._requests[source.index].values()):
            if can_move(source.scheduler, request.requests):
                self._move(request, source, candidates)

    def give_up(self, replica: Replica, error: EngineError) -> bool:
        """Do without a replica from now on. Returns whether another is left, which gets its requests."""
        replica.failure = error
        others = _able_of(self._independent)
        if not others:
            return False
        logger.error("replica %d is given up, and the engine goes on without it: %s", replica.index, error)
        for request in list(self._requests[replica.index].values()):
            self._move(request, replica, others)
        replica.worker.executor.terminate()
        return True

    # -- calls of the workers

    def running_workers(self) -> list[Executor]:
        """Return the workers of each replica that is not being started again."""
        return [replica.worker.executor for replica in self._all if replica.state == "running"]

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Make a call that stops steps and heartbeats, of the workers of all replicas that run. Returns their answers,
        by replica."""
        running = [replica for replica in self._all if replica.state == "running"]
        if not running:
            self._all[0].worker.check()
            await self.check_health(timeout)
        return await asyncio.gather(*(one.worker.long_call(method, *args, timeout=timeout) for one in running))

    async def call_all(self, method: str, args: Sequence[Any], timeout: float) -> list[Any]:
        """Make a call of all ranks of all replicas that are not given up. Returns their answers, in this order."""
        check_arguments(method, args)
        alive = [replica for replica in self._all if replica.failure is None]
        for replica in alive:
            replica.worker.check()
        answers = await asyncio.gather(*(one.worker.call_all(method, args, timeout) for one in alive))
        return [answer for of_one in answers for answer in of_one]

    async def check_health(self, timeout: float) -> float:
        """See `AsyncLLM.check_health`: the engine is well while the worker of any replica answers."""
        alive = [replica for replica in self._all if replica.failure is None]
        running = [replica for replica in alive if replica.state == "running"] or alive
        checks = (replica.worker.check_health(timeout) for replica in running)
        results = await asyncio.gather(*checks, return_exceptions=True)
        answered = [result for result in results if isinstance(result, float)]
        if not answered:
            raise next(result for result in results if isinstance(result, BaseException))
        return max(answered)


def _able_of(replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas that run, or, if none does, those that will be restarted."""
    running = [replica for replica in replicas if replica.state == "running"]
    return running or [replica for replica in replicas if replica.failure is None]
