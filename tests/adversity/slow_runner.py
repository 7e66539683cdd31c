"""Runners without a model: one takes its time to load and to step, and can get stuck; one does as grammars say; one
writes where it should not."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from typing import Any

from fake_runner import READY, Done, FakeRunner

from aengine.config import EngineConfig
from aengine.ipc.channel import WorkerChannel
from aengine.ipc.layout import CONTROL_BYTES, HEAD
from aengine.ipc.messages import GrammarOutput, SchedulerOutput
from aengine.workers.loaded import FixedModel, Progress
from aengine.workers.rank import Rank

SLEEP, HOLD_GIL, SCRIBBLE = 201, 202, 203  # what a request whose prompt begins so does to its worker
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


class ObedientRunner(FakeRunner):
    """Under a bitmask it takes the first id that is allowed."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> Done:
        done = super().sample_tokens(None)
        if grammar is not None and len(grammar.batch_idx):
            assert not isinstance(grammar.bitmask, int)
            size = len(grammar.bitmask) // len(grammar.batch_idx)
            for i, batch_idx in enumerate(grammar.batch_idx):
                bits = int.from_bytes(grammar.bitmask[i * size : (i + 1) * size], "little")
                done.get().token_ids[batch_idx] = (bits & -bits).bit_length() - 1
        return done


def load_obedient_model(*args: Any) -> FixedModel:
    return FixedModel(ObedientRunner(), READY)


class ScribblingRunner(FakeRunner):
    """Overwrites the ring to the host; the prompt's second token is the seed."""

    def execute_model(self, out: SchedulerOutput) -> None:
        super().execute_model(out)
        for new in out.new_requests:
            if new.token_ids[0] == SCRIBBLE:
                rng = random.Random(new.token_ids[1])
                gc.unfreeze()  # a worker exempts what it loaded with, which is then not listed
                (channel,) = (thing for thing in gc.get_objects() if isinstance(thing, WorkerChannel))
                with channel._segment.ring(1) as region:
                    region[CONTROL_BYTES:] = rng.randbytes(len(region) - CONTROL_BYTES)
                    with region[:CONTROL_BYTES].cast("Q") as words:
                        words[HEAD] = rng.choice([words[HEAD] + 64, rng.getrandbits(64), rng.randrange(0, 4096, 32)])
                channel._loop_bell.ring()
                time.sleep(3600)


def load_scribbling_model(*args: Any) -> FixedModel:
    return FixedModel(ScribblingRunner(), READY)


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    for done in range(10):
        progress("weights", done, 10, "bytes")
        time.sleep(LOAD_SECONDS / 10)
    return FixedModel(SlowRunner(), READY)
