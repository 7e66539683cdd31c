"""`WeightUpdates`: new weights for all workers of an engine, from a trainer, while no step is computed.

    start ──> paused, at rest ──> update, update, ... ──> finish ──> another version, caches empty, steps go on
                                      │ fails                └── a tensor lacks: the update goes on
                                      └──> abort ──> the last whole version: unchanged, or read again from its files
                                                 └─> lost, if it came as tensors: paused until all have been sent again

A worker's death ends an update as `abort` does, without being asked. A worker that is started again has the checkpoint
of the start; it reads the version's own files, or all wait for the weights to be sent again: what came as tensors is
kept nowhere, since that would take the model's size in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

from ...errors import EngineClosedError, EngineError, InternalError, InvalidRequestError, WeightsLostError
from ..executor import Executor
from ..pacing.holds import Hold, Holds, PauseMode
from ..replicas.replica import Replica
from ..replicas.replicas import Replicas
from ..threads.futures import all_ended
from ..threads.pools import run_in_thread
from ..worker_control import LONG_CALL_SECONDS
from .sources import IpcTensors, TrainerGroup, WindowFiller
from .versions import WeightVersions
from .window import Window

logger = logging.getLogger("aengine")

_UPDATE = Hold("weights", "paused")
_NOT_BEGUN = "the weight update has not begun yet: start_weight_update() has not returned"
_UNDER_WAY = "a weight update is under way: finish_weight_update() or abort_weight_update() ends it"


class Engine(Protocol):
    """What an update asks of the engine's core."""

    @property
    def state(self) -> str: ...
    def check_accepts(self) -> None: ...


class WeightUpdates:
    """The weights of all workers, as versions: one update at a time."""

    def __init__(self, engine: Engine, holds: Holds, replicas: Replicas, versions: WeightVersions) -> None:
        self._engine = engine
        self._holds = holds
        self._replicas = replicas
        self.versions = versions
        self.checksum = ""  # a sum over what came with the current version as tensors
        self._lock = asyncio.Lock()  # held by calls of workers
        self._path: str | None = None  # where the current version can be read; None: the checkpoint of the start
        self._stamp: Any = None  # what was there then
        self._is_kept = True  # whether it can be read there
        self._num_finished = 0
        self._group: tuple[str, int] | None = None  # where the workers have met a trainer's group
        self._lost = ""  # why the workers' weights are of no version
        self._close()

    def _close(self) -> None:
        """Forget the update, which has ended."""
        self._is_open = self._has_tensors = self._has_replaced = False
        self._problem = ""  # why the update can only be aborted
        self._new_path: str | None = None
        self._new_stamp: Any = None
        self._window: Window | None = None

    # -- the caller's calls

    async def start(self, mode: PauseMode) -> None:
        """See `AsyncLLM.start_weight_update`."""
        if self._is_open:
            raise InvalidRequestError(_UNDER_WAY)
        self._engine.check_accepts()
        if not all(replica.worker.ready.get("takes_weights") for replica in self._replicas):
            raise InvalidRequestError(
                "this model takes no new weights: one that transformers computes, an encoder, or a worker of another "
                "kind; start another engine"
            )
        self._is_open, self._problem = True, _NOT_BEGUN
        try:
            self._holds.obstacle = _UNDER_WAY
            # Those who stand still anyway would never come to their ends.
            if not await self._holds.pause(mode if self._engine.state == "running" else "keep", _UPDATE):
                raise InvalidRequestError(
                    "the weight update ended before it had begun: by a worker's death, or by a call"
                )
            async with self._lock:
                self._window = await run_in_thread("window", Window)
                await self._call("begin_weights", os.getpid(), self._window.fd, self._window.num_bytes)
                self._problem = ""
        except BaseException:
            self._end()
            raise

    async def update(self, source: Any, allow_nan: bool, timeout: float) -> None:
        """See `AsyncLLM.update_weights`."""
        async with self._lock:
            self._check_open()
            if isinstance(source, TrainerGroup):
                source = source.checked()
            self._problem = "a call of update_weights was cancelled or failed: abort_weight_update(), then begin again"
            if isinstance(source, str):
                replies = await self._call("check_weights", source, timeout=timeout)
                self._new_stamp = replies[0].get("stamp")
                self._has_replaced = True
                await self._call("load_weights", source, self._new_stamp, timeout=timeout)
                self._new_path = source
            else:
                self._has_tensors = True
                await self._send(source, allow_nan, timeout)
            if self._is_open:  # no worker has died meanwhile
                self._problem = ""

    async def _send(self, source: Any, allow_nan: bool, timeout: float) -> None:
        if isinstance(source, IpcTensors):
            await self._call("put_shared_weights", source.entries, allow_nan, timeout=timeout)
        elif isinstance(source, TrainerGroup):
            await self._receive(source, allow_nan, timeout)
        else:
            assert self._window is not None
            filler = WindowFiller(source, self._window.view)
            while entries := await run_in_thread("weights", filler.fill):
                await self._call("put_weights", entries, allow_nan, timeout=timeout)

    async def _receive(self, group: TrainerGroup, allow_nan: bool, timeout: float) -> None:
        entries = [[name, dtype, [*shape]] for name, dtype, shape in group.tensors]
        if self._group != (group.host, group.port):
            ranks = [len(replica.worker.ready.get("ranks", ())) or 1 for replica in self._replicas]
            size, begin, calls = 1 + sum(ranks), 1, []
            for replica, count in zip(self._replicas, ranks, strict=True):
                how = [group.host, group.port, begin, size, group.backend, group.timeout]
                calls.append(self._call_of(replica.worker.executor, replica, "join_weight_group", how, timeout))
                begin += count
            await _checked(calls)
            self._group = group.host, group.port
        await self._call("receive_weights", entries, allow_nan, timeout=timeout)

    async def finish(self, version: str | None, is_partial: bool, clear_cache: bool) -> str:
        """See `AsyncLLM.finish_weight_update`."""
        async with self._lock:
            self._check_open()
            if is_partial and self._lost:
                raise InvalidRequestError("the weights were lost: all of them must come", param="is_partial")
            replies = await self._call("end_weights", is_partial or self._new_path is not None)
            self._problem = "finish_weight_update failed: abort_weight_update(), then begin again"
            self.checksum = _checksum_of(replies)
            for replica in self._replicas:
                if clear_cache:
                    replica.recompute_all()
                replica.reset_prefix_cache()
            self._num_finished += 1
            self.versions.change(str(self._num_finished) if version is None else version)
            if self._has_tensors:
                self._is_kept, self._path, self._stamp = False, None, None
            elif self._new_path is not None:
                self._is_kept, self._path, self._stamp = True, self._new_path, self._new_stamp
            self._lost = ""
            self._end()
        return self.versions.current

    async def abort(self) -> None:
        """See `AsyncLLM.abort_weight_update`."""
        async with self._lock:
            if not self._is_open:
                raise InvalidRequestError("no weight update is under way")
            if resting := next((one.worker.resting for one in self._replicas if one.worker.resting), ""):
                raise EngineClosedError(resting)
            await self._undo([replica for replica in self._replicas if replica.state == "running"])

    async def restore(self, replica: Replica, workers: Executor) -> None:
        """Give workers that were started in place of others the current version, before their first step. An update
        that was under way ends. Raises EngineError: they have failed."""
        async with self._lock:
            self._group = None  # whoever sends has to make another, with these
            if self._is_open:
                others = [one for one in self._replicas if one is not replica and one.state == "running"]
                await self._undo(others, is_asked=False)
            if self._is_kept and self._path is not None:
                how = "load_weights", [self._path, self._stamp], LONG_CALL_SECONDS
                try:
                    await _checked([self._call_of(workers, replica, *how)])
                except InvalidRequestError as error:
                    self._lose(f"version {self.versions.current} can't be read again: {error}")
            elif not self._is_kept:
                self._lose(f"version {self.versions.current} came as tensors, and a worker that had it has ended")

    # -- internals

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequestError("no weight update is under way: start_weight_update() begins one")
        if self._problem:
            raise InvalidRequestError(self._problem)

    async def _undo(self, replicas: Sequence[Replica], *, is_asked: bool = True) -> None:
        """End the update with the weights from before it. Raises WeightsLostError, if that ``is_asked``."""
        try:
            replies = await self._call("forget_weights", replicas=replicas)
            is_changed = self._has_replaced or any(reply["num_put"] for reply in replies)
            if is_changed and self._is_kept:
                await self._call("load_weights", self._path, self._stamp, replicas=replicas)
            elif is_changed:
                self._lose(f"the update ended early, and version {self.versions.current} came as tensors")
        except (EngineError, InvalidRequestError) as error:
            self._lose(f"the update ended early, and the weights from before it can't be read again: {error}")
        self._end()
        if self._lost and is_asked:
            raise WeightsLostError(self._lost)

    def _lose(self, why: str) -> None:
        """Compute nothing until weights have come again: those of the workers are of no version, or of several."""
        self._is_kept = False
        self._lost = f"{why}: send all weights again, from start_weight_update() on"
        self._holds.stop(_UPDATE)
        self._holds.obstacle = self._lost
        logger.error("the weights are lost: %s", self._lost)

    def _end(self) -> None:
        """End the update: steps go on, unless the weights are lost or somebody else holds them up."""
        window = self._window
        self._close()
        if window is not None:
            window.close()
        self._holds.obstacle = self._lost
        if not self._lost:
            self._holds.release(_UPDATE)

    async def _call(
        self, method: str, *args: Any, replicas: Sequence[Replica] | None = None, timeout: float = LONG_CALL_SECONDS
    ) -> list[dict[str, Any]]:
        """Make a call of all ranks of all replicas, or of these. Returns their replies. Raises InvalidRequestError: one
        of them refuses; EngineError: one fails."""
        alive = [one for one in self._replicas if one.failure is None] if replicas is None else replicas
        for replica in alive:
            replica.worker.check()
        calls = [self._call_of(one.worker.executor, one, method, args, timeout) for one in alive]
        return await _checked(calls)

    async def _call_of(
        self, executor: Executor, replica: Replica, method: str, args: Sequence[Any], timeout: float
    ) -> list[dict[str, Any]]:
        try:
            with replica.steps.watchdog.suspended():
                return await executor.call(method, *args, timeout=timeout)
        except TimeoutError:
            raise InternalError(f"{replica.worker.name} did not answer {method} within {timeout:g} s") from None


async def _checked(calls: Iterable[Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Wait for all calls, whose workers may read the same memory. Returns their replies. Raises as `_call`."""
    replies = [reply for of_one in await all_ended(calls) for reply in of_one]
    for reply in replies:
        if "refused" in reply:
            raise InvalidRequestError(reply["refused"], param="source")
    unknown = [set(reply.get("unknown", ())) for reply in replies]
    if nowhere := set.intersection(*unknown) if unknown else set():
        raise InvalidRequestError(f"no stage of the model has {', '.join(sorted(nowhere)[:8])}", param="source")
    return replies


def _checksum_of(replies: list[dict[str, Any]]) -> str:
    """Return one sum over all tensors that have come. Raises InternalError: ranks have got different ones."""
    import hashlib

    first = replies[0]["sums"]
    for rank, reply in enumerate(replies):
        differing = [name for name, value in reply["sums"] if [name, value] not in first]
        if differing or len(reply["sums"]) != len(first):
            raise InternalError(f"rank {rank} has got other weights than rank 0: {', '.join(differing[:8])}")
    text = "\n".join(f"{name} {value}" for name, value in first)
    return hashlib.sha256(text.encode()).hexdigest() if first else ""
