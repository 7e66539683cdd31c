"""`ScriptedExecutor`: a worker whose tokens come from the script, in the host's own process and on its loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

from ..config import EngineConfig
from ..errors import EngineClosedError, EngineError, InvalidRequestError, WorkerDiedError
from ..ipc.liveness import Liveness
from ..ipc.messages import (
    GrammarOutput,
    LogprobColumns,
    ModelRunnerOutput,
    NewRequest,
    ResultColumns,
    RowError,
    SchedulerOutput,
    float32,
    int32,
    int32_of,
)
from .script import Line, Script
from .vocabulary import END_OF_TURN, tokenizer

SCRIPT_ERROR = "ScriptError"
"""The type of a row's error: what its line has, or that the grammar forbids its text."""
_BLOCK_SIZE = 16
_NUM_BLOCKS = 8192
_MAX_MODEL_LEN = 32_768
_UNLIKELY = -20.0
_LETTERS = b"abcdfghijklmnopqrstuvwxyz"  # an e would lengthen a number
_PREFERRED = [END_OF_TURN, *b'"', *_LETTERS, *b"}],", *b"0123456789", *range(32, 127), *range(256)]
"""Tokens for a row that has nothing to say, those first that bring what its grammar allows to an end soon."""

_NO_LINE = Line(None, "")  # line of a request that gets a vector
VECTOR_SIZE = 16
"""Elements of an embedding."""

Future = asyncio.Future[ModelRunnerOutput | None]


@dataclass(slots=True)
class Row:
    """A request that the fake worker computes, and how far it is in its script."""

    line: Line
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_logprobs: int  # -1: none
    has_left_line: bool = False  # a grammar did not allow the line's text

    @property
    def place(self) -> int:
        """Index of the next token in the completion."""
        return self.num_tokens - self.num_prompt_tokens

    def next_tokens(self, drafts: Sequence[int], masks: list[bytes] | None) -> list[int]:
        """Return the tokens up to the first that is not its draft; none if the row fails, or ends the worker next."""
        said: list[int] = []
        while True:
            token_id = self._next_token(None if masks is None else masks[len(said)])
            self.num_tokens += 1
            if token_id is None:
                return []
            said.append(token_id)
            if said != list(drafts[: len(said)]) or self.line.kills_at(self.place) or self.line.fails_at(self.place):
                self.num_computed_tokens += len(said) - 1
                return said

    def _next_token(self, mask: bytes | None) -> int | None:
        """Return the next token; None if the row fails."""
        if self.line.fails_at(self.place):
            return None
        token_id = self.line.token(self.place)
        if mask is None or (not self.has_left_line and _allows(mask, token_id)):
            return token_id
        if not self.line.is_free:
            return None
        self.has_left_line = True
        return next((token_id for token_id in _PREFERRED if _allows(mask, token_id)), END_OF_TURN)


class ScriptedExecutor:
    """See `Executor`. A step takes ``token_delay`` seconds, one after the other."""

    def __init__(self, config: EngineConfig, script: Script, *, token_delay: float, reasoning: bool) -> None:
        self.script = script
        self.reasoning = reasoning
        self._config = config
        self._token_delay = token_delay
        self._rows: dict[int, Row] = {}
        self._results: dict[int, array[float]] = {}  # the vectors or log-probabilities of those that get some, by row
        self._exempt: set[int] = set()  # rows that get no tokens
        self._waiting: list[Future] = []
        self._gated: tuple[SchedulerOutput, Future, list[int]] | None = None  # a step that waits for its bitmask
        self._busy_until = 0.0
        self.failure: EngineError | None = None
        self._on_failure: Callable[[], object] = lambda: None  # the `on_failure` that was given to `start`
        self._num_beats = 0

    async def start(
        self, load: dict[str, Any], on_progress: Callable[..., None], on_failure: Callable[[], object]
    ) -> dict[str, Any]:
        self._on_failure = on_failure
        return {
            "num_blocks": _NUM_BLOCKS,
            "block_size": _BLOCK_SIZE,
            "max_model_len": self._config.max_model_len or _MAX_MODEL_LEN,
            "max_num_batched_tokens": self._config.max_num_batched_tokens or 8192,
            "vocab_size": tokenizer(self.reasoning).vocab_size,
            "device": "none",
            "weight_format": "none",
            "takes_weights": True,
            "tasks": ["generate", "embed"],
            "embedding_size": VECTOR_SIZE,
            "pooling": "last",
        }

    # -- steps

    async def execute_model(self, out: SchedulerOutput) -> Future:
        return self.try_execute_model(out)

    def try_execute_model(self, out: SchedulerOutput) -> Future:
        self._check()
        rows = self._advance(out)
        loop = asyncio.get_running_loop()
        future: Future = loop.create_future()
        self._waiting = [other for other in self._waiting if not other.done()] + [future]
        if out.sample_now:
            self._answer(out, future, rows, {})
        else:
            self._gated = out, future, rows
        return future

    def _advance(self, out: SchedulerOutput) -> list[int]:
        """Count the step's tokens as computed. Returns the batch positions that sample."""
        for req_idx in out.removed:
            del self._rows[req_idx]
        for new in out.new_requests:
            self._results.pop(new.req_idx, None)
            self._exempt.discard(new.req_idx)
            self._rows[new.req_idx] = self._new_row(new)
        drafts = out.drafts.counts if out.drafts is not None else [0] * len(out.req_idx)
        sampling = []
        for batch_idx, (req_idx, num_scheduled) in enumerate(zip(out.req_idx, out.num_scheduled_tokens, strict=True)):
            row = self._rows[req_idx]
            row.num_computed_tokens += num_scheduled - drafts[batch_idx]  # drafts count once they are accepted
            if row.num_computed_tokens == row.num_tokens:
                sampling.append(batch_idx)
        return sampling

    def _new_row(self, new: NewRequest) -> Row:
        row, is_exempt = new.req_idx, "pooling" in new.extras
        if is_exempt:
            self._results[row] = _vector_of(new.token_ids)
        elif "prompt_logprobs" in new.extras:
            num_asked, has_no_tokens = int32_of(new.extras["prompt_logprobs"], 1)[0]
            is_exempt = bool(has_no_tokens)
            self._results[row] = _prompt_logprobs(new, num_asked)
        if is_exempt:
            self._exempt.add(row)
        line = _NO_LINE if is_exempt else self.script.lines[new.seed]
        return Row(line, new.num_prompt_tokens, len(new.token_ids), new.num_computed_tokens, new.logprobs)

    def bitmask(self, num_bytes: int) -> None:
        return None

    async def send_grammar(self, out: GrammarOutput) -> None:
        self._check()
        assert self._gated is not None and not isinstance(out.bitmask, int)
        (step, future, sampling), self._gated = self._gated, None
        size = len(out.bitmask) // max(1, len(out.batch_idx))
        masks: dict[int, list[bytes]] = {}
        for n, i in enumerate(out.batch_idx):
            masks.setdefault(i, []).append(bytes(out.bitmask[n * size : (n + 1) * size]))
        self._answer(step, future, sampling, masks)

    def _answer(self, out: SchedulerOutput, future: Future, sampling: list[int], masks: dict[int, list[bytes]]) -> None:
        tokens: list[list[int]] = [[] for _ in out.req_idx]
        errors, results = [], ResultColumns(int32(), int32(), float32())
        for batch_idx, drafts in enumerate(_drafts(out)):
            if batch_idx not in sampling:
                continue
            req_idx = out.req_idx[batch_idx]
            row, result = self._rows[req_idx], self._results.pop(req_idx, None)
            if result is not None:
                results.batch_idx.append(batch_idx)
                results.sizes.append(len(result))
                results.values.extend(result)
            if req_idx in self._exempt:
                continue
            if row.line.kills_at(row.place):
                self.fail(WorkerDiedError("the worker died, as the script says"))
                return
            if batch_idx in masks and out.drafts is not None and out.drafts.is_certain[batch_idx]:
                size = len(masks[batch_idx][0])
                masks[batch_idx] = [(1 << draft).to_bytes(size, "little") for draft in drafts] + masks[batch_idx]
            tokens[batch_idx] = said = row.next_tokens(drafts, masks.get(batch_idx))
            if not said:
                errors.append(RowError(batch_idx, SCRIPT_ERROR, SCRIPT_ERROR))
        if out.drafts is None:
            answer = ModelRunnerOutput(out.step_id, int32(said[0] if said else -1 for said in tokens), errors=errors)
        else:
            column = int32(token_id for said in tokens for token_id in said)
            answer = ModelRunnerOutput(out.step_id, column, errors=errors, counts=int32(map(len, tokens)))
        answer.logprobs = _logprobs(out, tokens, self._rows)
        if results.batch_idx:
            answer.results = results
        loop = asyncio.get_running_loop()
        self._busy_until = max(self._busy_until, loop.time()) + self._token_delay
        if self._token_delay:
            loop.call_at(self._busy_until, _settle, future, answer)
        else:
            loop.call_soon(_settle, future, answer)

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """Drop nothing: each step is begun at once."""
        self._check()
        asyncio.get_running_loop().call_soon(on_revoked, 0)
        return True

    # -- the rest

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        self._check()
        if method.endswith("_weights"):  # it has none, and takes all that come
            return [{"sums": [], "num_put": 0}]
        return [{"refused": "a fake engine has no worker to profile"} if "profile" in method else None]

    async def call_all(self, method: str, args: Sequence[Any], *, timeout: float) -> list[Any]:
        self._check()
        raise InvalidRequestError("a fake engine has no worker whose methods could be called", param="method")

    def liveness(self) -> Liveness:
        self._num_beats += 1
        return Liveness(self._num_beats)

    def memory(self) -> tuple[None, None]:
        return None, None

    def fail(self, error: EngineError) -> None:
        if self.failure is None:
            self.failure = error
            self._fail_waiting()
            self._on_failure()

    async def aclose(self, timeout: float) -> None:
        self.terminate()

    def terminate(self) -> None:
        """Kill the worker, from any thread."""
        if self.failure is None:
            self.failure = EngineClosedError("the engine is closed")
            with contextlib.suppress(RuntimeError):  # the loop was closed
                for loop in {future.get_loop() for future in self._waiting}:
                    loop.call_soon_threadsafe(self._fail_waiting)

    def _fail_waiting(self) -> None:
        assert self.failure is not None
        for future in self._waiting:
            if not future.done():
                future.set_exception(self.failure)
                future.exception()  # retrieved: it may have no waiter

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


def _vector_of(token_ids: array[int]) -> array[float]:
    """Return numbers from -1 to 1 that depend on the tokens alone."""
    digest = blake2b(token_ids.tobytes(), digest_size=VECTOR_SIZE).digest()
    return float32(byte / 127.5 - 1 for byte in digest)


def _prompt_logprobs(new: NewRequest, num_asked: int) -> array[float]:
    """Return the prompt's log-probabilities, see `runner/results/prompt_logprobs.py`: 0 for each of its tokens."""
    own = range(min(new.results_from, new.num_prompt_tokens) + 1, new.num_prompt_tokens)
    numbers, likely = int32([own.start, len(own), num_asked]), [0.0, *[_UNLIKELY] * num_asked]
    for token_id in new.token_ids[own.start : own.stop]:
        others = [other for other in range(num_asked + 1) if other != token_id]
        numbers.extend([token_id, 0, *[token_id, *others][:num_asked]])
        numbers.frombytes(float32(likely[:num_asked]).tobytes())
    return array("f", numbers.tobytes())


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _settle(future: Future, answer: ModelRunnerOutput) -> None:
    answer.answered_at = time.monotonic()
    if not future.done():
        future.set_result(answer)


def _drafts(out: SchedulerOutput) -> list[array[int]]:
    """Return the drafts of each request of the batch, but for those that the worker finds: it finds none."""
    if out.drafts is None:
        return [int32()] * len(out.req_idx)
    ends = [0, *accumulate(out.drafts.num_known())]
    return [out.drafts.token_ids[begin:end] for begin, end in pairwise(ends)]


def _logprobs(out: SchedulerOutput, tokens: list[list[int]], rows: dict[int, Row]) -> LogprobColumns | None:
    """Make log-probabilities: 0 for the scripted token; the alternatives are the ids that come first."""
    asked, sampled, counts, likeliest, values = int32(), float32(), int32(), int32(), float32()
    place = 0
    for req_idx, said in zip(out.req_idx, tokens, strict=True):
        count = rows[req_idx].num_logprobs
        for i, token_id in enumerate(said if count >= 0 else []):
            others = [other for other in range(count + 1) if other != token_id]
            asked.append(place + i)
            sampled.append(0.0)
            counts.append(count)
            likeliest.extend([token_id, *others][:count])
            values.extend([0.0, *[_UNLIKELY] * count][:count])
        place += len(said) if out.drafts is not None else 1
    return LogprobColumns(asked, sampled, counts, likeliest, values) if asked else None
