"""`AsyncLLM`: the engine as a user holds it.

    async with AsyncLLM("smollm2-135m") as engine:
        async for tok in engine.stream("The capital of France is"):
            print(tok.text, end="")

An `AsyncLLM` belongs to the event loop on which it was started, and to no other at the same time. It can be started
again, on any loop, after `aclose` or after its loop was closed. With ``own_thread=True`` it belongs to none, and has
blocking calls as well (`AsyncLLM.sync`). It holds the engine by a handle of one kind or another, see
`engine/handles/handle.py`; that of `aengine.remote.connect` leads to another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from .config import EngineConfig
from .engine.handles.calls import ask_tokenizer, seconds
from .engine.handles.clients import CLIENTS
from .engine.handles.core_calls import CoreCalls
from .engine.handles.handle import Submission
from .engine.handles.immediate_calls import ImmediateCalls
from .engine.handles.local import LocalHandle
from .errors import InvalidRequestError
from .params import ChatOptions, RequestOptions, SamplingParams, request_options
from .settings import described

if TYPE_CHECKING:
    import os
    from types import TracebackType
    from typing import Self, Unpack

    import openai

    from .engine.chat.messages import ChatCompletion
    from .engine.executor import Executor
    from .engine.handles.handle import Handle
    from .engine.handles.start import EngineStart
    from .engine.handles.sync_llm import SyncLLM
    from .engine.sessions.session import ChatSession
    from .engine.streams.chat_stream import ChatStream
    from .engine.streams.token_stream import TokenStream
    from .engine.tokenizer.prompt import Prompt
    from .engine.tokenizer_view import AsyncTokenizer
    from .outputs import Completion, T
    from .settings import Settings

__all__ = ["AsyncLLM"]


class AsyncLLM(ImmediateCalls, CoreCalls):
    """An LLM engine inside an asyncio application.

    Args:
        model: an embedded default ("smollm2-135m"), a folder with a checkpoint, a .gguf file, or a hub id; or an
            `EngineConfig`.
        config: settings by name, as listed below; with an `EngineConfig`, in place of its own.

    Raises:
        InvalidRequestError: an unknown setting, or a wrong value; ``param`` names it.

    Nothing is loaded before `start`, which ``async with`` calls.
    """

    def __init__(self, model: str | os.PathLike[str] | EngineConfig, **config: Unpack[Settings]) -> None:
        known = EngineConfig.create(model, config)
        self._handle: Handle
        if known.own_thread:
            from .engine.handles.on_thread import ThreadHandle

            self._handle = ThreadHandle(self, known)
        else:
            self._handle = LocalHandle(self, known)

    @classmethod
    def _held_by(cls, handle: Handle) -> Self:
        """Return an engine over ``handle``, whose engine may be in another process."""
        engine = cls.__new__(cls)
        engine._handle = handle
        return engine

    @property
    def config(self) -> EngineConfig:
        """The engine's settings. Raises EngineClosedError for one of another process, before `start`."""
        return self._handle.config

    @property
    def sync(self) -> SyncLLM:
        """The engine's blocking calls: `LLM`'s methods. They need ``own_thread=True``.

        Its calls block the thread that makes them until they have what they return, also one whose event loop runs, as
        a notebook's. Not to be called in the engine's own thread (``progress``, ``on_request_end``).

        Raises:
            InvalidRequestError: the engine has no thread of its own.
        """
        from .engine.handles.on_thread import ThreadHandle
        from .engine.handles.sync_llm import SyncLLM

        if not isinstance(self._handle, ThreadHandle):
            raise InvalidRequestError(
                "blocking calls need an engine on a thread of its own: AsyncLLM(..., own_thread=True)",
                param="own_thread",
            )
        return SyncLLM(self, self._handle)

    # -- life

    async def start(self) -> Self:
        """Find the model, start the worker, and wait until it can serve. Idempotent while running.

        Raises:
            ModelLoadError: the model can't be found, read or fitted; the message says what helps.
            WorkerDiedError: the worker died while it started.
            EngineClosedError: the engine runs on another event loop or in the process that forked this one, was closed
                meanwhile, drains (see `resume`), or is being closed: then it can be started again once `aclose` has
                returned.
            InvalidRequestError: no asyncio event loop runs here.
            EngineError: the machine lacks something that an engine needs, as /dev/shm; the message says what helps.
        """
        await self._handle.start()
        return self

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close: free the worker, its memory, and everything else. Bounded and idempotent.

        Args:
            drain: seconds that running requests may take to end by themselves. Those that still run then end with
                EngineClosedError, whose ``completion`` is what had come. See `drain`; new ones are refused from the
                start of the call.

        Of several calls at once the first whose time is over closes. Cancelling one is `terminate`.

        Raises:
            EngineClosedError: the engine runs on another event loop; nothing is done.
        """
        await self._handle.aclose(seconds("drain", drain))

    def terminate(self) -> None:
        """Kill the worker at once, also of a start that is under way, which raises EngineClosedError. For when nothing
        can be awaited; `aclose` lets requests and worker end."""
        self._handle.terminate()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.drop(self)

    # -- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """Begin a request and return its tokens as they come.

        Args:
            prompt: a text, token ids, or chat messages (``[{"role": "user", "content": "..."}]``), which are put
                through the model's chat template.
            params: how to sample and when to stop.
            output_type: a pydantic model, or any type that pydantic can describe. The text will be its JSON;
                ``stream.partial`` is what it says so far, ``completion.parsed`` the value.
            options: on_unsupported, deadline, first_token_deadline, priority, request_id, cache_salt, lora, tenant,
                keep, session_id: see `RequestOptions`.

        Raises (here, or from the stream):
            InvalidRequestError: something about the prompt or a parameter is wrong.
            ContextLengthError: the prompt is longer than the context.
            GrammarError: structured_output or output_type can't be used; its kind and path say why and where.
            EngineOverloadedError: the queue is full (with admission="error").
            DeadlineExceededError: from the stream, when one of the deadlines has passed.
            EngineClosedError: the engine was not started, drains, or is closed.
            WorkerDiedError, InternalError: from the stream, when the engine failed.
        """
        return self._handle.submit(Submission(prompt, params, request_options(options), output_type))

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion[T]: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[RequestOptions],
    ) -> Completion[Any]: ...

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[RequestOptions],
    ) -> Completion[Any]:
        """Return the whole completion at once, at less cost than `stream`, whose arguments and errors these are.

        Cancelling the task that awaits it aborts the request.
        """
        asked = Submission(prompt, params, request_options(options), output_type, final_only=True)
        return await self._handle.submit(asked).wait()

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[T]: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]: ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]:
        """Return the whole answer to chat messages. Arguments and errors are those of `stream_chat`.

        ``completion.message`` has its content, reasoning and tool calls; ``completion.parsed`` the value of an
        ``output_type``, if the answer was one.
        """
        async with self.stream_chat(messages, params, output_type=output_type, **options) as stream:
            return await stream.wait()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatStream:
        """Begin to answer chat messages, with tools and a shape for the answer in one grammar, after reasoning.

        Returns at once, as `stream` does; what preparing the chat finds wrong is raised by the stream.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, also with role "tool" and "tool_calls" as OpenAI's.
            params: as of `stream`.
            output_type: as of `stream`; the answer is JSON of it, unless tools are called. Or give another shape in
                ``params.structured_output``: a JSON schema, a regex, a choice.
            options: tools, tool_choice, parallel_tool_calls, chat_template_kwargs, add_generation_prompt,
                continue_final_message, and those of `stream`: see `ChatOptions`. The deadlines count from this call,
                and what it takes to prepare the chat counts too.

        Raises (here, or from the stream):
            InvalidRequestError: as of `stream`; also for tools and tool_choice.
            GrammarError: a tool's parameters or the type can't be held; it names which.
            ContextLengthError, EngineOverloadedError, DeadlineExceededError, EngineClosedError: as of `stream`.
        """
        return self._handle.submit_chat(messages, params, output_type, options)

    def session(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatSession:
        """Return a conversation that the engine remembers, and whose KV it keeps between the turns: for agents.

            async with engine.session("You are brief.", tools=[get_weather], keep=60) as session:
                answer = await session.chat("What is the weather in Paris?")

        Args:
            system: the first message.
            messages: those that come next, as of a conversation that is gone on with.
            params: of each turn, unless that has its own.
            options: as of `chat`, for each turn that has no other: ``tools``, ``lora``, ``cache_salt``, ``deadline``,
                ... ``keep`` is 60 unless given: the KV of the conversation is kept for so many seconds after a turn,
                before KV that nobody asked to keep, within the share of the setting ``kept_kv_fraction``.

        Nothing is done before the first turn. At the end of ``async with`` nothing is kept any more.

        Raises:
            InvalidRequestError: an option is unknown or wrong, or the messages are.
        """
        from .engine.sessions.session import ChatSession

        return ChatSession(self, system, messages, params, options)

    @property
    def async_tokenizer(self) -> AsyncTokenizer:
        """The calls of `tokenizer` for code on an event loop: ``await engine.async_tokenizer.count(messages, tools)``.
        They are made in the engine's threads, within its bounds."""
        from .engine.tokenizer_view import AsyncTokenizer

        return AsyncTokenizer(partial(self._handle.run, ask_tokenizer))

    def openai_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's own client, whose calls this engine answers on this loop: no port, no other process.

            client = engine.openai_client()
            await client.chat.completions.create(model="...", messages=[...])
            await client.responses.create(model="...", input="...")

        Args:
            options: of `openai.AsyncOpenAI`, such as ``timeout`` and ``max_retries``.

        Needs ``pip install 'aengine-llm[openai]'``. The engine may be started later.
        """
        return CLIENTS["openai"](self, **options)

    # -- seams, for tests and for executors of other kinds

    def _start_class(self) -> type[EngineStart]:
        from .engine.handles.start import EngineStart

        return EngineStart

    def _make_executor(self, config: EngineConfig) -> Executor:
        from .engine.executor import new_executor

        return new_executor(config)


AsyncLLM.__doc__ = described(AsyncLLM.__doc__, EngineConfig)
