"""`openai_client`, `anthropic_client`: the clients of OpenAI and Anthropic over an engine of the same process, no port.

    AsyncOpenAI ──httpx or httpx2──> transport ──ASGI──> the application ──> AsyncLLM
                <── chunks as they come ──────┘
    OpenAI      ──the same, blocking──> transport ──the engine's own thread──> the application ──> AsyncLLM

httpx and its successor httpx2, which newer versions of openai use, each come with an ASGI transport that keeps back the
body until it is whole. This one hands out what comes as it comes, and a response that is closed early is a client that
has left: its request is aborted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args
from weakref import WeakSet

from ..errors import AEngineError, EngineClosedError
from .errors import raised_errors

if TYPE_CHECKING:
    import anthropic
    import openai

    from ..async_llm import AsyncLLM

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]
Message = MutableMapping[str, Any]

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine on the engine's loop, and blocks the calling thread until it has ended."""

    def __call__(self, function: Callable[[], Awaitable[T]]) -> T: ...


BASE_URL = "http://aengine"
ERRORS = "aengine_errors"
"""The extension of an httpx request that has the engine's errors which its answer tells of, the last one last."""

_OPTIONS: dict[str, Any] = {"api_key": "none", "base_url": f"{BASE_URL}/v1"}
_PIECES_PER_SECOND = 500
"""Each event costs the engine's own loop as much as the text of several tokens, so 64 streams get 12 a second each."""


def openai_client(engine: AsyncLLM, *, app_options: Any = None, **options: Any) -> openai.AsyncOpenAI:
    """Make an `openai.AsyncOpenAI` whose calls this engine answers, on the event loop that makes them.

    Args:
        engine: on that loop, or with ``own_thread=True``.
        app_options: of `create_app`.
        options: as of `openai.AsyncOpenAI`, such as ``max_retries``.
    """
    openai = _openai()
    http_client = _http_client(openai.DefaultAsyncHttpxClient, engine, streaming_transport, app_options)
    return _client_class(openai)(**{**_OPTIONS, "http_client": http_client, **options})


def blocking_openai_client(engine: AsyncLLM, run: Run, *, app_options: Any = None, **options: Any) -> openai.OpenAI:
    """Make an `openai.OpenAI` whose calls this engine answers, in any thread but the engine's.

    Args:
        engine: with a thread of its own.
        run: makes a coroutine there and returns what it returns; raises EngineClosedError if the thread has ended.
        app_options: of `create_app`.
        options: as of `openai.OpenAI`, such as ``max_retries``.
    """
    openai = _openai()
    http_client = _http_client(openai.DefaultHttpxClient, engine, partial(_blocking_transport, run), app_options)
    return openai.OpenAI(**{**_OPTIONS, "http_client": http_client, **options})


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ImportError("openai_client needs the package openai: pip install 'aengine-llm[openai]'") from error
    return openai


@cache
def _client_class(openai: Any) -> type[openai.AsyncOpenAI]:
    """Make the class of clients whose chats pydantic's core reads: an event is a line of JSON that the engine wrote.

    OpenAI's own reader decodes an event, and builds its object, in Python, which takes three times as long.
    """
    http: Any = sys.modules[_http_library(openai.DefaultAsyncHttpxClient)]
    of_chat: Any = openai.types.chat.ChatCompletionChunk
    validate = of_chat.__pydantic_validator__.validate_json

    class Stream(openai.AsyncStream[T]):
        async def __stream__(self) -> AsyncIterator[T]:
            """Yield what the body's events are, as its chunks come. Raises `openai.APIError` of one that is an error,
            and `openai.APIConnectionError` if the client is closed before the end."""
            response, events = self.response, b""
            try:
                async for chunk in response.aiter_bytes():
                    *lines, events = (events + chunk).split(b"\n\n")
                    for line in lines:
                        if line.startswith(b"data: {"):  # neither the last event nor a comment
                            yield self._object(line.removeprefix(b"data: "))
            except http.TimeoutException as error:
                raise openai.APITimeoutError(request=response.request) from error
            except http.RequestError as error:
                raise openai.APIConnectionError(request=response.request) from error
            finally:
                await response.aclose()

        def _object(self, data: bytes) -> Any:
            if self._cast_to is of_chat:
                try:
                    return validate(data)
                except ValueError:  # an error, or a finish reason that OpenAI does not have
                    pass
            value = json.loads(data)
            if error := value.get("error"):
                raise openai.APIError(error["message"], request=self.response.request, body=error)
            if self._cast_to is object:
                return value
            return self._client._process_response_data(data=value, cast_to=self._cast_to, response=self.response)

    class AsyncOpenAI(openai.AsyncOpenAI):
        async def request(self, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None) -> Any:
            if get_args(stream_cls) == (of_chat,):
                stream_cls = Stream[of_chat]
            elif get_args(stream_cls) == (object,):  # dicts
                stream_cls = Stream[object]
            return await super().request(cast_to, options, stream=stream, stream_cls=stream_cls)

    return AsyncOpenAI


def anthropic_client(engine: AsyncLLM, **options: Any) -> anthropic.AsyncAnthropic:
    """Make an `anthropic.AsyncAnthropic` whose calls this engine answers. Arguments as of `openai_client`."""
    try:
        import anthropic
    except ImportError as error:
        raise ImportError("anthropic_client needs Anthropic's client: pip install 'aengine-llm[anthropic]'") from error

    http_client = _http_client(anthropic.DefaultAsyncHttpxClient, engine, streaming_transport)
    return anthropic.AsyncAnthropic(**{"api_key": "none", "base_url": BASE_URL, "http_client": http_client, **options})


def _http_client(
    client_class: type[Any],
    engine: AsyncLLM,
    transport: Callable[[ASGIApp, str], Any],
    app_options: Mapping[str, Any] | None = None,
) -> Any:
    """Make the client of httpx or httpx2 that a library's own client is to use."""
    from .app import create_app

    library = _http_library(client_class)
    app = create_app(engine, page=False, **{"pieces_per_second": _PIECES_PER_SECOND, **(app_options or {})})
    return client_class(transport=transport(app, library), base_url=BASE_URL)


def _http_library(client_class: type[Any]) -> str:
    """Return the name of the library whose client this is: "httpx" or "httpx2"."""
    roots = [kind.__module__.partition(".")[0] for kind in client_class.__mro__]
    return next(root for root in roots if root.startswith("httpx"))


def streaming_transport(app: ASGIApp, library: str = "httpx") -> Any:
    """Make a transport for ``httpx.AsyncClient(transport=...)`` that calls an ASGI application and streams its answers.

    Args:
        app: the application. Its lifespan is not run.
        library: "httpx" or "httpx2", which must be installed.
    """
    __import__(library)
    http: Any = sys.modules[library]

    class Body(http.AsyncByteStream):
        def __init__(self, exchange: _Exchange, request: Any) -> None:
            self._exchange = exchange
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            exchange = self._exchange
            while chunk := exchange.take_chunk() or await _in_time(http, exchange.next_chunk(), self._request):
                yield chunk

        async def aclose(self) -> None:
            await self._exchange.close()

        def __del__(self) -> None:  # called for an answer that was dropped, perhaps in another thread
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
            status, headers = await _begin(http, exchange, request)
            return http.Response(status, headers=headers, stream=Body(exchange, request), request=request)

    return Transport()


def _blocking_transport(run: Run, app: ASGIApp, library: str) -> Any:
    """Make a transport for ``httpx.Client(transport=...)`` that calls an ASGI application on the engine's loop."""
    __import__(library)
    http: Any = sys.modules[library]

    def run_open(function: Callable[[], Awaitable[T]], request: Any) -> T:
        try:
            return run(function)
        except EngineClosedError as error:
            request.extensions[ERRORS] = [error]
            raise http.ConnectError(str(error), request=request) from error

    class Body(http.SyncByteStream):
        def __init__(self, exchange: _Exchange, request: Any) -> None:
            self._exchange = exchange
            self._request = request

        def __iter__(self) -> Iterator[bytes]:
            request = self._request
            while chunk := run_open(lambda: _in_time(http, self._exchange.next_chunk(), request), request):
                yield chunk

        def close(self) -> None:
            try:
                run(self._exchange.close)
            except EngineClosedError:  # the request has ended with the engine
                pass

        def __del__(self) -> None:  # called for an answer that was dropped
            self._exchange.drop()

    class Transport(http.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            body = b"".join(request.stream)

            async def begin() -> tuple[_Exchange, int, Any]:
                exchange = _Exchange(app, _scope_of(request), body)
                return exchange, *(await _begin(http, exchange, request))

            exchange, status, headers = run_open(begin, request)
            return http.Response(status, headers=headers, stream=Body(exchange, request), request=request)

    return Transport()


async def _in_time(http: Any, answer: Coroutine[Any, Any, T], request: Any) -> T:
    """Return what is waited for no longer than the request's read timeout."""
    try:
        async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
            return await answer
    except TimeoutError as error:
        raise http.ReadTimeout("the application did not answer in time", request=request) from error
    except ConnectionAbortedError as error:
        raise http.ReadError(str(error), request=request) from error


async def _begin(http: Any, exchange: _Exchange, request: Any) -> tuple[int, Any]:
    """Return the status and the headers of an exchange, or end it."""
    request.extensions[ERRORS] = exchange.errors
    try:
        return await _in_time(http, exchange.start(), request)
    except BaseException:
        await exchange.close()
        raise


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
        self.errors: list[AEngineError] = []
        self._body: bytes | None = body
        self._loop = asyncio.get_running_loop()
        self._has_left = asyncio.Event()  # set when the client closes the response
        self._head: asyncio.Future[tuple[int, Any]] = self._loop.create_future()
        self._chunk = b""  # bytes that were sent and not read yet
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_ended = False
        self._is_cut = False  # the application ended before the body was whole
        self._task = asyncio.ensure_future(self._run(app, scope))
        # The loop's own reference is weak, and while the application waits for its reader nobody else has one.
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    async def start(self) -> tuple[int, Any]:
        """Return the status and the headers, once the application has sent them. Raises what it raises before."""
        return await self._head

    async def next_chunk(self) -> bytes:
        """Return what has come of the body since the last time, at least one byte; b"" at the end. Raises what the
        application raises, and ConnectionAbortedError if `close` was called before the body was whole."""
        while not self._chunk and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        if not self._chunk and self._task.done():
            self._task.result()  # raises the error of an application that failed midway
        if not self._chunk and self._is_cut:
            raise ConnectionAbortedError("the client was closed before the answer was whole")
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
            self._task.exception()  # `start` or `next_chunk` has raised it already, if anybody waited

    def drop(self) -> None:
        """Tell the application that the client has left, from any thread. Idempotent."""
        if not self._has_ended and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._leave)
            except RuntimeError:  # the loop was closed since
                pass

    def _leave(self) -> None:
        self._has_left.set()
        self._has_room.set()

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        raised_errors.set(self.errors)
        try:
            await app(scope, self._receive, self._send)
            if not self._head.done():
                raise RuntimeError("the application sent no response")
        except BaseException as error:
            if not self._head.done():
                self._head.set_exception(error)
            raise
        finally:
            self._is_cut = not self._has_ended
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
            if not self._head.done():  # a cancelled head has no reader any more
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
