"""The fake runner, in a rank that meets the others; or that does not, when its model says so."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from fake_runner import READY, FakeRunner

from aengine.config import EngineConfig
from aengine.runner.distributed.opening import open_group
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.workers.loaded import FixedModel, Progress
from aengine.workers.rank import Rank


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    progress("meet", 0, 0, "")
    if rank.index == 1 and source.get("fail") == "die":
        time.sleep(0.3)  # the others wait by now
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.index == 1 and source.get("fail") == "hang":
        time.sleep(3600)
    group = open_group(rank, CpuPlatform())
    seen = group.gather(torch.tensor([rank.index, os.getpid()])).tolist()
    if rank.index == 1 and source.get("fail") == "die after":
        os.kill(os.getpid(), signal.SIGKILL)
    if source.get("fail"):
        group.gather(torch.zeros(1))
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
    facts = {"seen": seen, "files": files, "is_global": dist.is_initialized(), "threads": torch.get_num_threads()}
    return FixedModel(FakeRunner(rank), READY, facts)
