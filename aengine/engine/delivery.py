"""`Delivery`: from an answer's tokens to the sinks of the requests that they belong to, in turns of the host's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from ..errors import EngineError, InternalError, InvalidRequestError, RequestError
from ..ipc.messages import UNSAMPLED, LogprobColumns, RowError
from ..outputs import FinishReason
from .scheduler.request import Request
from .scheduler.scheduler import Scheduler
from .streams.logprobs import TokenLogprobs
from .structured.bitmasks import Filling

Sampled = list[tuple[Request, int, int]]
"""The tokens of an answer: the request, the id, and the place in the answer of each."""
Logprobs = dict[int, TokenLogprobs]
"""Log-probabilities by the place of a token."""

_TURN = 32
"""Tokens delivered before the host's loop gets a turn: some 100 us of work, their consumers' included."""
_TURN_BESIDE_FILL = 8
"""Tokens likewise while rows of bitmasks are filled, which may end sooner than expected."""


class Delivery:
    """Delivers the tokens of one step loop's answers to their sinks. A completion that a stop string ends is taken out
    of the scheduler before its sink ends."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def deliver_beside(
        self,
        filling: Filling,
        going_on: Coroutine[Any, Any, EngineError | None],
        sampled: Sampled,
        logprobs: Logprobs,
    ) -> EngineError | None:
        """Deliver as many tokens as there is time for while rows are filled, and the others when the worker has all it
        needs: ``going_on`` gives it that, and returns an error, if any, which is returned here.

        Both threads need the GIL: the one that fills would wait for all that the loop does meanwhile.
        """
        task = asyncio.get_running_loop().create_task(going_on, name="aengine-masks")
        # retrieving its error keeps asyncio from logging it
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            until = await filling.free_until
            start = 0
            while start < len(sampled) and time.perf_counter() < until:
                self._deliver(sampled[start : start + _TURN_BESIDE_FILL], logprobs)
                start += _TURN_BESIDE_FILL
                await asyncio.sleep(0)
            failure = await task
            await self.deliver_all(sampled[start:], logprobs)
            return failure
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def deliver_all(self, sampled: Sampled, logprobs: Logprobs) -> None:
        """Deliver these tokens, giving the host's loop a turn after every few."""
        self._deliver(sampled[:_TURN], logprobs)
        for start in range(_TURN, len(sampled), _TURN):
            await asyncio.sleep(0)
            self._deliver(sampled[start : start + _TURN], logprobs)

    def _deliver(self, sampled: Sampled, logprobs: Logprobs) -> None:
        for request, token_id, place in sampled:
            sink, reason = request.sink, request.finish_reason
            if sink.finish_reason is not None:  # the request has ended since, while this coroutine let other tasks run
                continue
            if reason is not None and len(sink.token_ids) + 1 < request.num_output_tokens:
                reason = None  # others of this answer follow
            if sink.put(token_id, reason, logprobs.get(place) if logprobs else None):
                reason = FinishReason.STOP
                self._scheduler.finish(request, reason)
                sink.end(reason)
            if reason is not None:
                request.end()


def logprobs_by_token(columns: LogprobColumns) -> Logprobs:
    """Divide the columns of an answer, for `Delivery`."""
    rows: Logprobs = {}
    start = 0
    for place, sampled, count in zip(columns.token_idx, columns.sampled, columns.counts, strict=True):
        stop = start + count
        rows[place] = sampled, columns.token_ids[start:stop], columns.values[start:stop]
        start = stop
    return rows


def request_error(error: RowError, processors: Iterable[str]) -> RequestError | EngineError:
    """Return the error that the caller of a request gets when the request failed by itself on the worker.
    ``processors``: the logits processors that it asks for."""
    message, names = error.message, ", ".join(processors)
    is_unsampled = message.startswith(UNSAMPLED)
    if is_unsampled and names:
        message += f"; its logits processors may have done it: {names}"
    if error.type != "InvalidRequestError":
        return InternalError(message)
    return InvalidRequestError(message, param="extra_args" if names and not is_unsampled else None)
