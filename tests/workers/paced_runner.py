"""A runner as on a GPU, for a real worker process: steps are launched at once, and each is answered ``STEP_SECONDS``
after the one before. The id sampled is a mix of the row's first token and the position, so that tokens tell whose
they are; a row is told of its blocks as a real one is, and a position without a block is an error."""

from __future__ import annotations

import time
from typing import Any

from fake_runner import READY

from aengine.config import EngineConfig
from aengine.ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, int32
from aengine.workers.loaded import FixedModel, Progress
from aengine.workers.rank import Rank

STEP_SECONDS = 0.004
BLOCK_SIZE = 4
MAX_LAUNCHED = 2
STEP_SIZES = [16, 64]  # to which it would pad steps with prompts


def sampled(first_token: int, position: int) -> int:
    return 300 + (31 * first_token + 7 * position) % 40_000


class Later:
    def __init__(self, output: ModelRunnerOutput, at: float, launched: list[Later]) -> None:
        self._output, self._at, self._launched = output, at, launched
        launched.append(self)
        assert len(launched) <= MAX_LAUNCHED, "more steps on the device than may be"

    def ready(self) -> bool:
        return time.monotonic() >= self._at

    def get(self) -> ModelRunnerOutput:
        self._launched.remove(self)
        return self._output


class PacedRunner:
    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}  # row: [first token, num_tokens, num_computed, num_blocks]
        self._done_at = 0.0
        self._launched: list[Later] = []

    prepares_after = None

    def prepare_more(self) -> None:
        pass

    def execute_model(self, out: SchedulerOutput) -> None:
        for row in out.removed:
            del self._rows[row]
        for new in out.new_requests:
            assert new.req_idx not in self._rows
            self._rows[new.req_idx] = [
                new.token_ids[0],
                len(new.token_ids),
                new.num_computed_tokens,
                len(new.block_ids),
            ]
        for row in out.block_rows:
            self._rows[row][3] += 1
        self._step = out

    def sample_tokens(self, grammar: GrammarOutput | None) -> Later:
        ids = int32()
        for row, scheduled in zip(self._step.req_idx, self._step.num_scheduled_tokens, strict=True):
            state = self._rows[row]
            state[2] += scheduled
            assert state[2] <= state[1], "computes tokens that it does not know"
            assert state[2] <= BLOCK_SIZE * state[3], "computes a position that has no block"
            samples = state[2] == state[1]
            ids.append(sampled(state[0], state[1]) if samples else -1)
            state[1] += samples
        self._done_at = max(self._done_at, time.monotonic()) + STEP_SECONDS
        return Later(ModelRunnerOutput(self._step.step_id, ids), self._done_at, self._launched)


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    offer = READY | {"block_size": BLOCK_SIZE, "num_blocks": 4000}
    return FixedModel(PacedRunner(), offer, {"prompt_step_sizes": STEP_SIZES})
