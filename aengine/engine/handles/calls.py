"""Calls of the engine's core that are no requests, for its loop, and the checks of their arguments.

A handle awaits them by `Handle.run`; an engine in another process is asked for them by name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from ...errors import InvalidRequestError
from ...limits.graphs import PROFILER_RANGE
from ..threads.pools import run_in_thread

if TYPE_CHECKING:
    from ..core import EngineCore
    from ..pooling.requests import PoolingRequest, PoolingResult

_START_PROFILE_SECONDS = 60.0  # seconds; torch prepares CUDA's profiling interface the first time
_STOP_PROFILE_SECONDS = 600.0  # seconds; a long recording is written as some GB of JSON


async def drain(core: EngineCore, timeout: float | None) -> bool:
    """See `AsyncLLM.drain`."""
    return await core.drain(timeout)


async def resume(core: EngineCore) -> None:
    """See `AsyncLLM.resume`."""
    core.resume()


async def pool(core: EngineCore, request: PoolingRequest, context: Context | None) -> PoolingResult:
    """See `AsyncLLM.pool`. ``context``: of the caller, for those who listen."""
    from ..pooling.answers import answer_pooling

    return await answer_pooling(core, request, context)


async def ask_tokenizer(core: EngineCore, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Make one of the calls of `AsyncLLM.async_tokenizer`."""
    return await core.admission.preparation.ask_tokenizer(method, args, options)


async def check_health(core: EngineCore, timeout: float) -> float:
    """See `AsyncLLM.check_health`."""
    return await core.replicas.check_health(timeout)


async def start_profile(core: EngineCore, folder: str | os.PathLike[str] | None) -> str:
    """See `AsyncLLM.start_profile`."""
    if folder is not None:
        if not isinstance(folder, str | os.PathLike) or not _is_text(os.fspath(folder)):
            raise InvalidRequestError(f"folder={folder!r} is not valid: it must be a path, or None", param="folder")
        if folder != PROFILER_RANGE:
            folder = await run_in_thread("abspath", os.path.abspath, folder)  # the worker's own directory may differ
    elif len(core.replicas) > 1:  # several replicas write into one folder
        folder = await run_in_thread("mkdtemp", partial(tempfile.mkdtemp, prefix="aengine-profile-"))
    replies = await core.replicas.call("start_profile", folder, timeout=_START_PROFILE_SECONDS)
    return min(map(_path_of, replies))  # the replies are equal; `_path_of` raises the error of one that is a refusal


async def stop_profile(core: EngineCore) -> str:
    """See `AsyncLLM.stop_profile`."""
    replies = await core.replicas.call("stop_profile", timeout=_STOP_PROFILE_SECONDS)
    # A worker that was started again meanwhile records nothing.
    return _path_of(next((reply for reply in replies if "path" in reply), replies[0]))


async def collective_rpc(core: EngineCore, method: object, args: tuple[Any, ...], timeout: float) -> list[Any]:
    """See `AsyncLLM.collective_rpc`."""
    if not isinstance(method, str) or not method.isidentifier() or method.startswith("_"):
        raise InvalidRequestError(f"method={method!r:.100} is not valid: it must be a public name", param="method")
    return await core.replicas.call_all(method, args, timeout)


async def keep_session(core: EngineCore, session_id: str, seconds: float, cache_salt: str | None) -> bool:
    """See `AsyncLLM.keep_session`."""
    if not seconds:
        core.admission.preparation.end_session(session_id, cache_salt)
    return core.admission.keeping.keep(session_id, seconds, cache_salt=cache_salt)


async def reset_prefix_cache(core: EngineCore) -> int:
    """See `AsyncLLM.reset_prefix_cache`."""
    return sum(replica.reset_prefix_cache() for replica in core.replicas)


def seconds(name: str, value: object) -> float:
    """Return the value if an event loop's timer can be set to it. Raises InvalidRequestError otherwise."""
    if not _is_seconds(value):
        raise InvalidRequestError(f"{name} must be a number of seconds, at least 0 and at most 1e8", param=name)
    return float(value)


def positive_seconds(name: str, value: object) -> float:
    """Return the value if it is above 0 and a loop's timer can be set to it. Raises InvalidRequestError otherwise."""
    if not _is_seconds(value) or not value:
        raise InvalidRequestError(f"{name} must be a number of seconds, above 0 and at most 1e8", param=name)
    return float(value)


def _is_seconds(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e8


def _is_text(path: object) -> bool:
    """Return whether the text can be sent to a worker: a path of bytes that are not UTF-8 can't."""
    return isinstance(path, str) and path == path.encode(errors="ignore").decode()


def _path_of(reply: dict[str, str]) -> str:
    if "refused" in reply:
        raise InvalidRequestError(reply["refused"])
    return reply["path"]
