"""`Connection`: an app process' end of the connection to the engine's process."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from ..errors import AEngineError, EngineClosedError
from .message_stream import MessageStream
from .stream import RemoteStream
from .wire import error_from_wire

__all__ = ["Connection"]

_RETRY_SECONDS = 0.05
_Stream = RemoteStream[Any, Any]


class Connection:
    """Streams and calls under way, by number. Streams are held by their readers only."""

    def __init__(self, link: MessageStream) -> None:
        self.has_broken = False
        self.news: tuple[Any, ...] = ("starting", None, None)
        """State, statistics and description of the engine, as they come."""
        self.changed = asyncio.Event()
        """A request has ended."""
        self._link = link
        self._streams: WeakValueDictionary[int, _Stream] = WeakValueDictionary()
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

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def add(self, number: int, stream: _Stream) -> None:
        self._streams[number] = stream

    @property
    def streams(self) -> list[tuple[int, _Stream]]:
        """Number and stream of the requests that run."""
        return [(number, stream) for number, stream in self._streams.items() if not stream.has_ended]

    def send(self, *message: Any) -> None:
        """Send a message about a stream. Raises InvalidRequestError for what is no plain data."""
        self._link.send(*message)
        if message[0] == "end":
            self.changed.set()

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the engine's process answers. Raises its error, and EngineClosedError."""
        if self.has_broken:
            raise _broken()
        number = self.new_number()
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
        elif kind == "read":
            if (stream := self._streams.get(number)) is not None:
                stream.put(*rest)
        else:
            self._finish(number, kind, *rest)

    def _finish(self, number: int, kind: str, value: Any) -> None:
        self.changed.set()
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == "failed":
            stream.fail(error_from_wire(value))
        else:
            stream.finish(value)

    def _fail(self, error: AEngineError) -> None:
        for _, stream in self.streams:
            stream.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self.changed.set()


def _broken() -> EngineClosedError:
    return EngineClosedError("the connection to the engine's process broke: it has ended, or was killed")
