"""What the worker and its device do, recorded: by torch's profiler, or by a tool from outside, such as Nsight Systems.

torch's trace is Chrome's format, gzipped: chrome://tracing and ui.perfetto.dev open it. A tool records what happens in
the device's profiler range ("cuda"), from its own start on. A process has one of each, so their state is here.

Phases ("execute_model", "sample_tokens", "capture") are named in both, and cost nothing otherwise.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from ..errors import InvalidRequestError
from ..limits.graphs import PROFILER_RANGE
from .platforms.platform import Platform

P = ParamSpec("P")
T = TypeVar("T")


class _Recording(NamedTuple):
    where: str  # its folder, or `PROFILER_RANGE`
    phase: Callable[[str], AbstractContextManager[object]]  # names what is done within
    end: Callable[[int], str]  # ends it, on the rank of this index. Returns the file's path, or `PROFILER_RANGE`


_running: _Recording | None = None


def phase(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Name the calls of a function in what is being recorded."""

    def named(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if _running is None:
                return function(*args, **kwargs)
            with _running.phase(name):
                return function(*args, **kwargs)

        return call

    return named


def start(folder: str | None, platform: Platform) -> str:
    """Begin to record. ``folder``: absolute, made if need be; None: a new temporary one; `PROFILER_RANGE`: none, as a
    tool outside records. Returns the folder, or `PROFILER_RANGE`.

    Raises InvalidRequestError if something is being recorded already, the folder can't be written to, or the device has
    no range.
    """
    global _running
    if _running is not None:
        raise InvalidRequestError(f"a profile is being recorded already, for {_running.where}: stop_profile ends it")
    _running = _range(platform) if folder == PROFILER_RANGE else _trace(folder, platform)
    return _running.where


def stop(rank: int, platform: Platform) -> str:
    """End the recording when the device has done what it was given. Returns the path of the file that was written, or
    `PROFILER_RANGE`.

    Raises InvalidRequestError if none is being recorded; OSError if it can't be written, which ends it all the same.
    """
    global _running
    if _running is None:
        raise InvalidRequestError("no profile is being recorded: start_profile begins one")
    recording, _running = _running, None
    platform.synchronize()
    return recording.end(rank)


def _range(platform: Platform) -> _Recording:
    if platform.profiler_range is None:
        raise InvalidRequestError(
            f'folder="{PROFILER_RANGE}": a {platform.name} has no profiler range: give a folder, '
            f'"./{PROFILER_RANGE}" for one of that name',
            param="folder",
        )
    stack = ExitStack()
    named = stack.enter_context(platform.profiler_range())

    def end(rank: int) -> str:
        stack.close()
        return PROFILER_RANGE

    return _Recording(PROFILER_RANGE, named, end)


def _trace(folder: str | None, platform: Platform) -> _Recording:
    if folder is None:
        folder = tempfile.mkdtemp(prefix="aengine-profile-")
    else:
        try:
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"folder={folder!r} can't be written to: {error}", param="folder") from error
    activities = [ProfilerActivity.CPU, *platform.profiler_activities]
    # acc_events=True avoids a warning that the trace has only the last cycle, as there is but one.
    recording = profile(activities=activities, acc_events=True)
    recording.start()

    def end(rank: int) -> str:
        recording.stop()
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now % 1 * 1000):03}-{os.getpid()}"
        path = os.path.join(folder, f"aengine-rank{rank}-{stamp}.json.gz")
        recording.export_chrome_trace(path)
        return path

    return _Recording(folder, record_function, end)
