"""`EarlyAnswer`: an answer of events that begins before the model that gives it is awake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Scope, Send

from ..anthropic.errors import is_for_anthropic
from ..http import EVENT_HEADERS, PING, PING_SECONDS, event


class EarlyAnswer:
    """Sends comments while a model is being loaded, as proxies cut a connection that has been idle for a minute. What
    is sent afterwards are the events of the model's answer, or an error, which is an event then."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self._send = send
        self._has_begun = False
        self._error: bytes | None = None  # what has come of the body of an error

    async def pinging(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, and send a comment now and then. Raises what it raises."""
        working = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([working], timeout=PING_SECONDS))[0]:
                if not self._has_begun:
                    self._has_begun = True
                    given = {"content-type": "text/event-stream; charset=utf-8", **EVENT_HEADERS}
                    headers = [(name.encode(), value.encode()) for name, value in given.items()]
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send({"type": "http.response.body", "body": PING, "more_body": True})
            working.result()
        finally:
            if working.cancel():
                await asyncio.wait([working])

    async def send(self, message: Message) -> None:
        """Send what the model's application does."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._error = b"" if message["status"] != 200 else None
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                body = self._events_of(self._error.decode()) if self._error else b""
                await self._send({"type": "http.response.body", "body": body})

    def _events_of(self, text: str) -> bytes:
        """Return an error's body as the last events of a stream of that interface."""
        if is_for_anthropic(self._path):
            return event(text, "error")
        if self._path.startswith("/v1/responses"):
            return event(json.dumps(json.loads(text)["error"] | {"type": "error", "sequence_number": 0}), "error")
        return event(text) + event("[DONE]")
