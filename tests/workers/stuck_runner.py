"""The fake runner with what looks like a GPU: an answer is ready a while after the step was launched, or never. The
worker extension here says what the next step does."""

from __future__ import annotations

import time
from typing import Any

from fake_runner import READY, Done, FakeRunner

from aengine.config import EngineConfig
from aengine.ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aengine.workers.loaded import FixedModel, Progress, WorkerContext
from aengine.workers.rank import Rank


class LateAnswer(Done):
    def __init__(self, output: ModelRunnerOutput, ready_at: float) -> None:
        super().__init__(output)
        self._ready_at = ready_at

    def ready(self) -> bool:
        return time.monotonic() >= self._ready_at


class StuckRunner(FakeRunner):
    def __init__(self) -> None:
        super().__init__()
        self.host_seconds = self.device_seconds = 0.0  # of the next step
        self.lies = False  # in the next step

    def execute_model(self, out: SchedulerOutput) -> None:
        seconds, self.host_seconds = self.host_seconds, 0.0
        time.sleep(seconds)
        super().execute_model(out)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Done:
        seconds, self.device_seconds = self.device_seconds, 0.002
        output = super().sample_tokens(grammar).get()
        if self.lies:
            self.lies = False
            output.token_ids[-1] += 1
        return LateAnswer(output, time.monotonic() + seconds)


class Extension:
    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank.index
        self._runner: Any = context.runner

    def delay(self, host_seconds: list[float], device_seconds: list[float]) -> None:
        """By rank."""
        self._runner.host_seconds = host_seconds[self._rank]
        self._runner.device_seconds = device_seconds[self._rank]

    def lie(self, rank: int) -> None:
        """Have one rank sample another token."""
        self._runner.lies = self._rank == rank


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    return FixedModel(StuckRunner(), READY, {"is_accelerator": True})


def load_cpu_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    return FixedModel(StuckRunner(), READY)
