"""`RequestListener`: what users and exporters hear of each request; and the engine's side, which tells them.

    stream(), chat() ── context ──> Admission ──> Observer ──> RequestReports (of one request) ──> RequestListener
                                    StepLoop  ──>

A listener hears of the requests that are accepted from then on, and of each of these until its end, also when it was
removed meanwhile: whoever has begun a trace can end it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..errors import InvalidRequestError
from ..limits.values import shown

if TYPE_CHECKING:
    from ..outputs import RequestEnd, Timings
    from ..params import SamplingParams

logger = logging.getLogger("aengine.requests")


Kind = Literal["completion", "chat", "embedding"]
"""Kind of a request: "chat": its prompt is messages; "embedding": it gets a vector, or scores, in place of text."""


@dataclass(frozen=True, slots=True)
class RequestStart:
    """One request that the engine has accepted, as a `RequestListener` gets it."""

    request_id: str
    kind: Kind
    params: SamplingParams  # parameters with the checkpoint's defaults applied
    priority: int
    arrived_at: float  # time of the call, in seconds since 1970
    context: Context = field(repr=False)
    """The context variables of the code that called, as they were: ``context.run(variable.get)``."""


class RequestListener:
    """Base of what `AsyncLLM.add_listener` takes: override what is to be heard. Each is called once a request, on the
    engine's loop, which it must not hold up; what it raises is logged."""

    def on_accepted(self, request: RequestStart) -> None:
        """Called before the request is prepared: its prompt is not encoded yet."""

    def on_first_token(self, request: RequestStart, timings: Timings) -> None:
        """Called when its first token, of n completions that of any, has come: with ``queued``, ``prefill`` and
        ``first_token``. Not of a request that has none."""

    def on_end(self, request: RequestStart, end: RequestEnd) -> None:
        """Called when it has ended, in whatever way: also by an abort, an error, or the engine's end."""


class RequestReports:
    """Reports on one request to those who listened when it was accepted."""

    __slots__ = ("_listeners", "_request")

    def __init__(self, request: RequestStart, listeners: tuple[RequestListener, ...]) -> None:
        self._request = request
        self._listeners = listeners

    def accepted(self) -> None:
        for listener in self._listeners:
            self._call(listener.on_accepted)

    def first_token(self, timings: Timings) -> None:
        for listener in self._listeners:
            self._call(listener.on_first_token, timings)

    def ended(self, end: RequestEnd) -> None:
        for listener in self._listeners:
            self._call(listener.on_end, end)

    def _call(self, method: Callable[..., object], *args: object) -> None:
        try:
            method(self._request, *args)
        except Exception:
            logger.exception("%s failed for request %s", method.__qualname__, self._request.request_id)


class Listeners:
    """Listeners of one engine, over all its lives. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[object, RequestListener] = {}
        self.all: tuple[RequestListener, ...] = ()

    def add(self, listener: RequestListener) -> Callable[[], None]:
        """See `AsyncLLM.add_listener`."""
        if not isinstance(listener, RequestListener):
            raise InvalidRequestError(
                f"listener={shown(listener)} is not valid: it must be an object of a subclass of RequestListener",
                param="listener",
            )
        entry = object()

        def remove() -> None:
            """Tell the listener of no request that comes from now on. Idempotent."""
            self._set(entry, None)

        self._set(entry, listener)
        return remove

    def _set(self, entry: object, listener: RequestListener | None) -> None:
        with self._lock:
            self._entries.pop(entry, None)
            if listener is not None:
                self._entries[entry] = listener
            self.all = tuple(self._entries.values())

    def context(self) -> Context | None:
        """Copy the caller's context variables, if anybody listens."""
        return copy_context() if self.all else None
