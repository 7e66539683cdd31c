"""The paced runner on several ranks which, as those of a real model do, wait for each other in every step: a rank that
computes another step than the first is an error."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from paced_runner import PacedRunner
from paced_runner import load_model as load_paced

from aengine.config import EngineConfig
from aengine.ipc.messages import SchedulerOutput
from aengine.runner.distributed.group import TensorGroup
from aengine.runner.distributed.opening import open_group
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.workers.loaded import FixedModel, Progress
from aengine.workers.rank import Rank


class LockstepRunner(PacedRunner):
    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        self._rng = random.Random(group.rank)

    def execute_model(self, out: SchedulerOutput) -> None:
        if self._rng.random() < 0.05:
            time.sleep(self._rng.random() * 0.01)  # one rank is behind, then another
        steps = self._group.gather(torch.tensor([out.step_id, len(out.req_idx)])).tolist()
        assert all(step == steps[0] for step in steps), f"ranks compute {steps}"
        super().execute_model(out)


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    model = load_paced(config, source, rank, progress)
    model._runner = LockstepRunner(open_group(rank, CpuPlatform()))
    return model
