"""`SyncLLM`: the blocking calls of an engine that has a thread of its own, as ``engine.sync`` and as an `LLM`."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from ...errors import InvalidRequestError
from ...params import ChatOptions, GenerateOptions, RequestOptions, SamplingParams, generate_options, request_options
from ..streams.blocking import Batch, ChatIterator, TokenIterator, is_list_of_prompts, one_each, showing
from ..streams.cross_thread_stream import BlockingStream, run_now
from ..threads.loop_ownership import check_may_block
from .calls import seconds
from .clients import CLIENTS
from .core_calls import CoreCalls
from .handle import Submission
from .immediate_calls import ImmediateCalls
from .on_thread import ThreadHandle

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self, Unpack

    import openai

    from ...outputs import Completion, T
    from ..chat.messages import ChatCompletion
    from ..sessions.sync_session import SyncChatSession
    from ..tokenizer.prompt import Prompt

P = ParamSpec("P")
R = TypeVar("R")


class _Waiting:
    """A handle as `CoreCalls` have it, whose `run` blocks."""

    def __init__(self, sync: SyncLLM) -> None:
        self._sync = sync
        self.listeners = sync._handle.listeners

    async def run(self, function: Callable[..., Awaitable[R]], *args: Any) -> R:
        return self._sync._wait(function, *args)


def _blocking(call: Callable[Concatenate[CoreCalls, P], Awaitable[R]]) -> Callable[Concatenate[Any, P], R]:
    """Return a call of `CoreCalls`, none of whose awaits suspends over `_Waiting`, as one that blocks."""

    @functools.wraps(call)
    def blocking(self: SyncLLM, /, *args: P.args, **options: P.kwargs) -> R:
        calls = CoreCalls()
        calls._handle = _Waiting(self)  # type: ignore[assignment]
        return run_now(call(calls, *args, **options))  # type: ignore[arg-type]

    return blocking


class SyncCoreCalls:
    """`CoreCalls` that block."""

    drain = _blocking(CoreCalls.drain)
    resume = _blocking(CoreCalls.resume)
    pause = _blocking(CoreCalls.pause)
    start_weight_update = _blocking(CoreCalls.start_weight_update)
    update_weights = _blocking(CoreCalls.update_weights)
    finish_weight_update = _blocking(CoreCalls.finish_weight_update)
    abort_weight_update = _blocking(CoreCalls.abort_weight_update)
    weights_checksum = _blocking(CoreCalls.weights_checksum)
    sleep = _blocking(CoreCalls.sleep)
    wake_up = _blocking(CoreCalls.wake_up)
    pool = _blocking(CoreCalls.pool)
    embed = _blocking(CoreCalls.embed)
    score = _blocking(CoreCalls.score)
    rerank = _blocking(CoreCalls.rerank)
    classify = _blocking(CoreCalls.classify)
    score_completions = _blocking(CoreCalls.score_completions)
    check_health = _blocking(CoreCalls.check_health)
    start_profile = _blocking(CoreCalls.start_profile)
    stop_profile = _blocking(CoreCalls.stop_profile)
    collective_rpc = _blocking(CoreCalls.collective_rpc)
    keep_session = _blocking(CoreCalls.keep_session)
    reset_prefix_cache = _blocking(CoreCalls.reset_prefix_cache)
    add_lora = _blocking(CoreCalls.add_lora)
    remove_lora = _blocking(CoreCalls.remove_lora)
    pin_lora = _blocking(CoreCalls.pin_lora)
    list_loras = _blocking(CoreCalls.list_loras)
    has_lora = _blocking(CoreCalls.has_lora)


class SyncLLM(ImmediateCalls, SyncCoreCalls):
    """An engine's calls for code that awaits nothing. Each blocks its thread until it has what it returns.

    Any number of threads may use it at once; their requests are batched together, with those of the `AsyncLLM`.
    In the engine's own thread (``progress``, ``on_request_end``) the calls that block raise InvalidRequestError.
    """

    _handle: ThreadHandle

    def __init__(self, engine: object, handle: ThreadHandle, *, block_running_loop: bool = True) -> None:
        self._engine = engine  # an `AsyncLLM`: dropping the last reference closes it
        self._handle = handle
        self._block_running_loop = block_running_loop

    # -- life

    def start(self) -> Self:
        """Start the engine, also one that was closed. Idempotent while running. Errors as of `AsyncLLM.start`."""
        self._check()
        self._handle.start_and_wait()
        return self

    def close(self, *, drain: float = 0.0) -> None:
        """End the engine, its worker and its thread. Bounded and idempotent.

        Args:
            drain: seconds that requests of other threads may take to end by themselves; see `AsyncLLM.aclose`.
        """
        self._check()
        self._handle.close_and_wait(seconds("drain", drain))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests

    @overload
    def generate(
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion[T]: ...

    @overload
    def generate(
        self,
        prompts: list[str] | tuple[str, ...],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion[T]]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Return the `Completion` of one prompt, or a list with that of each of a list of prompts; they run side by
        side.

        Args:
            prompts: one prompt (a text, token ids, or chat messages, as of `AsyncLLM.stream`), or a list of them.
            params: for all, or a list with one for each.
            output_type: for each, as of `AsyncLLM.stream`.
            options: those of `AsyncLLM.stream`, for each prompt; also progress and return_exceptions, see
                `GenerateOptions`. A deadline counts from when the engine takes the prompt in; of a long list it takes
                in some hundreds at a time.

        Raises what `AsyncLLM.generate` does. An exception in this thread, as Ctrl-C's KeyboardInterrupt, aborts the
        requests and leaves the engine as it was.
        """
        self._check()
        request, progress, return_exceptions = generate_options(options)

        def begin(prompt: Any, params: SamplingParams | None) -> BlockingStream:
            return self._handle.submit(
                Submission(prompt, params, request, output_type, final_only=True), BlockingStream
            )

        if not is_list_of_prompts(prompts):
            if params is not None and not isinstance(params, SamplingParams):
                raise InvalidRequestError("one prompt takes one SamplingParams", param="params")
            return run_now(begin(prompts, params).wait())
        if request.request_id is not None:
            raise InvalidRequestError("a request_id is for one prompt, not for a list", param="request_id")
        every: Sequence[Any] = prompts
        with showing(progress, len(prompts)) as show:
            return Batch(begin, every, one_each(params, len(every)), self._window, return_exceptions).run(show)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[RequestOptions],
    ) -> TokenIterator:
        """Begin a request and return its tokens as they come. Arguments and errors as of `AsyncLLM.stream`."""
        self._check()
        asked = Submission(prompt, params, request_options(options), output_type)
        stream = self._handle.submit(asked, BlockingStream)
        return TokenIterator(stream, self._check)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[T]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]:
        """Return the whole answer to chat messages. Arguments and errors are those of `AsyncLLM.chat`."""
        with self.stream_chat(messages, params, output_type=output_type, **options) as stream:
            return stream.wait()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatIterator:
        """Begin to answer chat messages. Arguments and errors as of `AsyncLLM.stream_chat`."""
        self._check()
        stream = self._handle.submit_chat(messages, params, output_type, options, stream_class=BlockingStream)
        return ChatIterator(stream, self._check)

    def session(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> SyncChatSession:
        """Return a conversation that the engine remembers. Arguments and errors as of `AsyncLLM.session`."""
        from ..sessions.sync_session import SyncChatSession

        return SyncChatSession(self, system, messages, params, options)

    def openai_client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's own blocking client, whose calls this engine answers: no port, no other process.

        Args:
            options: of `openai.OpenAI`, such as ``timeout`` and ``max_retries``.

        Any number of threads may use it at once. Needs ``pip install 'aengine-llm[openai]'``.
        """
        return CLIENTS["blocking openai"](self._engine, self._run, **options)

    def _run(self, function: Callable[[], Awaitable[R]]) -> R:
        """Run a coroutine on the engine's loop, blocking this thread."""
        return self._wait(lambda core: function())

    # -- internals

    def _wait(self, function: Callable[..., Awaitable[R]], *args: Any) -> R:
        """Run ``function(core, *args)`` on the engine's loop, blocking this thread."""
        self._check()
        return self._handle.wait(function, *args)

    def _check(self) -> None:
        """Raise InvalidRequestError where this thread must not be blocked."""
        thread = self._handle.thread
        check_may_block(None if thread is None else thread.loop, any_thread=self._block_running_loop)

    @property
    def _window(self) -> int:
        """Return how many prompts of a list the engine has at once: enough to fill its batches for a while."""
        config = self._handle.config
        return max(1, min(config.max_num_queued_requests, max(64, 2 * config.max_num_seqs)))
