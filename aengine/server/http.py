"""HTTP as all interfaces need it: bodies of bounded size, clients that leave, JSON answers and server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.threads.lanes import Lanes
from ..engine.threads.yield_gil import yield_gil
from ..limits.bounds import HOLDER_VALUES, MAX_VALUES

T = TypeVar("T")

Rest = Callable[[float], Awaitable[None]]
"""Waits so many seconds, or until there is nothing more to wait for: `TokenStream.rest`."""


dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

FEW_VALUES = 5_000
"""A body or answer with fewer JSON values is read or written on the event loop: a few milliseconds. A text counts as
one value: its size costs a hundredth of that."""
MANY_VALUES = 100_000
"""A body or answer with more JSON values goes to the threads for long ones, so that others don't wait for it."""
_LONG_BODY = 1 << 20
"""Bytes, from which on the loop does not read a body itself: few values may be numbers of thousands of digits."""
_COUNTED = 1 << 20  # bytes whose values are counted at once: a chunk may be a whole body
_PIECE = 64  # values that are written at once


_JSON = re.compile(r"application/([\w.-]+\+)?json", re.ASCII)
"""Content types of JSON. A browser asks the server first before a page of another origin may send one of them."""


EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Proxies must neither keep nor collect an answer of events; nginx has a header of its own for that."""

PING = b": ping\n\n"
"""A comment, which clients of server-sent events pass over."""

PING_SECONDS = 15.0
"""After so long without an event, twice that at most, a comment is sent."""


class HTTPError(Exception):
    """A request that is answered with an error before the engine sees it.

    ``kind`` is OpenAI's "type" of the error; ``code`` a word for programs; ``param`` the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class ClientLeftError(Exception):
    """The client closed the connection before it was answered: nobody reads what is returned."""


class CloseAfterTwoLengths:
    """Middleware that closes the connection after a request with content-length beside transfer-encoding, as RFC 9112,
    6.3 wants: a proxy that heeds the other of the two takes what follows for the next request, of another client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        has_two = {b"content-length", b"transfer-encoding"} <= names

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_and_close if has_two else send)


class WrittenJSON(str):
    """A value that is written already."""

    __slots__ = ()


class JSONAnswer(Response):
    """A JSON body; compact, and without NaN, which JSON does not have."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_utf8(dumps(content))


def json_in_pieces(content: Any) -> bytes:
    """Return the body of a `JSONAnswer`, of large content: made in a thread, it lets the loop have the GIL between two
    pieces, which the library's encoder keeps for as long as it writes."""
    # choices[0].logprobs.content[0] and data[0].embedding[0] are as deep
    return b"".join([as_utf8(piece) for piece in _pieces(content, 5)])


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield the value as JSON, piece by piece. ``depth``: levels of mappings and lists that become several pieces. An
    iterator is written as a list whose items are made as they are written."""
    if isinstance(value, Iterator):
        yield "["
        for number, one in enumerate(value):
            yield_gil()
            yield "," if number else ""
            yield from _pieces(one, depth - 1)
        yield "]"
    elif isinstance(value, WrittenJSON):
        yield value
    elif not isinstance(value, dict | list) or not depth:
        yield dumps(value)
    elif isinstance(value, dict):
        before = "{"
        for key, one in value.items():
            yield f"{before}{dumps(key)}:"
            yield from _pieces(one, depth - 1)
            before = ","
        yield "}" if value else "{}"
    else:
        yield "["
        for start in range(0, len(value), _PIECE):
            yield_gil()
            piece = value[start : start + _PIECE]
            if start:
                yield ","
            if isinstance(piece[0], dict | list | WrittenJSON):
                for number, one in enumerate(piece):
                    yield "," if number else ""
                    yield from _pieces(one, depth - 1)
            else:
                yield dumps(piece)[1:-1]
        yield "]"


def as_utf8(text: str) -> bytes:
    """Encode JSON. Half of a surrogate pair, which UTF-8 can't say, becomes JSON's escape for it."""
    return text.encode("utf-8", "backslashreplace")


async def read_body(request: Request, max_bytes: int) -> tuple[bytes, int]:
    """Read the whole body, and count its values. Raises HTTPError 413 as soon as it is known to be too large or to have
    too many, ClientLeftError."""
    too_large = HTTPError(413, f"the body may have at most {max_bytes} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = num_values = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        for start in range(0, len(chunk), _COUNTED):
            if start:
                await asyncio.sleep(0)
            num_holders = sum(chunk.count(mark, start, start + _COUNTED) for mark in (b"[", b"{"))
            num_values += chunk.count(b",", start, start + _COUNTED) + HOLDER_VALUES * num_holders
            if num_values > MAX_VALUES:
                text = f"the body has more than {MAX_VALUES} values, a bracket counting as {HOLDER_VALUES}: send less"
                raise HTTPError(413, text, code="request_too_large")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks), num_values


async def read_json(request: Request, max_bytes: int, lanes: Lanes, validated: Callable[[Any], T]) -> T:
    """Read the body as JSON, and return what ``validated`` makes of it; of many values in a thread.

    Raises HTTPError 400, 413 or 415, ClientLeftError, and what ``validated`` does.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise HTTPError(415, f"the body has content-encoding: {encoding[:80]}; send it as it is, not compressed")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not _JSON.fullmatch(kind):
        given = repr(kind[:80]) if kind else "none at all"
        raise HTTPError(415, f"the body must be JSON, with content-type: application/json, not {given}")
    body, num_values = await read_body(request, max_bytes)
    if num_values < FEW_VALUES and len(body) < _LONG_BODY:
        return validated(_loaded(body, _ONCE))
    is_long = num_values > MANY_VALUES or len(body) >= _LONG_BODY

    async def read() -> T:
        return await lanes.run(lambda: validated(_loaded(body, _in_pieces())), is_long=is_long)

    return await while_connected(request, read())


def _loaded(body: bytes, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, too
        raise HTTPError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is no number in JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


_OPTIONS: Any = {"parse_constant": _refuse_number, "parse_float": _finite_float}
_ONCE = json.JSONDecoder(**_OPTIONS)


def _in_pieces() -> json.JSONDecoder:
    """Make a decoder that lets the loop have the GIL after every few values, in a thread; else it keeps it to the
    end. (Of texts, the most that a body may have are a matter of milliseconds.)"""
    number = 0

    def counted(value: T) -> T:
        nonlocal number
        number += 1
        if not number % _PIECE:
            yield_gil()
        return value

    return json.JSONDecoder(
        parse_constant=_refuse_number,
        parse_float=lambda text: counted(_finite_float(text)),
        parse_int=lambda text: counted(int(text)),
        object_hook=counted,
    )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, whose body has been read. It is cancelled when the client leaves.

    Raises what it raises, and ClientLeftError.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: str, name: str | None = None) -> bytes:
    """Return a server-sent event of one line of data."""
    head = "" if name is None else f"event: {name}\n"
    return as_utf8(f"{head}data: {data}\n\n")


class Pace:
    """Bounds how many pieces the event streams of an application send a second, each of which costs the event loop as
    much as the text of many tokens.

    A few streams send each token at once. Of many, each waits a moment after a piece, and what has come meanwhile is
    the next: of 2,500 a second 64 streams get some 40 each.
    """

    def __init__(self, pieces_per_second: float, unpaced_streams: int = 4) -> None:
        """
        Args:
            pieces_per_second: of all streams together, at most.
            unpaced_streams: so few never wait.
        """
        self.num_streams = 0  # streams that are being sent
        self._pieces_per_second = pieces_per_second
        self._unpaced_streams = unpaced_streams

    async def wait(self, rest: Rest) -> None:
        """Wait until the next piece may be sent. ``rest`` sleeps for so many seconds."""
        seconds = (self.num_streams - self._unpaced_streams) / self._pieces_per_second
        if seconds > 0:
            await rest(seconds)


async def begin_events(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    pace: Pace,
    rest: Rest,
    failed: Callable[[Exception], bytes],
    headers: Mapping[str, str],
) -> Response:
    """Return the answer whose server-sent events these chunks are.

    What is wrong with the request is raised before the first chunk, so it is an error of HTTP. If that is not there
    after `PING_SECONDS`, the answer begins without, and ``failed`` writes such an error as events.

    Raises what the chunks raise, and ClientLeftError.
    """
    first = asyncio.ensure_future(anext(chunks))
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait([first, leaving], return_when=asyncio.FIRST_COMPLETED, timeout=PING_SECONDS)
        if first.done():
            first.result()
        elif leaving.done():
            raise ClientLeftError
    except BaseException:
        if not first.done():
            first.cancel()
            await asyncio.wait([first])
        raise
    finally:
        leaving.cancel()
    return EventStream(first, chunks, pace, rest, failed, headers)


class EventStream(Response):
    """An answer of server-sent events. See `begin_events`.

    A client that leaves cancels the iterator at once, also while it waits for the engine. Each chunk must be all that
    there is when it is asked for: a `Pace` says when that is. While nothing comes, comments keep the connection alive,
    which proxies cut when it has been idle for a minute.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[bytes],
        chunks: AsyncGenerator[bytes, None],
        pace: Pace,
        rest: Rest,
        failed: Callable[[Exception], bytes],
        headers: Mapping[str, str],
    ) -> None:
        self.first = first
        self.chunks = chunks
        self.pace = pace
        self.rest = rest
        self.failed = failed
        self.status_code = 200
        self.background = None
        self._is_idle = False  # whether the next chunk is waited for
        self._num_sent = 0
        self.init_headers({**EVENT_HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            num_sent, tasks = -1, [sending, leaving]
            while True:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=PING_SECONDS)
                if done:
                    break
                if self._is_idle and self._num_sent == num_sent:
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
                num_sent = self._num_sent
        finally:
            leaving.cancel()
            sending.cancel()  # this has no effect on a task that is done
            await asyncio.wait([sending])
        if not sending.cancelled() and (error := sending.exception()) is not None and not isinstance(error, OSError):
            raise error  # a client that has left gives an OSError, which is dropped

    async def _send(self, send: Send) -> None:
        pace = self.pace
        pace.num_streams += 1
        try:
            async with aclosing(self.chunks):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    self._is_idle = True
                    chunk = await self.first
                except Exception as error:
                    chunk = self.failed(error)
                await self._send_chunk(send, chunk)
                await pace.wait(self.rest)
                async for chunk in self.chunks:
                    await self._send_chunk(send, chunk)
                    await pace.wait(self.rest)
                self._is_idle = False
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pace.num_streams -= 1

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        self._is_idle = False
        self._num_sent += 1
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_idle = True
