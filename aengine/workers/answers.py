"""Pending answers of the workers: to steps, to calls, and the number of steps that a REVOKE took back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..errors import EngineError, InternalError, ModelLoadError
from ..ipc.messages import Kind, MessageError, ModelRunnerOutput

__all__ = ["AnswerFuture", "PendingAnswers", "reported_error"]

AnswerFuture = asyncio.Future[ModelRunnerOutput | None]
"""The answer to a step; None: it was revoked."""


class PendingAnswers:
    """Futures on one loop, each of which ends in exactly one of answer, error and cancelled."""

    KINDS = (Kind.OUTPUT, Kind.REPLY, Kind.REVOKED)

    def __init__(self) -> None:
        self.steps: dict[int, AnswerFuture] = {}  # by step id, in the order of the steps
        self.replies: dict[int, asyncio.Future[Any]] = {}  # by call id
        self.on_revoked: Callable[[int], None] | None = None
        """Gets the number of steps that were taken back, before their futures are resolved; None: no REVOKE was
        sent."""
        self._next_call = 1
        self._has_failed = False

    def expect_answer(self, step_id: int) -> AnswerFuture:
        """The future of a step that is about to be published."""
        future: AnswerFuture = asyncio.get_running_loop().create_future()
        self.steps[step_id] = future
        return future

    def expect_reply(self) -> tuple[int, asyncio.Future[Any]]:
        """A call's id, and its future; `replies` forgets it when the caller does."""
        call_id = self._next_call
        self._next_call += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.replies[call_id] = future
        return call_id, future

    def take(self, rank: int, kind: Kind, step_id: int, message: Any) -> None:
        """A frame of a worker. Raises MessageError for an answer to what was not asked."""
        if kind is Kind.OUTPUT:
            self._answer(step_id, message)
        elif kind is Kind.REVOKED:
            self._take_back(message)
        else:
            _settle(self.replies.get(step_id), rank, message)

    def _answer(self, step_id: int, message: ModelRunnerOutput) -> None:
        if message.step_id != step_id or (step_id not in self.steps and not self._has_failed):
            raise MessageError(f"an answer to step {step_id}, which was not asked")
        future = self.steps.pop(step_id, None)  # not before the check: its failure has to reach the waiter
        if future is not None and not future.done():
            future.set_result(message)

    def _take_back(self, num_steps: int) -> None:
        on_revoked, self.on_revoked = self.on_revoked, None
        if on_revoked is None or num_steps > len(self.steps):
            raise MessageError(f"{num_steps} steps were dropped unasked")
        futures = [self.steps.popitem()[1] for _ in range(num_steps)]
        on_revoked(num_steps)
        for future in futures:
            if not future.done():
                future.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Fail everything that waits with ``error``. Idempotent."""
        self._has_failed = True
        waiters: list[asyncio.Future[Any]] = [*self.steps.values(), *self.replies.values()]
        self.steps.clear()
        for future in waiters:
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: without a waiter asyncio would warn


def _settle(reply: asyncio.Future[Any] | None, rank: int, message: dict[str, Any]) -> None:
    if reply is None or reply.done():  # its caller did not wait so long
        return
    if "error" in message:
        reply.set_exception(reported_error(rank, message["error"]))
    else:
        reply.set_result(message["value"])


def reported_error(rank: int, message: dict[str, Any]) -> EngineError:
    """The error of an ERROR frame: a ModelLoadError as such, any other as an InternalError."""
    kind, text, trace = str(message["type"]), str(message["message"]), str(message["traceback"])
    error: EngineError
    if kind == "ModelLoadError":
        error = ModelLoadError(text)
    else:
        shown = text if kind == "InternalError" else f"{kind}: {text}"
        error = InternalError(f"worker {rank}: {shown}", worker_traceback=trace)
    if trace:
        error.add_note(f"in worker {rank}:\n{trace}")
    return error
