"""`RemoteEngine`: an engine in another process, with the calls of `AsyncLLM` that applications make."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .. import __version__
from ..chat.messages import ChatCompletion, Delta
from ..config import EngineConfig
from ..errors import AEngineError, EngineClosedError, EngineError, InvalidRequestError
from ..options import ChatOptions, RequestOptions, chat_options, request_options
from ..outputs import Completion, Token
from ..params import SamplingParams
from ..telemetry.metrics import Statistics
from .link import Link
from .stream import RemoteStream
from .tokenizer import RemoteTokenizer
from .wire import delta_from_wire, error_from_wire, from_wire, params_to_wire, token_from_wire

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self, Unpack

    from ..tokenizer.prompt import Prompt

__all__ = ["RemoteEngine", "connect"]

_RETRY_SECONDS = 0.05
_Stream = RemoteStream[Any, Any]


def connect(path: str | os.PathLike[str], *, timeout: float = 60.0) -> RemoteEngine:
    """Return the engine that another process serves at ``path`` (`serve_engine`); it is connected by ``async with``, or
    `RemoteEngine.start`.

    Args:
        timeout: seconds that the other process may take to serve it.
    """
    return RemoteEngine(os.fspath(path), timeout)


class RemoteEngine:
    """An engine that another process of this machine holds: stream, generate, stream_chat and chat as of `AsyncLLM`.

    All of it belongs to the event loop that started it. Requests end when this process does, or its connection.
    ``abort_all``, ``drain`` and ``aclose`` are about its own requests only. There is no ``output_type``: give a JSON
    schema, as ``SamplingParams(structured_output=...)``.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._link: Link | None = None
        self._reading: asyncio.Task[None] | None = None
        self._streams: WeakValueDictionary[int, _Stream] = WeakValueDictionary()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._life = "new"
        self._changed = asyncio.Event()  # a request has ended
        self._known: dict[str, Any] = {}
        self._news: tuple[Any, ...] = ("new", None, None)
        self._config: EngineConfig | None = None
        self._tokenizer: RemoteTokenizer | None = None

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._path} {self.state}>"

    # -- life

    @property
    def state(self) -> str:
        """As of `AsyncLLM`: the engine's, or "draining" or "closed" of this one's; "failed": the connection broke."""
        return str(self._news[0]) if self._life == "running" else self._life

    async def start(self) -> Self:
        """Connect. Idempotent while connected.

        Raises:
            EngineClosedError: nobody serves an engine at the path.
            EngineError: its process has another version of aengine.
        """
        if self._life in ("running", "draining"):
            return self
        reader, writer = await self._open()
        self._link = Link(reader, writer)
        self._life = "running"
        self._reading = asyncio.create_task(self._read(self._link))
        try:
            self._known = await self._call("hello")
            if self._known["version"] != __version__:
                raise EngineError(f"the engine's process has aengine {self._known['version']}, this one {__version__}")
        except BaseException:
            await self.aclose()
            raise
        self._news = self._known["news"]
        self._config = EngineConfig.from_wire(self._known["config"])
        if self._known["tokenizer"] is not None:
            table = self._known.pop("tokenizer")
            self._tokenizer = RemoteTokenizer(self._path, table)
        return self

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except OSError as error:
                if loop.time() >= deadline:
                    raise EngineClosedError(f"no engine is served at {self._path}: {error}") from None
            await asyncio.sleep(_RETRY_SECONDS)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait for this process's to end. Returns whether they have."""
        self._check()
        self._life = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._open_streams():
                    self._changed.clear()
                    await self._changed.wait()
        return not self._open_streams()

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Disconnect; requests that run after ``drain`` seconds end with EngineClosedError. Idempotent."""
        if self._link is None:
            self._life = "closed" if self._life != "new" else "new"
            return
        if drain and self._life != "failed":
            await self.drain(drain)
        self._life = "closed"
        link, self._link = self._link, None
        await link.aclose()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self._fail_all(EngineClosedError("the connection to the engine was closed"))
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[RequestOptions],
    ) -> RemoteStream[Token, Completion]:
        """See `AsyncLLM.stream`. What is wrong with the request is raised by the stream."""
        return self._begin("stream", prompt, params, output_type, request_options(options))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """See `AsyncLLM.generate`."""
        stream = self._begin("generate", prompt, params, output_type, request_options(options))
        async with stream:
            completion: Completion = await stream.wait()
            return completion

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[ChatOptions],
    ) -> RemoteStream[Delta, ChatCompletion]:
        """See `AsyncLLM.stream_chat`. What is wrong with the request is raised by the stream."""
        chat_options(options)
        return self._begin("chat", messages, params, output_type, dict(options))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """See `AsyncLLM.chat`."""
        async with self.stream_chat(messages, params, output_type=output_type, **options) as stream:
            return await stream.wait()

    def _begin(
        self, method: str, prompt: Any, params: SamplingParams | None, output_type: Any, options: dict[str, Any]
    ) -> _Stream:
        link = self._check()
        if self._life == "draining":
            raise EngineClosedError("the engine drains: it takes no new requests")
        if output_type is not None:
            message = "an engine in another process takes no output_type: give its JSON schema as structured_output"
            raise InvalidRequestError(message, param="output_type")
        options["request_id"] = request_id = options.get("request_id") or f"remote-{uuid.uuid4().hex}"
        self._number += 1
        link.send("begin", self._number, method, prompt, params_to_wire(params), options)
        decode, kind = (delta_from_wire, ChatCompletion) if method == "chat" else (token_from_wire, Completion)
        loop, n = asyncio.get_running_loop(), 1 if params is None else params.n
        stream: _Stream = RemoteStream(request_id, self._number, n, decode, kind, self._send, loop)
        self._streams[self._number] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request of this process; its stream ends with FinishReason.ABORT. Returns whether it was running."""
        found = [number for number, stream in self._open_streams() if stream.request_id == request_id]
        for number in found:
            self._send("abort", number)
        return bool(found)

    def abort_all(self) -> int:
        """End all requests of this process; their streams end with FinishReason.ABORT. Returns how many there were."""
        found = self._open_streams()
        for number, _ in found:
            self._send("abort", number)
        return len(found)

    def _open_streams(self) -> list[tuple[int, _Stream]]:
        return [(number, stream) for number, stream in self._streams.items() if not stream.has_ended]

    # -- what there is to know

    @property
    def config(self) -> EngineConfig:
        """The engine's. Raises EngineClosedError before it was started."""
        if self._config is None:
            raise EngineClosedError("the engine's settings are known once it was started")
        return self._config

    @property
    def tokenizer(self) -> RemoteTokenizer:
        """See `AsyncLLM.tokenizer`."""
        self._check()
        if self._tokenizer is None:
            raise InvalidRequestError("there is no tokenizer: skip_tokenizer=True", param="skip_tokenizer")
        return self._tokenizer

    def statistics(self) -> Statistics:
        """The counters of the engine, for all processes together; at most a second old."""
        self._check()
        if self._news[1] is None:
            raise EngineClosedError(f"the engine is {self._news[0]}")
        return from_wire(Statistics, self._news[1])

    def describe(self) -> dict[str, Any]:
        """See `AsyncLLM.describe`."""
        self._check()
        if self._news[2] is None:
            raise EngineClosedError(f"the engine is {self._news[0]}")
        return dict(self._news[2])

    async def check_health(self, timeout: float = 10.0) -> float:
        """See `AsyncLLM.check_health`; by way of the engine's process."""
        seconds: float = await self._call("check_health", timeout)
        return seconds

    # -- the connection

    def _check(self) -> Link:
        if self._link is None or self._life not in ("running", "draining"):
            raise EngineClosedError(f"the connection to the engine at {self._path} is {self._life}")
        return self._link

    def _send(self, *message: Any) -> None:
        """Send a message of a stream."""
        if self._link is not None:
            self._link.send(*message)
        if message[0] == "end":
            self._changed.set()

    async def _call(self, method: str, *args: Any) -> Any:
        link = self._check()
        self._number += 1
        number = self._number
        self._calls[number] = answer = asyncio.get_running_loop().create_future()
        try:
            link.send("call", number, method, args)
            return await answer
        finally:
            del self._calls[number]

    async def _read(self, link: Link) -> None:
        async for kind, number, *rest in link.messages():
            self._take(kind, number, *rest)
        if self._life != "closed":
            self._life = "failed"
        self._fail_all(EngineClosedError("the connection to the engine's process broke: it has ended, or was killed"))

    def _take(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "read":
            stream = self._streams.get(number)
            if stream is not None:
                stream.put(*rest)
        elif kind == "news":
            self._news = rest[0]
        elif number in self._calls:
            answer = self._calls[number]
            if answer.done():
                return
            if kind == "failed":
                answer.set_exception(error_from_wire(rest[0]))
            else:
                answer.set_result(rest[0])
        else:
            self._finish(number, kind, rest[0])

    def _finish(self, number: int, kind: str, value: Any) -> None:
        self._changed.set()
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == "failed":
            stream.fail(error_from_wire(value))
        else:
            stream.finish(value)

    def _fail_all(self, error: AEngineError) -> None:
        for _, stream in self._open_streams():
            stream.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._changed.set()
