"""`CoreCalls`: the calls of an engine's core that are no requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...params import CallOptions, check_options, checked_keep
from ..pooling.requests import PoolingCalls
from . import calls
from .lora_calls import LoraCalls
from .sleep_calls import SleepCalls
from .weight_calls import WeightCalls

if TYPE_CHECKING:
    import os

    from ..pooling.requests import PoolingRequest, PoolingResult
    from .handle import Handle


class CoreCalls(PoolingCalls, LoraCalls, WeightCalls, SleepCalls):
    """Calls of the core of an engine held by a handle, each with one `Handle.run`. See `SyncCoreCalls`."""

    _handle: Handle

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait for the running ones to end, a dead worker's replacement included.

        Args:
            timeout: seconds to wait at most; None: for as long as it takes.

        Returns whether all requests have ended. ``state`` is then "draining" until `aclose` or `resume`: new requests
        are refused with EngineClosedError, everything else works. After `abort_all` it returns at once.

        Raises:
            EngineClosedError: the engine is not running.
        """
        limit = None if timeout is None else calls.seconds("timeout", timeout)
        return await self._handle.run(calls.drain, limit)

    async def resume(self) -> None:
        """Take new requests again after `drain`, and compute again after `pause`; a pending `drain` returns False if
        any requests still run.

        Raises:
            InvalidRequestError: something that needs the workers at rest is under way; the message says what.
            EngineClosedError: the engine is not running, or is being closed.
        """
        await self._handle.run(calls.resume)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Answer a request for vectors or scores as it is: what `embed`, `score`, `rerank` and `classify` are made of.
        Errors as of `embed`."""
        return await self._handle.run(calls.pool, request, self._handle.listeners.context())

    async def check_health(self, timeout: float = 10.0) -> float:
        """Send a ping the way of a request's steps; the worker answers once it has launched the steps before. Returns
        the seconds that it took.

        Raises:
            InvalidRequestError: ``timeout`` is no number of seconds above 0.
            EngineClosedError: the engine is not running, or it has failed.
            WorkerDiedError: the worker has died and is being started again; requests wait, and will go on.
            InternalError: no answer within ``timeout`` seconds. The engine acts on that by itself, if it has to.
        """
        limit = calls.positive_seconds("timeout", timeout)
        return await self._handle.run(calls.check_health, limit)

    async def start_profile(self, folder: str | os.PathLike[str] | None = None) -> str:
        """Record what the worker and its GPU do, until `stop_profile`. For seconds, not minutes: all is kept in memory.

        Args:
            folder: where the trace will be; made if need be. None: a new temporary folder. "cuda": no trace is made;
                the range opens that Nsight Systems and Nsight Compute record of the worker (docs/gpu.md#traces).

        Returns the folder's path, or "cuda". With several replicas each writes a trace there.

        Raises:
            InvalidRequestError: a profile is being recorded already, or the range is open; the folder can't be written
                to; the worker has no GPU whose range could be opened.
        """
        return await self._handle.run(calls.start_profile, folder)

    async def stop_profile(self) -> str:
        """End the recording and write it: a gzipped Chrome trace, for ui.perfetto.dev. Returns the file's path;
        with several replicas that of the first one's. Of a range it returns "cuda".

        The worker does nothing else meanwhile, for up to a minute after a long recording: requests wait.

        Raises:
            InvalidRequestError: no profile is being recorded.
        """
        return await self._handle.run(calls.stop_profile)

    async def collective_rpc(self, method: str, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a method of the setting ``worker_extension`` in every worker, between two steps.

            class Extension:  # worker_extension="my_module:Extension"
                def __init__(self, context: WorkerContext) -> None: ...

                def free_bytes(self, index: int) -> int: ...

            free = await engine.collective_rpc("free_bytes", 0)  # one number a worker

        Args:
            method: its name. ``"ping"``, ``"memory_info"`` and ``"reload_weights"`` are there without one.
            args: its arguments, the same everywhere: plain data (None, bool, int, float, str, bytes, list, dict).
            timeout: seconds for all of them. Steps wait meanwhile. A worker that still has not come back is started
                again as soon as requests wait for it.

        Returns what each returned, as plain data (a tuple has become a list), in the order of the ranks; with
        data_parallel_size those of the first replica first.

        Raises:
            InvalidRequestError: there is no such method, or an argument is no plain data.
            WorkerCallError: the method has raised in a worker, returned what is no plain data, or took too long.
            WorkerDiedError: a worker died meanwhile, or is being started again.
            EngineClosedError: the engine is not running, or it has failed.
        """
        limit = calls.positive_seconds("timeout", timeout)
        return await self._handle.run(calls.collective_rpc, method, args, limit)

    async def keep_session(self, session_id: str, seconds: float, cache_salt: str | None = None) -> bool:
        """Keep the KV that the last request of this ``session_id`` has left for so many seconds from now; 0: no more.
        While a request of it waits or runs, that one's own ``keep`` counts, from its end on.

        Returns whether anything was kept.

        Raises:
            InvalidRequestError: ``seconds`` is no number from 0 to 86400, or ``session_id`` or ``cache_salt`` no name.
            EngineClosedError: the engine is not running.
        """
        check_options(CallOptions(session_id=session_id, cache_salt=cache_salt))
        return await self._handle.run(calls.keep_session, session_id, checked_keep("seconds", seconds), cache_salt)

    async def reset_prefix_cache(self) -> int:
        """Forget the KV blocks of all prompts so far, which later ones with the same beginning would take over: for a
        worker extension that has changed the weights. Requests that are being computed go on with what they have, and
        no later one takes over their blocks.

        Returns how many blocks were known, of all replicas.

        Raises EngineClosedError: the engine is not running, or it has failed.
        """
        return await self._handle.run(calls.reset_prefix_cache)
