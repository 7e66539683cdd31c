"""`Connection`: an app process' end of the connection to the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ..chat import ChatCompletion
from ..engine.structured.output_type import AskedType
from ..engine.threads.futures import error_for_waiter
from ..engine.threads.pools import run_in_thread
from ..errors import AEngineError, EngineClosedError
from ..outputs import Completion
from ..params import SamplingParams
from .mailbox import RemoteMailbox
from .message_stream import MessageStream
from .wire import deltas_from_wire, error_from_wire, from_wire, tokens_from_wire


class Connection:
    """Requests and calls under way, by number."""

    def __init__(self, link: MessageStream) -> None:
        self.has_broken = False
        self._is_left = False  # `aclose` or `terminate` was called: the end is not the other process'
        self.news: tuple[Any, ...] = ("starting", None, None)
        """State, statistics and description of the engine, as they come."""
        self.changed = asyncio.Event()
        """A request has ended."""
        self._link = link
        self.mailboxes: dict[int, RemoteMailbox] = {}  # mailboxes of requests that have not ended
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._describing: set[asyncio.Task[None]] = set()
        self._number = 0
        self.loop = asyncio.get_running_loop()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: str, timeout: float) -> Connection:
        """Connect; try for ``timeout`` seconds. Raises EngineClosedError."""
        if len(os.fsencode(path)) > 107:  # Linux takes no longer path of a socket
            raise EngineClosedError(f"no engine is served at {path}: the path is too long")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                return cls(MessageStream(*await asyncio.open_unix_connection(path)))
            except OSError as error:
                if loop.time() >= deadline:
                    raise EngineClosedError(f"no engine is served at {path}: {error}") from None
            await asyncio.sleep(0.05)  # seconds until the next try

    def terminate(self) -> None:
        """Break the connection, from any thread; what is under way ends with EngineClosedError."""
        self._is_left = True
        with contextlib.suppress(RuntimeError):  # the loop was closed, and the connection with it
            self.loop.call_soon_threadsafe(self._link.abort)

    async def aclose(self) -> None:
        """Close; what is under way ends with EngineClosedError."""
        self._is_left = True
        await self._link.aclose()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._fail(self._end())

    def new_mailbox(self, request_id: str, **how: Any) -> RemoteMailbox:
        """Make the mailbox of a request, which its `begin` sends. ``how``: of `RemoteMailbox`."""
        number = self._new_number()
        mailbox = RemoteMailbox(request_id, partial(self._send, number), on_end=partial(self._forget, number), **how)
        self.mailboxes[number] = mailbox
        return mailbox

    def describe(
        self, asked: AskedType, mailbox: RemoteMailbox, params: SamplingParams, begin: Callable[[SamplingParams], None]
    ) -> None:
        """Have a type described in a thread: that may take long. Then ``begin`` gets the parameters with its schema."""

        async def describe() -> None:
            try:
                mailbox.output_type, shape = await run_in_thread("type", asked.described)
                begin(params.replace(structured_output=shape))
            except Exception as error:
                mailbox.fail(error)

        task = self.loop.create_task(describe())
        self._describing.add(task)
        task.add_done_callback(self._describing.discard)

    def _new_number(self) -> int:
        self._number += 1
        return self._number

    def _send(self, number: int, kind: str, *args: Any) -> None:
        self._link.send(kind, number, *args)

    def _forget(self, number: int) -> None:
        del self.mailboxes[number]
        self.changed.set()

    def abort(self, request_id: str | None = None) -> int:
        """Have the engine end the requests of this id; None: all. Returns how many there were."""
        found = [number for number, one in self.mailboxes.items() if request_id in (None, one.request_id)]
        for number in found:
            self.mailboxes[number].send("abort")
        return len(found)

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the engine's process answers. Raises its error, and EngineClosedError."""
        if self.has_broken:
            raise self._end()
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
        self._fail(self._end())

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
        elif (mailbox := self.mailboxes.get(number)) is None:
            return
        elif kind == "failed":
            mailbox.fail(error_from_wire(rest[0]))
        elif kind == "done":
            mailbox.finish(from_wire(ChatCompletion if mailbox.is_chat else Completion, rest[0]), rest[1])
        elif mailbox.is_chat:
            mailbox.put(deltas_from_wire(rest[0]), *rest[1:])
        else:
            mailbox.put_tokens(tokens_from_wire(rest[0]), *rest[1:])

    def _fail(self, error: AEngineError) -> None:
        for mailbox in list(self.mailboxes.values()):
            mailbox.fail(error_for_waiter(error))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error_for_waiter(error))
        self.changed.set()

    def _end(self) -> EngineClosedError:
        if self._is_left:
            return EngineClosedError("the connection to the engine was closed while this request ran")
        return EngineClosedError("the connection to the engine's process broke: it has ended, or was killed")
