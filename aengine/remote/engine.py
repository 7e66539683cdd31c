"""`RemoteEngine`: the client of an engine in another process, with the calls of `AsyncLLM` that applications make."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..__version__ import __version__
from ..chat import ChatCompletion
from ..config import EngineConfig
from ..engine.pooling.requests import PoolingCalls, PoolingRequest, PoolingResult
from ..engine.streams.chat_answers import ReceivedAnswers
from ..engine.structured.spec import check_schema_size
from ..engine.threads.pools import run_in_thread
from ..engine.tokenizer.async_tokenizer import AsyncTokenizer
from ..errors import ContextLengthError, EngineClosedError, EngineError, InvalidRequestError
from ..limits.checks import check_num_characters, check_num_messages, check_num_values
from ..outputs import Completion
from ..params import (
    ChatOptions,
    RequestOptions,
    SamplingParams,
    chat_options,
    check_options,
    check_params,
    request_options,
)
from ..telemetry.metrics import Statistics
from ..telemetry.trace_context import current_trace
from .connection import Connection
from .mailbox import RemoteChatStream, RemoteTokenStream
from .tokenizer import RemoteTokenizer
from .types import plain_options, typed_params
from .wire import from_wire, params_to_wire, pooled_from_wire, to_wire

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self, Unpack

    from ..engine.streams.chat_stream import ChatStream
    from ..engine.streams.token_stream import TokenStream
    from ..engine.tokenizer.prompt import Prompt

__all__ = ["RemoteEngine", "connect"]


def connect(path: str | os.PathLike[str], *, timeout: float = 60.0) -> RemoteEngine:
    """Return the engine that another process serves at ``path`` (`serve_engine`); it is connected by ``async with``, or
    `RemoteEngine.start`.

    Args:
        timeout: seconds that the other process may take to serve it.
    """
    return RemoteEngine(os.fspath(path), timeout)


class _Calls(ABC):
    """Calls that the engine's process answers."""

    @abstractmethod
    def _check(self) -> Connection:
        """Raises EngineClosedError if there is no connection."""

    async def check_health(self, timeout: float = 10.0) -> float:
        """See `AsyncLLM.check_health`; by way of the engine's process."""
        seconds: float = await self._check().call("check_health", timeout)
        return seconds

    async def reset_prefix_cache(self) -> int:
        """See `AsyncLLM.reset_prefix_cache`."""
        count: int = await self._check().call("reset_prefix_cache")
        return count


class RemoteEngine(_Calls, PoolingCalls):
    """Client of an engine that another process of this machine holds: stream, generate, stream_chat, chat, embed,
    score, rerank and classify as of `AsyncLLM`.

    All of it belongs to the event loop that started it. Requests end when this process does, or its connection.
    ``abort_all``, ``drain`` and ``aclose`` are about its own requests only. There is no ``add_listener``: add one to
    the engine, in its process, where it hears of the requests of all processes, with the callers' traces.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._connection: Connection | None = None
        self._life = "new"
        self._config: EngineConfig | None = None
        self._tokenizer: RemoteTokenizer | None = None

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._path} {self.state}>"

    # -- life

    @property
    def state(self) -> str:
        """The engine's state; of this side "draining" or "closed", and "failed" when the connection broke."""
        if self._connection is None:
            return self._life
        if self._connection.has_broken:
            return "failed"
        return self._life if self._life == "draining" else str(self._connection.news[0])

    async def start(self) -> Self:
        """Connect. Idempotent while connected.

        Raises:
            EngineClosedError: nobody serves an engine at the path.
            EngineError: its process has another version of aengine.
        """
        if self._connection is not None:
            return self
        self._connection = connection = await Connection.open(self._path, self._timeout)
        self._life = "running"
        try:
            hello = await connection.call("hello")
            if hello["version"] != __version__:
                raise EngineError(f"the engine's process has aengine {hello['version']}, this one {__version__}")
            connection.news = hello["news"]
            self._config = EngineConfig.from_wire(hello["config"])
            table = hello["tokenizer"]
            self._tokenizer = None if table is None else RemoteTokenizer(self._path, table)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait for this process's to end. Returns whether they have."""
        connection = self._check()
        self._life = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while connection.num_requests:
                    connection.changed.clear()
                    await connection.changed.wait()
        return not connection.num_requests

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Disconnect; requests that run after ``drain`` seconds end with EngineClosedError. Idempotent."""
        if self._connection is None:
            return
        if drain and self.state != "failed":
            await self.drain(drain)
        connection, self._connection = self._connection, None
        self._life = "closed"
        await connection.aclose()
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
        output_type: Any = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """See `AsyncLLM.stream`. What is too large, or wrong with the options, is raised here, and what else is wrong
        with the request by the stream.

        A new ``output_type`` is described before this returns: some milliseconds as a rule. `generate` does so in a
        thread.
        """
        checked = request_options(options)
        check_options(checked)
        return self._begin("stream", prompt, params, output_type, asdict(checked))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[RequestOptions],
    ) -> Completion[Any]:
        """See `AsyncLLM.generate`."""
        checked = request_options(options)
        check_options(checked)
        await self._describe(output_type)
        stream = self._begin("generate", prompt, params, output_type, asdict(checked))
        async with stream:
            completion: Completion[Any] = await stream.wait()
            return completion

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatStream:
        """See `AsyncLLM.stream_chat`, and `stream` for ``output_type``. What is wrong with the request is raised by the
        stream."""
        check_options(chat_options(options)[1])
        stream = self._begin("chat", messages, params, output_type, plain_options(options))
        mailbox = stream._mailbox
        pending: Any = mailbox.pending
        n = len(mailbox.choices)
        answers = ReceivedAnswers(n, mailbox.output_type, pending, is_json=mailbox.is_json)
        return RemoteChatStream(stream, params or SamplingParams(), answers)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]:
        """See `AsyncLLM.chat`."""
        await self._describe(output_type)
        async with self.stream_chat(messages, params, output_type=output_type, **options) as stream:
            return await stream.wait()

    def _begin(
        self, method: str, prompt: Any, params: SamplingParams | None, output_type: Any, options: dict[str, Any]
    ) -> RemoteTokenStream:
        connection = self._check()
        if self._life == "draining":
            raise EngineClosedError("the engine drains: it takes no new requests")
        if params is not None:
            check_params(params)
        _check_size(self.describe()["max_model_len"], prompt, options.get("tools"), options)
        params, known = typed_params(params, output_type, options.get("on_unsupported", "error"))
        if known is not None and method != "chat":
            options["on_unsupported"] = "error"  # the schema says itself what may be left out
        options["request_id"] = request_id = options.get("request_id") or f"remote-{uuid.uuid4().hex}"
        shape = None if params is None else params.structured_output
        if shape is not None:
            check_schema_size(shape.json_schema)
        how = {
            "num_choices": 1 if params is None else params.n,
            "final_only": method == "generate",
            "want_logprobs": params is not None and params.logprobs is not None and method != "chat",
            "output_type": known,
            "is_json": shape is not None and shape.is_json,
        }
        mailbox = connection.begin(method, request_id, prompt, params_to_wire(params), options, current_trace(), **how)
        return RemoteTokenStream(request_id, mailbox, asyncio.get_running_loop(), mailbox.leave)

    async def _describe(self, output_type: Any) -> None:
        """Describe a type in a thread, unless it is known: that can take long. Raises InvalidRequestError."""
        if output_type is not None:
            from ..engine.structured.asked_type import AskedType

            await run_in_thread("type", AskedType(output_type, "error").described)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """See `AsyncLLM.pool`."""
        connection = self._check()
        if self._life == "draining":
            raise EngineClosedError("the engine drains: it takes no new requests")
        if "numpy" not in sys.modules:
            await run_in_thread("import", import_module, "numpy")  # importing numpy on the loop would block it
        return pooled_from_wire(await connection.call("pool", to_wire(request)))

    def abort(self, request_id: str) -> bool:
        """End a request of this process; its stream ends with FinishReason.ABORT. Returns whether it was running."""
        return isinstance(request_id, str) and self._check().abort(request_id) > 0

    def abort_all(self) -> int:
        """End all requests of this process; their streams end with FinishReason.ABORT. Returns how many there were."""
        return self._check().abort()

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

    @property
    def async_tokenizer(self) -> AsyncTokenizer:
        """See `AsyncLLM.async_tokenizer`; its calls are made in the engine's process."""

        async def ask(method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
            if method != "decode":
                _check_size(self.describe()["max_model_len"], *args, options)
            return await self._check().call("tokenizer", method, args, options)

        return AsyncTokenizer(ask)

    def statistics(self) -> Statistics:
        """The counters of the engine, for all processes together; at most a second old."""
        state, statistics, _ = self._check().news
        if statistics is None:
            raise EngineClosedError(f"the engine is {state}")
        return from_wire(Statistics, statistics)

    def describe(self) -> dict[str, Any]:
        """See `AsyncLLM.describe`."""
        state, _, description = self._check().news
        if description is None:
            raise EngineClosedError(f"the engine is {state}")
        return dict(description)

    def _check(self) -> Connection:
        if self._connection is None or self._connection.has_broken:
            raise EngineClosedError(f"the connection to the engine at {self._path} is {self.state}")
        return self._connection


def _check_size(max_model_len: int, prompt: Any, *others: Any) -> None:
    """Raise what the engine would of what is too large, before it is sent: both sides would work on it. ``others``:
    the tools, and options."""
    if isinstance(prompt, str):
        check_num_characters(len(prompt), max_model_len)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        check_num_messages(max_model_len, prompt, *others[:1])
    elif isinstance(prompt, Sequence) and len(prompt) >= max_model_len and isinstance(prompt[0], int):
        raise ContextLengthError(len(prompt), max_model_len)
    check_num_values(prompt, *others)
