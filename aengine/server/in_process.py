"""`openai_client`, `anthropic_client`: the clients of OpenAI and Anthropic over an engine of the same process, no port.

    AsyncOpenAI ──httpx or httpx2──> transport ──ASGI──> the application ──> AsyncLLM
                <── chunks as they come ──────┘

httpx and its successor httpx2, which newer versions of openai use, each come with an ASGI transport that keeps back the
body until it is whole. This one hands out what comes as it comes, and a response that is closed early is a client that
has left: its request is aborted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    import anthropic
    import openai

    from ..async_llm import AsyncLLM

__all__ = ["anthropic_client", "openai_client", "streaming_transport"]

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]
Message = MutableMapping[str, Any]

T = TypeVar("T")

BASE_URL = "http://aengine"
_PIECES_PER_SECOND = 500
"""OpenAI's client takes some 0.15 ms of the engine's own loop for each event, so 64 streams get 12 a second each."""


def openai_client(engine: AsyncLLM, **options: Any) -> openai.AsyncOpenAI:
    """Make an `openai.AsyncOpenAI` whose calls this engine answers, on the event loop that makes them.

    Args:
        engine: on that loop, or with ``own_thread=True``.
        options: as of `openai.AsyncOpenAI`, such as ``max_retries``.
    """
    try:
        import openai
    except ImportError as error:
        raise ImportError("openai_client needs the package openai: pip install 'aengine-llm[openai]'") from error

    http_client = _http_client(openai.DefaultAsyncHttpxClient, engine)
    return openai.AsyncOpenAI(
        **{"api_key": "none", "base_url": f"{BASE_URL}/v1", "http_client": http_client, **options}
    )


def anthropic_client(engine: AsyncLLM, **options: Any) -> anthropic.AsyncAnthropic:
    """Make an `anthropic.AsyncAnthropic` whose calls this engine answers. Arguments as of `openai_client`."""
    try:
        import anthropic
    except ImportError as error:
        raise ImportError("anthropic_client needs Anthropic's client: pip install 'aengine-llm[anthropic]'") from error

    http_client = _http_client(anthropic.DefaultAsyncHttpxClient, engine)
    return anthropic.AsyncAnthropic(**{"api_key": "none", "base_url": BASE_URL, "http_client": http_client, **options})


def _http_client(client_class: type[Any], engine: AsyncLLM) -> Any:
    """Make the client of httpx or httpx2 that a library's own client is to use."""
    from .app import create_app

    roots = [kind.__module__.partition(".")[0] for kind in client_class.__mro__]
    library = next(root for root in roots if root.startswith("httpx"))
    app = create_app(engine, page=False, pieces_per_second=_PIECES_PER_SECOND)
    return client_class(transport=streaming_transport(app, library), base_url=BASE_URL)


def streaming_transport(app: ASGIApp, library: str = "httpx") -> Any:
    """Make a transport for ``httpx.AsyncClient(transport=...)`` that calls an ASGI application and streams its answers.

    Args:
        app: the application. Its lifespan is not run.
        library: "httpx" or "httpx2", which must be installed.
    """
    __import__(library)
    http: Any = sys.modules[library]

    async def in_time(answer: Coroutine[Any, Any, T], request: Any) -> T:
        """Return what is waited for no longer than the request's read timeout."""
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                return await answer
        except TimeoutError as error:
            raise http.ReadTimeout("the application did not answer in time", request=request) from error

    class Body(http.AsyncByteStream):
        def __init__(self, exchange: _Exchange, request: Any) -> None:
            self._exchange = exchange
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            exchange = self._exchange
            while chunk := exchange.take_chunk() or await in_time(exchange.next_chunk(), self._request):
                yield chunk

        async def aclose(self) -> None:
            await self._exchange.close()

        def __del__(self) -> None:  # of an answer that was dropped, perhaps in another thread
            self._exchange.drop()

    class Transport(http.AsyncBaseTransport):
        def __init__(self) -> None:
            self._exchanges: WeakSet[_Exchange] = WeakSet()

        async def aclose(self) -> None:
            for exchange in list(self._exchanges):
                await exchange.close()

        async def handle_async_request(self, request: Any) -> Any:
            body = b"".join([part async for part in request.stream])
            exchange = _Exchange(app, _scope_of(request), body)
            self._exchanges.add(exchange)
            try:
                status, headers = await in_time(exchange.start(), request)
            except BaseException:
                await exchange.close()
                raise
            return http.Response(status, headers=headers, stream=Body(exchange, request), request=request)

    return Transport()


def _scope_of(request: Any) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "server": (url.host, url.port),
        "client": ("127.0.0.1", 0),
        "extensions": {},
    }


_running: set[asyncio.Task[None]] = set()


class _Exchange:
    """One request to the application, and its answer."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], body: bytes) -> None:
        self._body: bytes | None = body
        self._loop = asyncio.get_running_loop()
        self._has_left = asyncio.Event()  # the client closed the response
        self._head: asyncio.Future[tuple[int, Any]] = self._loop.create_future()
        self._chunk = b""  # that was sent, and not read yet
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_ended = False
        self._task = asyncio.ensure_future(self._run(app, scope))
        # The loop's own reference is weak, and while the application waits for its reader nobody else has one.
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    async def start(self) -> tuple[int, Any]:
        """Return the status and the headers, once the application has sent them. Raises what it raises before."""
        return await self._head

    async def next_chunk(self) -> bytes:
        """Return what has come of the body since the last time, at least one byte; b"" at the end."""
        while not self._chunk and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        if not self._chunk and self._task.done():
            self._task.result()  # an application that failed midway
        return self.take_chunk()

    def take_chunk(self) -> bytes:
        """Return what has come of the body since the last time, perhaps nothing."""
        chunk, self._chunk = self._chunk, b""
        self._has_room.set()
        return chunk

    async def close(self) -> None:
        """Tell the application that the client has left, and wait until it has returned. Idempotent."""
        self._leave()
        if not self._task.done():
            await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # was raised by `start` or `next_chunk`, if anybody was there

    def drop(self) -> None:
        """Tell the application that the client has left, from any thread. Idempotent."""
        if not self._has_ended and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._leave)
            except RuntimeError:  # it was closed since
                pass

    def _leave(self) -> None:
        self._has_left.set()
        self._has_room.set()

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
            if not self._head.done():
                raise RuntimeError("the application sent no response")
        except BaseException as error:
            if not self._head.done():
                self._head.set_exception(error)
            raise
        finally:
            self._has_ended = True
            self._news.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self._head.done():  # cancelled, when nobody waits any more
                self._head.set_result((message["status"], message["headers"]))
            return
        if body := message.get("body"):
            # One chunk ahead of the reader: what is generated while it is busy gathers in the engine's stream, and is
            # fewer and larger events, each of which costs the client the same.
            while self._chunk and not self._has_left.is_set():
                self._has_room.clear()
                await self._has_room.wait()
            self._chunk += body
        self._has_ended = not message.get("more_body", False)
        self._news.set()
