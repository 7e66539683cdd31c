"""A runner for hosts that are to die at some moment: it takes its time to load and to step, and can get stuck."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from fake_runner import READY, FakeRunner

from aengine.config import EngineConfig
from aengine.ipc.messages import SchedulerOutput

SLEEP, HOLD_GIL = 201, 202  # what a request whose prompt begins so does to its worker
LOAD_SECONDS, STEP_SECONDS = 0.3, 0.004


class SlowRunner(FakeRunner):
    def execute_model(self, out: SchedulerOutput) -> None:
        super().execute_model(out)
        time.sleep(STEP_SECONDS)
        for new in out.new_requests:
            if new.token_ids[0] == SLEEP:
                time.sleep(3600)
            if new.token_ids[0] == HOLD_GIL:
                ctypes.PyDLL(None).sleep(3600)


def load_runner(
    config: EngineConfig, source: dict[str, Any], rank: int, world_size: int, progress: Callable[..., None]
) -> tuple[SlowRunner, dict[str, Any]]:
    for done in range(10):
        progress("weights", done, 10, "bytes")
        time.sleep(LOAD_SECONDS / 10)
    return SlowRunner(), dict(READY)
