"""A runner without a model whose steps take fixed times, as a GPU's do: launched at once, done one after the other.

A step takes PACED_STEP_US microseconds, and PACED_TOKEN_US more for each token that it computes. Each is a line of JSON
in the file PACED_LOG: when it begins (`time.perf_counter`, which all processes share on Linux), and the first ids of
each prompt that begins in it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from fake_worker import FakeRunner

from aengine.config import EngineConfig
from aengine.ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aengine.workers.loaded import FixedModel, Progress
from aengine.workers.rank import Rank

TAG_TOKENS = 4  # of a prompt, random: they tell it from all others


class Paced:
    """The answer to a step that ends at a given time."""

    def __init__(self, output: ModelRunnerOutput, due: float) -> None:
        self._output, self._due = output, due

    def ready(self) -> bool:
        return time.perf_counter() >= self._due

    def get(self) -> ModelRunnerOutput:
        return self._output


class PacedRunner(FakeRunner):
    def __init__(self) -> None:
        super().__init__()
        self._step_seconds = float(os.environ["PACED_STEP_US"]) * 1e-6
        self._token_seconds = float(os.environ["PACED_TOKEN_US"]) * 1e-6
        self._log = os.open(os.environ["PACED_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._free_at = 0.0

    def execute_model(self, out: SchedulerOutput) -> None:
        super().execute_model(out)
        begins = max(time.perf_counter(), self._free_at)
        self._free_at = begins + self._step_seconds + self._token_seconds * sum(out.num_scheduled_tokens)
        tags = [list(new.token_ids[:TAG_TOKENS]) for new in out.new_requests]
        os.write(self._log, (json.dumps([begins, tags]) + "\n").encode())

    def sample_tokens(self, grammar: GrammarOutput | None) -> Any:
        return Paced(super().sample_tokens(grammar).get(), self._free_at)


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    # Room for all that waits in one step: a request that was not in the next one was kept from it by steps before.
    ready = {"num_blocks": 100_000, "block_size": 16, "max_model_len": 16_384, "max_num_batched_tokens": 262_144}
    return FixedModel(PacedRunner(), ready | {"vocab_size": 49_152, "weight_format": "none", "device": "none"})
