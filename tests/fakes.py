"""A worker that answers at once, in this process: the seam under the step loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aengine.errors import EngineClosedError, EngineError
from aengine.ipc.liveness import Liveness
from aengine.ipc.messages import (
    GrammarOutput,
    Kind,
    LogprobColumns,
    ModelRunnerOutput,
    RowError,
    SchedulerOutput,
    float32,
    int32,
    pack,
    unpack,
)


class FakeExecutor:
    """Does what a worker does with rows and counts, and asks ``token(req_idx, position)`` for the ids.

    ``delay``: seconds that a step takes, on the loop's clock.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_model_len: int = 1024,
        max_num_batched_tokens: int = 512,
        vocab_size: int = 49152,
        token: Callable[[int, int], int] = lambda req_idx, position: position,
        delay: float = 0.0,
    ) -> None:
        self.ready = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "vocab_size": vocab_size,
            "device": "none",
            "weight_format": "none",
        }
        self._token, self.delay = token, delay
        self._rows: dict[int, list[int]] = {}  # req_idx: [num_tokens, num_computed]
        self._num_logprobs: dict[int, int] = {}  # req_idx: alternatives that it asked for, if any
        self._on_failure: Callable[[], object] = lambda: None
        self._waiting: list[asyncio.Future[ModelRunnerOutput]] = []
        self.terminated = False
        self._gated: tuple[Any, Any, Any] | None = None
        self.choose: Callable[[list[int]], int] = min
        self._bitmask = bytearray(20 * 4 * ((vocab_size + 31) // 32))
        self.failure: EngineError | None = None
        self._num_beats = 0
        self.is_hung = False  # answers nothing, and its heart stands still
        self.is_full = False  # as a ring without room is
        self.num_tried = 0
        self.num_accepted = 0  # drafts

    async def start(
        self, load: dict[str, Any], on_progress: Callable[..., None], on_failure: Callable[[], object]
    ) -> dict[str, Any]:
        self._on_failure = on_failure
        return self.ready

    async def execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        return self.execute(out)

    def try_execute_model(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput] | None:
        self.num_tried += 1
        return None if self.is_full else self.execute(out)

    def execute(self, out: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        due = self._begin(unpack(Kind.STEP, pack(out)))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
        self._waiting = [f for f in self._waiting if not f.done()] + [future]
        assert self._gated is None, "a step came before the bitmask of the one before"
        if self.failure is not None:
            raise self.failure
        if out.sample_now:
            self.answer_later(future, self.say(out, due, {}))
        else:
            self._gated = (out, future, due)
        return future

    def answer_later(self, future: asyncio.Future[ModelRunnerOutput], answer: ModelRunnerOutput) -> None:
        loop = asyncio.get_running_loop()
        if self.is_hung:
            return
        when = loop.call_later if self.delay else lambda _, *args: loop.call_soon(*args)

        def send() -> None:
            answer.answered_at = time.monotonic()
            if not future.done():
                future.set_result(answer)

        when(self.delay, send)

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """It begins each step at once, so there is none to drop."""
        if self.failure is not None:
            raise self.failure
        if self.is_full:
            return False
        asyncio.get_running_loop().call_soon(on_revoked, 0)
        return True

    def _begin(self, out: SchedulerOutput) -> list[bool]:
        """Which of the batch sample."""
        for req_idx in out.removed:
            del self._rows[req_idx]
        for new in out.new_requests:
            assert new.req_idx not in self._rows
            self._rows[new.req_idx] = [len(new.token_ids), new.num_computed_tokens]
            self._num_logprobs[new.req_idx] = new.logprobs
        drafts = [0] * len(out.req_idx) if out.drafts is None else out.drafts.counts
        due = []
        for req_idx, scheduled, num_drafts in zip(out.req_idx, out.num_scheduled_tokens, drafts, strict=True):
            row = self._rows[req_idx]
            row[1] += scheduled - num_drafts
            assert row[1] <= row[0]
            due.append(row[1] == row[0])
        return due

    def say(self, out: SchedulerOutput, due: list[bool], masks: dict[int, list[list[int]]]) -> ModelRunnerOutput:
        """Each row that is due says tokens up to the first that is not its draft."""
        said: list[list[int]] = []
        errors: list[RowError] = []
        start = 0
        for batch_idx, (req_idx, is_due) in enumerate(zip(out.req_idx, due, strict=True)):
            stop = start + (0 if out.drafts is None else out.drafts.counts[batch_idx])
            drafts = [] if out.drafts is None else list(out.drafts.token_ids[start:stop])
            if out.drafts is not None and out.drafts.is_certain[batch_idx] and batch_idx in masks:
                masks[batch_idx][:0] = [[token_id] for token_id in drafts]
            row, tokens = self._rows[req_idx], []
            while is_due:
                allowed = masks.get(batch_idx)
                if allowed is not None and not allowed[len(tokens)]:  # as the sampler says it
                    errors.append(RowError(batch_idx, "InvalidRequestError", "no token is left to sample"))
                    tokens, row[0] = [], row[0] + 1
                    break
                token = self._token(req_idx, row[0]) if allowed is None else self.choose(allowed[len(tokens)])
                tokens.append(token)
                row[0] += 1
                if tokens != drafts[: len(tokens)]:
                    break
                row[1] += 1
            said.append(tokens)
            start = stop
        if out.drafts is None:
            answer = ModelRunnerOutput(out.step_id, int32(tokens[0] if tokens else -1 for tokens in said))
        else:
            ids = int32(token for tokens in said for token in tokens)
            answer = ModelRunnerOutput(out.step_id, ids, counts=int32(map(len, said)))
            self.num_accepted += len(ids) - sum(map(bool, said))
        answer.logprobs, answer.errors = self._logprobs(out, said), errors
        return unpack(Kind.OUTPUT, pack(answer))

    def _logprobs(self, out: SchedulerOutput, said: list[list[int]]) -> LogprobColumns | None:
        """Of whatever was sampled -0.5, of its alternatives, the ids from 0 on, -1, -2, ..."""
        asked, counts = [], []
        place = 0
        for req_idx, tokens in zip(out.req_idx, said, strict=True):
            if self._num_logprobs[req_idx] >= 0:
                asked += range(place, place + len(tokens))
                counts += [self._num_logprobs[req_idx]] * len(tokens)
            place += len(tokens) if out.drafts is not None else 1
        if not asked:
            return None
        return LogprobColumns(
            int32(asked),
            float32([-0.5] * len(asked)),
            int32(counts),
            int32(k for count in counts for k in range(count)),
            float32(-1.0 - k for count in counts for k in range(count)),
        )

    def bitmask(self, num_bytes: int) -> memoryview | None:
        """For 20 rows at most."""
        if self.failure is not None:
            raise self.failure
        fits = num_bytes <= len(self._bitmask)
        return memoryview(self._bitmask)[:num_bytes] if fits else None

    async def send_grammar(self, out: GrammarOutput) -> None:
        """Each masked row takes ``choose`` of the ids that it may."""
        if self.failure is not None:
            raise self.failure
        assert self._gated is not None, "a bitmask that no step waits for"
        (step, future, due), self._gated = self._gated, None
        assert out.step_id == step.step_id
        words = (self.ready["vocab_size"] + 31) // 32
        bitmask = self._bitmask[: out.bitmask] if isinstance(out.bitmask, int) else out.bitmask
        assert len(bitmask) == 4 * words * len(out.batch_idx)
        masks: dict[int, list[list[int]]] = {}
        for row, batch_idx in enumerate(out.batch_idx):
            bits = np.frombuffer(bitmask, np.uint8, count=4 * words, offset=4 * words * row)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self.ready["vocab_size"]])
            masks.setdefault(batch_idx, []).append(allowed.tolist())
        self.answer_later(future, self.say(step, due, masks))

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        return [method]

    async def call_all(self, method: str, args: Sequence[Any], *, timeout: float) -> list[Any]:
        return [[method, *args]]

    def liveness(self) -> Liveness:
        self._num_beats += not self.is_hung
        return Liveness(self._num_beats)

    def memory(self) -> tuple[int | None, int | None]:
        return None, None

    def fail(self, error: EngineError) -> None:
        """What a worker's death does."""
        if self.failure is not None:
            return
        self.failure = error
        self._fail_waiting()
        self._on_failure()

    def _fail_waiting(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_exception(self.failure)
                future.exception()

    async def aclose(self, timeout: float) -> None:
        self.terminate()

    def terminate(self) -> None:
        """From any thread. Whoever waits for an answer is told."""
        self.terminated = True
        if self.failure is None:
            self.failure = EngineClosedError("the engine is closed")
            with contextlib.suppress(RuntimeError):  # the loop was closed
                for loop in {future.get_loop() for future in self._waiting}:
                    loop.call_soon_threadsafe(self._fail_waiting)
