"""Calls of the engine's core that are no requests, for its loop, and the checks of their arguments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError
from ..threads.pools import run_in_thread

if TYPE_CHECKING:
    from ..engine.core import EngineCore

__all__ = ["positive_seconds", "resume", "seconds", "start_profile", "stop_profile"]

_START_PROFILE_SECONDS = 60.0  # torch prepares CUDA's profiling interface the first time
_STOP_PROFILE_SECONDS = 600.0  # of a long recording some GB of JSON are written


async def resume(core: EngineCore) -> None:
    """See `AsyncLLM.resume`."""
    core.resume()


async def start_profile(core: EngineCore, folder: str | os.PathLike[str] | None) -> str:
    """See `AsyncLLM.start_profile`."""
    if folder is not None:
        if not isinstance(folder, str | os.PathLike) or not _is_text(os.fspath(folder)):
            raise InvalidRequestError(f"folder={folder!r} is not valid: it must be a path, or None", param="folder")
        folder = await run_in_thread("abspath", os.path.abspath, folder)  # the worker's own place may be another
    return _path_of(await core.worker.long_call("start_profile", folder, timeout=_START_PROFILE_SECONDS))


async def stop_profile(core: EngineCore) -> str:
    """See `AsyncLLM.stop_profile`."""
    return _path_of(await core.worker.long_call("stop_profile", timeout=_STOP_PROFILE_SECONDS))


def seconds(name: str, value: object) -> float:
    """The value, if an event loop's timer can be set to it. Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e8:
        raise InvalidRequestError(f"{name} must be a number of seconds, at least 0 and at most 1e8", param=name)
    return float(value)


def positive_seconds(name: str, value: object) -> float:
    """The value, likewise, if it is above 0. Raises InvalidRequestError."""
    if not seconds(name, value):
        raise InvalidRequestError(f"{name} must be a number of seconds above 0", param=name)
    return seconds(name, value)


def _is_text(path: object) -> bool:
    """Whether it can be told to a worker: a path of bytes that are not UTF-8 can't."""
    return isinstance(path, str) and path == path.encode(errors="ignore").decode()


def _path_of(reply: dict[str, str]) -> str:
    if "refused" in reply:
        raise InvalidRequestError(reply["refused"])
    return reply["path"]
