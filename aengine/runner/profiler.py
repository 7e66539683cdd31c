"""Traces of what the worker and its device do, by torch's profiler. torch has one a process: so its state is here.

A trace is Chrome's format, gzipped: chrome://tracing and ui.perfetto.dev open it.
"""

from __future__ import annotations

import os
import tempfile
import time

from torch.profiler import ProfilerActivity, profile

from ..errors import InvalidRequestError
from .platforms.platform import Platform

_running: tuple[profile, str] | None = None  # the profile being recorded, and its folder


def start(folder: str | None, platform: Platform) -> str:
    """Begin to record. ``folder``: absolute, made if need be; None: a new temporary one. Returns the folder.

    Raises InvalidRequestError if a profile is being recorded already, or the folder can't be written to.
    """
    global _running
    if _running is not None:
        raise InvalidRequestError(f"a profile is being recorded already, for {_running[1]}: stop_profile ends it")
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
    _running = recording, folder
    return folder


def stop(rank: int, platform: Platform) -> str:
    """End the recording when the device has done what it was given, and write it. Returns the file's path.

    Raises InvalidRequestError if none is being recorded; OSError if it can't be written, which ends it all the same.
    """
    global _running
    if _running is None:
        raise InvalidRequestError("no profile is being recorded: start_profile begins one")
    (recording, folder), _running = _running, None
    platform.synchronize()
    recording.stop()
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{int(now % 1 * 1000):03}-{os.getpid()}"
    path = os.path.join(folder, f"aengine-rank{rank}-{stamp}.json.gz")
    recording.export_chrome_trace(path)
    return path
