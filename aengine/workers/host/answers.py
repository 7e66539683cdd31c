"""Pending answers of the workers: to steps, to calls, and the number of steps that a REVOKE took back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import (
    AEngineError,
    EngineError,
    InternalError,
    InvalidRequestError,
    ModelLoadError,
    NotEnoughMemoryError,
    WorkerCallError,
)
from ...ipc.messages import Kind, MessageError, ModelRunnerOutput

AnswerFuture = asyncio.Future[ModelRunnerOutput | None]
"""The answer to a step; None: it was revoked."""


_OF_LOADING = {kind.__name__: kind for kind in (ModelLoadError, NotEnoughMemoryError)}


class NoSuchMethodError(AEngineError):
    """A worker extension does not have the method that was called; raised in the worker."""


class PendingCall:
    """A collective call that waits for the replies of ``ranks``. ``replies`` ends with their values, by rank;
    with an error as soon as one rank reports it."""

    def __init__(self, call_id: int, ranks: range, method: str) -> None:
        """``method``: of the worker extension; "": one of our own, whose errors are ours too."""
        self.id = call_id
        self.replies: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._values: dict[int, Any] = {}
        self._ranks = ranks
        self._method = method

    def take(self, rank: int, message: dict[str, Any]) -> None:
        """Note a rank's REPLY to the call; with the last one the caller gets the results."""
        if self.replies.done():
            return
        if "error" in message:
            error = message["error"]
            self.replies.set_exception(self._error(rank, error) if self._method else reported_error(rank, error))
            return
        self._values[rank] = message["value"]
        if len(self._values) == len(self._ranks):
            self.replies.set_result([self._values[rank] for rank in sorted(self._values)])

    def _error(self, rank: int, message: dict[str, Any]) -> AEngineError:
        kind, text, trace = str(message["type"]), str(message["message"]), str(message["traceback"])
        if kind == NoSuchMethodError.__name__:
            return InvalidRequestError(text, param="method")
        error = WorkerCallError(f"{self._method} failed on rank {rank}: {text}", rank=rank, worker_traceback=trace)
        if trace:
            error.add_note(f"in worker {rank}:\n{trace}")
        return error

    def took_too_long(self, timeout: float) -> WorkerCallError:
        """Return the error that names the ranks that have not replied within ``timeout`` seconds."""
        late = [rank for rank in self._ranks if rank not in self._values]
        ranks = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
        return WorkerCallError(
            f"{self._method} has not returned on {ranks} within timeout={timeout:g} s; requests go on when it does, "
            f"and if they wait for too long (hang_timeout) the workers are started again",
            rank=late[0],
        )


class PendingAnswers:
    """Futures on one loop, each of which ends in exactly one of answer, error and cancelled."""

    KINDS = (Kind.OUTPUT, Kind.REPLY, Kind.REVOKED)

    def __init__(self) -> None:
        self.steps: dict[int, AnswerFuture] = {}  # futures of the steps in flight, by step id, oldest first
        self.calls: dict[int, PendingCall] = {}  # collective calls under way, by id
        self.on_revoked: Callable[[Sequence[int]], None] | None = None
        """Gets the ids of the steps that were taken back, before their futures are resolved; None: no REVOKE was
        sent."""
        self.on_answer: Callable[[], None] = lambda: None
        """Called with each answer to a step, before its future's waiter goes on."""
        self._next_call = 1
        self._has_failed = False

    def expect_answer(self, step_id: int) -> AnswerFuture:
        """Return the future for the answer to a step that is about to be published."""
        future: AnswerFuture = asyncio.get_running_loop().create_future()
        self.steps[step_id] = future
        return future

    def expect_replies(self, ranks: range, method: str = "") -> PendingCall:
        """Make a call that is about to be published, see `PendingCall`; the caller takes it out of `calls`."""
        call = self.calls[self._next_call] = PendingCall(self._next_call, ranks, method)
        self._next_call += 1
        return call

    def take(self, rank: int, kind: Kind, step_id: int, message: Any) -> None:
        """Handle a frame of a worker. Raises MessageError for an answer to what was not asked."""
        if kind is Kind.OUTPUT:
            self._answer(step_id, message)
        elif kind is Kind.REVOKED:
            self._take_back(message)
        elif step_id in self.calls:  # the caller has not given up by timeout
            self.calls[step_id].take(rank, message)

    def _answer(self, step_id: int, message: ModelRunnerOutput) -> None:
        if message.step_id != step_id or (step_id not in self.steps and not self._has_failed):
            raise MessageError(f"an answer to step {step_id}, which was not asked")
        future = self.steps.pop(step_id, None)  # removed after the check: if that fails, the waiter must get the error
        if future is not None and not future.done():
            future.set_result(message)
            self.on_answer()

    def _take_back(self, num_steps: int) -> None:
        on_revoked, self.on_revoked = self.on_revoked, None
        if self._has_failed:  # the waiters have got the error already
            return
        if on_revoked is None or num_steps > len(self.steps):
            raise MessageError(f"{num_steps} steps were dropped unasked")
        revoked = list(self.steps)[len(self.steps) - num_steps :]
        on_revoked(revoked)
        for step_id in revoked:
            future = self.steps.pop(step_id)
            if not future.done():
                future.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Fail everything that waits with ``error``. Idempotent."""
        self._has_failed = True
        waiters: list[asyncio.Future[Any]] = [*self.steps.values(), *(call.replies for call in self.calls.values())]
        self.steps.clear()
        for future in waiters:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
                future.exception()  # retrieved here: asyncio would warn about it if nobody waits


def reported_error(rank: int, message: dict[str, Any]) -> EngineError:
    """Return the error of an ERROR frame: one of loading as such, any other as an InternalError."""
    kind, text, trace = str(message["type"]), str(message["message"]), str(message["traceback"])
    error: EngineError
    if kind in _OF_LOADING:
        error = _OF_LOADING[kind](text)
    else:
        shown = text if kind == "InternalError" else f"{kind}: {text}"
        error = InternalError(f"worker {rank}: {shown}", worker_traceback=trace)
    if trace:
        error.add_note(f"in worker {rank}:\n{trace}")
    return error
