"""`Connection`: an app process' end of the connection to the engine's process."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ..engine.streams.token_stream import error_for_waiter
from ..errors import AEngineError, EngineClosedError
from .mailbox import RemoteMailbox
from .message_stream import MessageStream
from .wire import completion_from_wire, deltas_from_wire, error_from_wire, tokens_from_wire

__all__ = ["Connection"]

_RETRY_SECONDS = 0.05


class Connection:
    """Requests and calls under way, by number."""

    def __init__(self, link: MessageStream) -> None:
        self.has_broken = False
        self.news: tuple[Any, ...] = ("starting", None, None)
        """State, statistics and description of the engine, as they come."""
        self.changed = asyncio.Event()
        """A request has ended."""
        self._link = link
        self._mailboxes: dict[int, RemoteMailbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: str, timeout: float) -> Connection:
        """Connect; try for ``timeout`` seconds. Raises EngineClosedError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                return cls(MessageStream(*await asyncio.open_unix_connection(path)))
            except OSError as error:
                if loop.time() >= deadline:
                    raise EngineClosedError(f"no engine is served at {path}: {error}") from None
            await asyncio.sleep(_RETRY_SECONDS)

    async def aclose(self) -> None:
        """Close; what is under way ends with EngineClosedError."""
        await self._link.aclose()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._fail(EngineClosedError("the connection to the engine was closed"))

    def begin(
        self, method: str, request_id: str, prompt: Any, params: Any, options: Any, trace: Any, **how: Any
    ) -> RemoteMailbox:
        """Begin a request. ``how``: of its `RemoteMailbox`. Raises InvalidRequestError for what is no plain data."""
        number = self._new_number()
        self._link.send("begin", number, method, prompt, params, options, trace)
        on_end = partial(self._forget, number)
        self._mailboxes[number] = mailbox = RemoteMailbox(
            request_id, partial(self._send, number), on_end=on_end, is_chat=method == "chat", **how
        )
        return mailbox

    def _new_number(self) -> int:
        self._number += 1
        return self._number

    def _send(self, number: int, kind: str, *args: Any) -> None:
        self._link.send(kind, number, *args)

    def _forget(self, number: int) -> None:
        del self._mailboxes[number]
        self.changed.set()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    def abort(self, request_id: str | None = None) -> int:
        """Have the engine end the requests of this id; None: all. Returns how many there were."""
        found = [number for number, one in self._mailboxes.items() if request_id in (None, one.request_id)]
        for number in found:
            self._link.send("abort", number)
        return len(found)

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the engine's process answers. Raises its error, and EngineClosedError."""
        if self.has_broken:
            raise _broken()
        number = self._new_number()
        self._calls[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._link.send("call", number, method, args)
            return await answer
        except asyncio.CancelledError:
            if not self.has_broken:
                self._link.send("end", number)
            raise
        finally:
            del self._calls[number]

    async def _read(self) -> None:
        async for message in self._link.messages():
            self._take(*message)
        self.has_broken = True
        self._fail(_broken())

    def _take(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "news":
            self.news = rest[0]
        elif number in self._calls:
            answer = self._calls[number]
            if answer.done():
                return
            if kind == "failed":
                answer.set_exception(error_from_wire(rest[0]))
            else:
                answer.set_result(rest[0])
        elif (mailbox := self._mailboxes.get(number)) is None:
            return
        elif kind == "failed":
            mailbox.fail(error_from_wire(rest[0]))
        elif kind == "done":
            mailbox.finish(completion_from_wire(rest[0], is_chat=mailbox.is_chat), rest[1])
        elif mailbox.is_chat:
            mailbox.put(deltas_from_wire(rest[0]), *rest[1:])
        else:
            mailbox.put_tokens(tokens_from_wire(rest[0]), *rest[1:])

    def _fail(self, error: AEngineError) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(error_for_waiter(error))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error_for_waiter(error))
        self.changed.set()


def _broken() -> EngineClosedError:
    return EngineClosedError("the connection to the engine's process broke: it has ended, or was killed")
