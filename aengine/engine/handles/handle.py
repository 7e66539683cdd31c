"""`Handle`: what an `AsyncLLM` holds its engine by.

LocalHandle   on the event loop that starts it
ThreadHandle  on a loop of its own, in a thread
RemoteHandle  in another process, over its socket (aengine/remote/)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...limits.checks import check_num_messages
from ...params import CallOptions, ChatOptions, SamplingParams, chat_options

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ...telemetry.listeners import Listeners
    from ...telemetry.metrics import Statistics
    from ..core import EngineCore
    from ..streams.chat_stream import ChatStream
    from ..streams.token_stream import TokenStream
    from ..tokenizer.prompt import Prompt, PromptPart
    from ..tokenizer_view import TokenizerView

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Submission:
    """What one call asks for, from `AsyncLLM` or `SyncLLM` to the engine."""

    prompt: Prompt | PromptPart
    params: SamplingParams | None
    options: CallOptions
    output_type: Any = None
    final_only: bool = False  # the request's stream is waited for, and not read


class Handle(Protocol):
    """Interface of a handle. Methods without a docstring: see those of `AsyncLLM` by the same name."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def state(self) -> str: ...
    @property
    def listeners(self) -> Listeners: ...
    @property
    def tokenizer(self) -> TokenizerView: ...
    def statistics(self) -> Statistics: ...
    def describe(self) -> dict[str, Any]: ...

    async def start(self) -> None: ...
    async def aclose(self, drain: float) -> None: ...
    def terminate(self) -> None: ...
    def drop(self, engine: object) -> None:
        """End what is still open when ``engine``, the owner, is garbage-collected, and warn about it."""

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await ``function(core, *args)``, one of `calls.py`, on the engine's loop. Raises what it does, and
        EngineClosedError."""
        ...

    def submit(self, asked: Submission) -> TokenStream:
        """Begin a request."""
        ...

    def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        output_type: Any,
        options: ChatOptions,
    ) -> ChatStream:
        """Begin a chat."""
        ...

    def abort(self, request_id: str) -> bool: ...
    def abort_all(self) -> int: ...


class CoreHandle(ABC):
    """A handle whose engine is in this process; its prompts may be `ChatRequest`s."""

    submit: Callable[..., TokenStream]

    @abstractmethod
    def open_core(self) -> EngineCore:
        """Return the core for calls that any thread may make. Raises EngineClosedError if none runs."""

    @abstractmethod
    def running_core(self) -> EngineCore:
        """Return the core for calls that only this handle's loop may make. Raises EngineClosedError elsewhere."""

    def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        output_type: Any,
        options: ChatOptions,
        **how: Any,
    ) -> ChatStream:
        """See `AsyncLLM.stream_chat`. ``how``: further arguments of `submit`."""
        from ..chat.plan import ChatRequest  # brings all of chats with it
        from ..streams.chat_stream import ChatStream

        chat, request = chat_options(options)
        core = self.running_core()
        core.sleeping.check_takes_requests()
        check_num_messages(core.limits.max_model_len, messages, chat.get("tools"))
        params = SamplingParams() if params is None else params
        chat |= {"messages": messages, "params": params, "output_type": output_type}
        return ChatStream(self.submit(Submission(ChatRequest(**chat), params, request), **how), params)

    @property
    def tokenizer(self) -> TokenizerView:
        """See `AsyncLLM.tokenizer`."""
        from ..tokenizer_view import TokenizerView

        core = self.open_core()
        return TokenizerView(core.tokenizer, core.limits.vocab_size)

    def statistics(self) -> Statistics:
        """See `AsyncLLM.statistics`."""
        return self.open_core().statistics()

    def describe(self) -> dict[str, Any]:
        """See `AsyncLLM.describe`."""
        core = self.running_core()
        described = core.ready | {"sampling_defaults": dict(core.sampling.values)}
        described["speculation"] = core.config.speculation_settings.method
        if len(core.replicas) > 1:
            described["replicas"] = [replica.worker.ready for replica in core.replicas]
        return described
