"""A runner that answers at once, for a real worker process; and that does harm when its model's name says so.

A request whose first token is one of these does the thing in its first step.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

from aengine.config import EngineConfig
from aengine.errors import InternalError, ModelLoadError
from aengine.ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, int32
from aengine.workers.loaded import FixedModel, Progress, Runner
from aengine.workers.rank import Rank

RAISE, SEGFAULT, HANG, WRITE_AND_KILL, SLOW = 101, 102, 103, 104, 105
SURROGATE, UNPRINTABLE, CONNECTION, EXIT, CHATTER = 106, 107, 108, 109, 110
LOG, LOG_FROM_A_THREAD, LOG_AND_RAISE, LOG_AND_KILL, FLOOD = 111, 112, 113, 114, 115
NO_MEMORY_ON_RANK_1 = 116
CHATTER_BYTES = 4 * 1024 * 1024
READY = {
    "num_blocks": 20_000,
    "block_size": 16,
    "max_model_len": 4096,
    "max_num_batched_tokens": 8192,
    "vocab_size": 49152,
    "device": "none",
    "dtype": "none",
    "weight_format": "none",
}


class Done:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def get(self) -> ModelRunnerOutput:
        return self._output


class FakeRunner:
    """Keeps rows as a runner does; the id sampled at a position is 260 + position % 997, or, under a bitmask, the first
    byte of its row. No draft is ever accepted."""

    def __init__(self, rank: Rank = Rank()) -> None:
        self._rank = rank
        self._rows: dict[int, list[int]] = {}
        self._step: SchedulerOutput | None = None

    def execute_model(self, out: SchedulerOutput) -> None:
        for row in out.removed:
            del self._rows[row]
        for new in out.new_requests:
            self._rows[new.req_idx] = [len(new.token_ids), new.num_computed_tokens]
            _harm(new.token_ids[0])
            if new.token_ids[0] == NO_MEMORY_ON_RANK_1 and self._rank.index == 1:
                raise InternalError("the device ran out of memory in a step that other ranks compute too")
        self._step = out

    prepares_after = None

    def prepare_more(self) -> None:
        pass

    def sample_tokens(self, grammar: GrammarOutput | None) -> Done:
        out, self._step = self._step, None
        assert out is not None
        ids = []
        drafts = [0] * len(out.req_idx) if out.drafts is None else out.drafts.counts
        for row, scheduled, num_drafts in zip(out.req_idx, out.num_scheduled_tokens, drafts, strict=True):
            state = self._rows[row]
            state[1] += scheduled - num_drafts
            samples = state[1] == state[0]
            ids.append(260 + state[0] % 997 if samples else -1)
            state[0] += samples
        if grammar is not None:
            size = len(grammar.bitmask) // len(grammar.batch_idx)
            for i, batch_idx in reversed(list(enumerate(grammar.batch_idx))):
                ids[batch_idx] = grammar.bitmask[i * size]
        if out.drafts is None:
            return Done(ModelRunnerOutput(out.step_id, int32(ids)))
        counts = int32(int(token_id >= 0) for token_id in ids)
        return Done(ModelRunnerOutput(out.step_id, int32(i for i in ids if i >= 0), counts=counts))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def _harm(token_id: int) -> None:
    if token_id == RAISE:
        raise ZeroDivisionError("a bug in a step")
    if token_id == SEGFAULT:
        ctypes.string_at(0)
    if token_id == HANG:
        time.sleep(3600)
    if token_id == WRITE_AND_KILL:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if token_id == SLOW:
        time.sleep(0.3)  # as long as the step takes
    if token_id == SURROGATE:
        raise FileNotFoundError("weights-\udcff.gguf")
    if token_id == UNPRINTABLE:
        raise Unprintable
    if token_id == CONNECTION:
        raise ConnectionResetError("of the runner's own")
    if token_id == EXIT:
        raise SystemExit(5)
    if token_id == CHATTER:
        os.write(2, b"warning\n" * (CHATTER_BYTES // 8))
    if LOG <= token_id <= FLOOD:
        _log(token_id)


def _log(token_id: int) -> None:
    logger = logging.getLogger("aengine.runner")
    logger.debug("a detail")
    if token_id == LOG:
        logger.warning("it is %s here", "dark")
        try:
            raise ZeroDivisionError("a bug")
        except ZeroDivisionError:
            logger.exception("it went wrong")
        logging.getLogger("torch.fake").warning("of a library")
        logging.getLogger("torch.fake").info("of no interest")
        warnings.warn("do it otherwise", UserWarning, stacklevel=1)
    if token_id == LOG_FROM_A_THREAD:

        def log() -> None:
            time.sleep(0.05)  # the main thread waits for a frame by now
            logger.warning("from a thread")

        threading.Thread(target=log, name="some-thread").start()
    if token_id == LOG_AND_RAISE:
        threading.Thread(target=logger.warning, args=("last words",)).start()
        time.sleep(0.05)  # the record is written before the error, most likely
        raise ZeroDivisionError("a bug in a step")
    if token_id == LOG_AND_KILL:
        logger.warning("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    if token_id == FLOOD:
        for i in range(5000):
            logger.warning("%d %s", i, "x" * 2000)


class AllocatedModel(FixedModel):
    """Tells what it was given."""

    def allocate(self, plan: Mapping[str, int], *args: Any) -> tuple[Runner, dict[str, Any]]:
        runner, facts = super().allocate(plan)
        return runner, facts | {"was_given": dict(plan)}


def load_model(config: EngineConfig, source: dict[str, Any], rank: Rank, progress: Progress) -> FixedModel:
    for done in range(5):
        progress("weights", done * 100, 400, "bytes")
    if source.get("fail") == "load":
        raise ModelLoadError("no such weights: get some")
    if source.get("fail") == "bug":
        raise KeyError("weight")
    if source.get("fail") == "hang":
        progress("profile", 0, 0, "")
        time.sleep(3600)
    if source.get("fail") == "import":
        raise ImportError("Error importing numpy: you should not try to import numpy from its source directory")
    if source.get("fail") == "memory":
        raise MemoryError
    if source.get("fail") == "map":
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
    if source.get("fail") == "files":
        raise OSError(24, "Too many open files")
    if source.get("fail") == "threads":
        raise RuntimeError("can't start new thread")
    if source.get("fail") == "libgomp":
        print("libgomp: Thread creation failed: Resource temporarily unavailable", flush=True)
        os._exit(1)
    if source.get("fail") == "crash":
        ctypes.string_at(0)
    if source.get("fail") == "exit":
        os._exit(7)
    offer = READY | source.get("offers", {}).get(str(rank.index), {})
    facts = {"device_memory_total_bytes": 1000, "tp_rank": rank.tp_rank}
    return AllocatedModel(FakeRunner(rank), offer, facts | {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]})
