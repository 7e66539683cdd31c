"""`RemoteHandle`: an engine in another process, over the socket at which that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any, TypeVar

from ..__version__ import __version__
from ..async_llm import AsyncLLM
from ..config import EngineConfig
from ..engine.adapters.memory import LoraMemory, LoraTensors
from ..engine.handles.handle import Submission
from ..engine.pooling.requests import PoolingRequest, PoolingResult
from ..engine.structured.output_type import AskedType, with_output_type
from ..engine.structured.spec import check_schema_size
from ..engine.threads.loop_ownership import other_loop, running_loop
from ..engine.threads.pools import run_in_thread
from ..engine.tokenizer_view import TokenizerView
from ..errors import ContextLengthError, EngineClosedError, EngineError, InvalidRequestError
from ..limits.checks import check_num_characters, check_num_messages, check_num_values
from ..limits.graphs import PROFILER_RANGE
from ..limits.values import not_valid
from ..params import ChatOptions, SamplingParams, chat_options, check_options, check_params
from ..telemetry.listeners import Listeners, RequestListener
from ..telemetry.metrics import Statistics
from ..telemetry.trace_context import current_trace
from .connection import Connection
from .mailbox import RemoteChatStream, RemoteTokenStream
from .tokenizer import RemoteTokenizer
from .unix_socket import socket_path
from .wire import first_not_plain, from_wire, params_to_wire, plain_options, pooled_from_wire, to_wire

T = TypeVar("T")


def connect(path: str | os.PathLike[str], *, timeout: float = 60.0) -> AsyncLLM:
    """Return the engine that another process serves at ``path`` (`serve_engine`); it is connected by ``async with``, or
    `AsyncLLM.start`.

    What ends an engine (`aclose`, `drain`, `terminate`, `abort_all`) ends this process' connection, or its requests,
    and nothing of others. It belongs to the event loop that starts it.

    Args:
        timeout: seconds that the other process may take to serve it; infinity is for ever.

    Raises:
        InvalidRequestError: an argument is no path, or no number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:  # nor NaN
        raise not_valid("timeout", timeout, "a number of seconds, 0 or more")
    return AsyncLLM._held_by(RemoteHandle(socket_path(path), timeout))


class _NoListeners(Listeners):
    def add(self, listener: RequestListener) -> Callable[[], None]:
        raise InvalidRequestError(
            "the engine is in another process: add the listener there, where it hears of the requests of all processes",
            param="listener",
        )


class _Life:
    """Connects to an engine in another process, and disconnects."""

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._connection: Connection | None = None
        self._life = "new"  # "starting", "running" (the state is the engine's then), "draining" or "closed"
        self._connecting = asyncio.Lock()
        self._config: EngineConfig | None = None
        self._tokenizer: RemoteTokenizer | None = None
        self.listeners: Listeners = _NoListeners()

    def __repr__(self) -> str:
        return f"<AsyncLLM at {self._path} {self.state}>"

    # -- life

    @property
    def state(self) -> str:
        """The engine's state; of this side "draining" or "closed", and "failed" when the connection broke."""
        if self._connection is None:
            return self._life
        if self._connection.has_broken:
            return "failed"
        return self._life if self._life == "draining" else str(self._connection.news[0])

    async def start(self) -> None:
        """Connect. Idempotent while connected.

        Raises:
            EngineClosedError: nobody serves an engine at the path, or `terminate` was called meanwhile.
            EngineError: its process has another version of aengine.
        """
        loop = running_loop()
        async with self._connecting:
            if (connection := self._connection) is not None and not connection.has_broken:
                self._check_loop(connection, loop)
                return
            await self._disconnect()
            self._life = "starting"
            try:
                self._connection = connection = await Connection.open(self._path, self._timeout)
                await self._greet(connection)
                if self._life != "starting":
                    raise EngineClosedError(f"{self!r} was closed while it started")
            except BaseException:
                await self._disconnect()
                raise
            self._life = "running"

    async def _greet(self, connection: Connection) -> None:
        hello = await connection.call("hello")
        if hello["version"] != __version__:
            raise EngineError(f"the engine's process has aengine {hello['version']}, this one {__version__}")
        connection.news = hello["news"]
        self._config = EngineConfig.from_wire(hello["config"])
        table = hello["tokenizer"]
        self._tokenizer = None if table is None else RemoteTokenizer(self._path, table)

    async def aclose(self, drain: float) -> None:
        """Disconnect; requests that run after ``drain`` seconds end with EngineClosedError. Idempotent."""
        if drain and self._connection is not None and self.state != "failed":
            await self._drain(drain)
        if self._life != "new":
            await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._life = "closed"
        if connection is not None:
            await connection.aclose()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def terminate(self) -> None:
        """Break the connection, and with it its requests. From any thread."""
        connection, self._connection = self._connection, None
        self._life = "closed"
        if connection is not None:
            connection.terminate()

    def drop(self, engine: object) -> None:
        """Break a connection that is still open when ``engine``, the owner, is garbage-collected, and warn about it."""
        if self._connection is not None and not self._connection.has_broken:
            warnings.warn(f"{self!r} was dropped without aclose()", ResourceWarning, source=engine, stacklevel=3)
            self.terminate()

    async def _drain(self, timeout: float | None) -> bool:
        """Take no new requests, and wait for this process's to end."""
        connection = self._connected()
        self._life = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._life == "draining" and connection.mailboxes:
                    connection.changed.clear()
                    await connection.changed.wait()
        return not connection.mailboxes

    async def _resume(self) -> None:
        connection = self._connected()
        if self._life == "draining":
            self._life = "running"
            connection.changed.set()
        elif connection.news[0] == "paused":
            await connection.call("end_pause")

    def _open(self) -> Connection:
        """Return the connection. Raises EngineClosedError if there is none."""
        if self._connection is None or self._connection.has_broken:
            cure = "`await engine.start()` connects it"
            raise EngineClosedError(f"the connection to the engine at {self._path} is {self.state}: {cure}")
        return self._connection

    def _connected(self) -> Connection:
        """Return the connection to send by. Raises EngineClosedError, also on another loop."""
        connection = self._open()
        self._check_loop(connection, running_loop())
        return connection

    def _check_loop(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        if connection.loop is not loop:
            raise other_loop(self, is_closed=connection.loop.is_closed())


class RemoteHandle(_Life):
    """A `Handle` whose engine is in another process. Requests end when this process does, or its connection."""

    # -- calls

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await a call of the engine's process. ``function``: its name says which. Raises what it does there, and
        EngineClosedError."""
        name = function.__name__
        own = {"drain": self._drain, "resume": self._resume, "pool": self._pool, "start_profile": self._start_profile}
        call: Any = own.get(name) or {"add_lora": self._add_lora}.get(name)
        if call is not None:
            value: T = await call(*args)
            return value
        if name == "ask_tokenizer" and args[0] != "decode":
            _check_size(self.describe()["max_model_len"], *args[1], args[2])
        answer: T = await self._connected().call(name, *args)
        return answer

    async def _add_lora(self, name: str, source: str | LoraTensors | LoraMemory, replace: bool) -> None:
        """Add an adapter. Tensors are in this process' memory until the engine's has taken hold of it."""
        memory = await run_in_thread("lora", LoraMemory.of, source) if isinstance(source, LoraTensors) else source
        place = memory if isinstance(memory, str) else memory.path
        await self._connected().call("add_lora", name, place, replace, not isinstance(memory, str))

    async def _pool(self, request: PoolingRequest, _: object) -> PoolingResult:
        connection = self._accepting()
        if "numpy" not in sys.modules:
            await run_in_thread("import", import_module, "numpy")  # importing numpy on the loop would block it
        return pooled_from_wire(await connection.call("pool", to_wire(request)))

    async def _start_profile(self, folder: Any) -> str:
        if isinstance(folder, str | os.PathLike) and folder != PROFILER_RANGE:  # this process' directory may be another
            folder = await run_in_thread("abspath", os.path.abspath, folder)
        path: str = await self._connected().call("start_profile", folder)
        return path

    def abort(self, request_id: str) -> bool:
        """See `AsyncLLM.abort`. Of this process' requests."""
        return isinstance(request_id, str) and self._connected().abort(request_id) > 0

    def abort_all(self) -> int:
        """See `AsyncLLM.abort_all`. Of this process' requests."""
        return self._connected().abort()

    # -- requests

    def submit(self, asked: Submission) -> RemoteTokenStream:
        """Send a request. What is too large, or wrong with the options, is raised here, and what else is wrong with it
        by the stream."""
        check_options(asked.options)
        method = "generate" if asked.final_only else "stream"
        return self._begin(method, asked.prompt, asked.params, asked.output_type, asdict(asked.options))

    def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        output_type: Any,
        options: ChatOptions,
    ) -> RemoteChatStream:
        """Send a chat, likewise."""
        check_options(chat_options(options)[1])
        stream = self._begin("chat", messages, params, output_type, plain_options(options))
        return RemoteChatStream(stream, params or SamplingParams())

    def _begin(
        self, method: str, prompt: Any, params: SamplingParams | None, output_type: Any, options: dict[str, Any]
    ) -> RemoteTokenStream:
        connection = self._accepting()
        if params is not None:
            check_params(params)
        _check_size(self.describe()["max_model_len"], prompt, options.get("tools"), options)
        typed: dict[str, Any] = {}
        if output_type is not None:
            params, typed = with_output_type(params, output_type, options.get("on_unsupported", "error"))
            if method != "chat":
                options["on_unsupported"] = "error"  # the schema says itself what may be left out
        asked: AskedType | None = typed.get("asked_type")
        options["request_id"] = request_id = options.get("request_id") or f"remote-{uuid.uuid4().hex}"
        shape, trace = None if params is None else params.structured_output, current_trace()
        mailbox = connection.new_mailbox(
            request_id,
            num_choices=1 if params is None else params.n,
            is_chat=method == "chat",
            final_only=method == "generate",
            want_logprobs=params is not None and params.logprobs is not None and method != "chat",
            output_type=typed.get("output_type"),
            is_json=asked is not None or (shape is not None and shape.is_json),
        )

        def begin(params: SamplingParams | None) -> None:
            if params is not None and params.structured_output is not None:
                check_schema_size(params.structured_output.json_schema)
            wire = params_to_wire(params)
            try:
                mailbox.begin(method, prompt, wire, options, trace)
            except InvalidRequestError as error:
                error.param = first_not_plain({"messages" if method == "chat" else "prompt": prompt, **wire, **options})
                raise

        if asked is None:
            try:
                begin(params)
            except BaseException:
                mailbox.abort()
                raise
        else:
            assert params is not None
            connection.describe(asked, mailbox, params, begin)
        return RemoteTokenStream(request_id, mailbox, connection.loop, mailbox.leave)

    # -- what there is to know

    @property
    def config(self) -> EngineConfig:
        """See `AsyncLLM.config`."""
        if self._config is None:
            raise EngineClosedError("the engine's settings are known once it was started")
        return self._config

    @property
    def tokenizer(self) -> TokenizerView:
        """See `AsyncLLM.tokenizer`."""
        self._open()
        if self._tokenizer is None:
            raise InvalidRequestError("there is no tokenizer: skip_tokenizer=True", param="skip_tokenizer")
        return self._tokenizer

    def statistics(self) -> Statistics:
        """Return the counters of the engine, for all processes together; at most a second old."""
        return from_wire(Statistics, self._news(1))

    def describe(self) -> dict[str, Any]:
        """See `AsyncLLM.describe`."""
        return dict(self._news(2))

    def _news(self, place: int) -> Any:
        news = self._open().news
        if news[place] is None:
            raise EngineClosedError(f"the engine is {news[0]}")
        return news[place]

    def _accepting(self) -> Connection:
        """Return the connection for a new request. Raises EngineClosedError, also while the engine drains."""
        connection = self._connected()
        if self._life == "draining":
            cure = "resume() lets it take them again"
            raise EngineClosedError(f"the engine is draining: running requests end, and new ones are refused; {cure}")
        return connection


def _check_size(max_model_len: int, prompt: Any, *others: Any) -> None:
    """Raise what the engine would of what is too large, before it is sent: both sides would work on it. ``others``:
    the tools, and options."""
    if isinstance(prompt, str):
        check_num_characters(len(prompt), max_model_len)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        check_num_messages(max_model_len, prompt, *others[:1])
    elif isinstance(prompt, Sequence) and len(prompt) > max_model_len and isinstance(prompt[0], int):
        raise ContextLengthError(len(prompt), max_model_len)
    check_num_values(prompt, *others)
