"""A runner that answers at once, or after FAKE_STEP_US microseconds a step: what remains is the host's own work."""

from __future__ import annotations

import os
import time
from typing import Any

from aengine.config import EngineConfig
from aengine.ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, int32
from aengine.workers.loaded import FixedModel, Progress
from aengine.workers.rank import Rank

STEP_SECONDS = float(os.environ.get("FAKE_STEP_US", "0")) * 1e-6


class Done:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def get(self) -> ModelRunnerOutput:
        return self._output


class FakeRunner:
    """Keeps rows as a runner does; the id sampled at a position is 260 + position % 997, mostly printable words."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}  # row: [num_tokens, num_computed]
        self._next = time.perf_counter()

    def execute_model(self, out: SchedulerOutput) -> None:
        for row in out.removed:
            del self._rows[row]
        for new in out.new_requests:
            self._rows[new.req_idx] = [len(new.token_ids), new.num_computed_tokens]
        self._step = out
        if STEP_SECONDS:
            now = time.perf_counter()
            self._next = max(self._next + STEP_SECONDS, now)
            time.sleep(self._next - now)

    prepares_after = None

    def prepare_more(self) -> None:
        pass

    def sample_tokens(self, grammar: GrammarOutput | None) -> Done:
        ids = []
        for row, scheduled in zip(self._step.req_idx, self._step.num_scheduled_tokens, strict=True):
            state = self._rows[row]
            state[1] += scheduled
            samples = state[1] == state[0]
            ids.append(260 + state[0] % 997 if samples else -1)
            state[0] += samples
        return Done(ModelRunnerOutput(self._step.step_id, int32(ids)))


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    ready = {"num_blocks": 40_000, "block_size": 16, "max_model_len": 8192, "max_num_batched_tokens": 8192}
    return FixedModel(FakeRunner(), ready | {"vocab_size": 49152, "weight_format": "none", "device": "none"})
