"""`LLM`: the engine for programs without an event loop.

    with LLM("smollm2-135m") as llm:
        completions = llm.generate(["1 2 3", "a b c"], SamplingParams(max_tokens=8))
        for token in llm.stream("The capital of France is"):
            print(token.text, end="")

It is an `AsyncLLM` with a thread of its own; each method blocks the calling thread until it has what it returns. One
`LLM` may be used by any number of threads at once, whose requests are batched together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from .blocking import Batch, ChatIterator, Progress, TokenIterator, is_many, one_each, showing
from .errors import InvalidRequestError
from .outputs import Completion
from .own_thread import OwnThreadLLM
from .params import SamplingParams
from .settings import ENGINE_SETTINGS, described
from .streams.cross_thread_stream import ThreadStream, check_no_loop, run_now

if TYPE_CHECKING:
    from typing import Self, Unpack

    from .config import EngineConfig
    from .engine.tokenizer_view import TokenizerView
    from .settings import Settings
    from .structured.asked_type import OnUnsupported
    from .telemetry.metrics import Statistics
    from .tokenizer.prompt import Prompt

__all__ = ["LLM"]


class LLM:
    """An engine in a synchronous program. It is ready when its constructor returns.

    Args:
        model: as of `AsyncLLM`.
        settings: as listed below. Unless ``admission`` is given here, callers wait when the queue is full.

    Raises:
        InvalidRequestError: a wrong setting; or you are on an event loop: use AsyncLLM there.
        ModelLoadError, WorkerDiedError: as of `AsyncLLM.start`.

    Every method that blocks raises InvalidRequestError on the thread of a running event loop; all of them raise
    EngineClosedError after `close`.
    """

    def __init__(self, model: str | EngineConfig, **settings: Unpack[Settings]) -> None:
        check_no_loop()
        if settings.setdefault("own_thread", True) is not True:
            raise InvalidRequestError("an LLM has a thread of its own: own_thread can't be False", param="own_thread")
        self._engine = self._make_engine(model, {"admission": "wait", **settings})
        self._engine.stream_class = ThreadStream
        try:
            self._engine.start_and_wait()
        except BaseException:  # Ctrl-C, at the moment that it was ready, too
            self._engine.terminate()
            raise

    def _make_engine(self, model: str | EngineConfig, settings: dict[str, Any]) -> OwnThreadLLM:
        """The seam for tests."""
        return OwnThreadLLM(model, **settings)

    def __repr__(self) -> str:
        return f"<LLM {self._engine.config.model} {self._engine.state}>"

    def close(self, *, drain: float = 0.0) -> None:
        """End the engine, its worker and its thread. Bounded and idempotent.

        Args:
            drain: seconds that requests of other threads may take to end by themselves; see `AsyncLLM.aclose`.
        """
        check_no_loop()
        self._engine.close_and_wait(drain=drain)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait for those of other threads to end; see `AsyncLLM.drain`."""
        check_no_loop()
        return self._engine.wait_for(partial(self._engine.drain, timeout))

    def resume(self) -> None:
        """Take new requests again after `drain`."""
        check_no_loop()
        self._engine.wait_for(self._engine.resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None, **options: Any) -> Completion: ...

    @overload
    def generate(
        self, prompts: list[str] | tuple[str, ...], params: Any = None, **options: Any
    ) -> list[Completion]: ...

    @overload
    def generate(self, prompts: Sequence[Any], params: Any = None, **options: Any) -> Any: ...

    def generate(  # type: ignore[misc]  # the options are written out here only
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output_type: Any = None,
        on_unsupported: OnUnsupported = "error",
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: Progress = False,
        return_exceptions: bool = False,
    ) -> Any:
        """The `Completion` of one prompt, or a list with that of each of a list of prompts; they run side by side.

        Args:
            prompts: one prompt (a text, token ids, or chat messages, as of `AsyncLLM.stream`), or a list of them.
            params: for all, or a list with one for each.
            output_type, on_unsupported, deadline, first_token_deadline, priority, cache_salt: for each, as of
                `AsyncLLM.stream`. A deadline counts from when the engine takes the prompt in; of a long list it takes
                in some hundreds at a time.
            progress: of a list; True: a line on stderr, if that is a terminal; or a function of yours that is called,
                in this thread, with the numbers of completions that are done and of all.
            return_exceptions: of a list; True: an error takes the place of its completion. False: the first ends the
                others, and is raised.

        Raises what `AsyncLLM.generate` does. An exception in this thread, as Ctrl-C's KeyboardInterrupt, aborts the
        requests and leaves the engine as it was.
        """
        check_no_loop()
        options: dict[str, Any] = {
            "output_type": output_type,
            "on_unsupported": on_unsupported,
            "deadline": deadline,
            "first_token_deadline": first_token_deadline,
            "priority": priority,
            "cache_salt": cache_salt,
        }
        if not is_many(prompts):
            if params is not None and not isinstance(params, SamplingParams):
                raise InvalidRequestError("one prompt takes one SamplingParams", param="params")
            stream = self._begin(prompts, params, final_only=True, **options)  # type: ignore[arg-type]
            return run_now(stream.wait())
        every: Sequence[Any] = prompts
        begin = partial(self._begin, final_only=True, **options)
        with showing(progress, len(prompts)) as show:
            return Batch(begin, every, one_each(params, len(every)), self._window, return_exceptions).run(show)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        on_unsupported: OnUnsupported = "error",
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> TokenIterator:
        """Begin a request and return its tokens as they come. Arguments and errors as of `AsyncLLM.stream`."""
        check_no_loop()
        stream = self._begin(
            prompt,
            params,
            final_only=False,
            output_type=output_type,
            on_unsupported=on_unsupported,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            priority=priority,
            request_id=request_id,
            cache_salt=cache_salt,
        )
        return TokenIterator(stream)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The answer to chat messages, whole. Arguments and errors as of `AsyncLLM.chat`."""
        with self.stream_chat(messages, params, **options) as stream:
            return stream.wait()

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> ChatIterator:
        """Begin to answer chat messages. Arguments and errors as of `AsyncLLM.stream_chat`."""
        check_no_loop()
        return ChatIterator(self._engine.wait_for(partial(self._engine.stream_chat, messages, params, **options)))

    def abort(self, request_id: str) -> bool:
        """End a request of another thread by its id. Returns whether it was running."""
        return self._engine.abort(request_id)

    def abort_all(self) -> int:
        """End all requests, of all threads. Returns how many there were."""
        return self._engine.abort_all()

    # -- what there is to know

    def statistics(self) -> Statistics:
        """The engine's counters at this moment."""
        return self._engine.statistics()

    def describe(self) -> dict[str, Any]:
        """See `AsyncLLM.describe`."""
        return self._engine.describe()

    def check_health(self, timeout: float = 10.0) -> float:
        """Ask the worker. Arguments and errors as of `AsyncLLM.check_health`."""
        check_no_loop()
        return self._engine.wait_for(partial(self._engine.check_health, timeout))

    @property
    def tokenizer(self) -> TokenizerView:
        """See `AsyncLLM.tokenizer`."""
        return self._engine.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given as a prompt."""
        return self._engine.has_chat_template

    def start_profile(self, folder: str | PathLike[str] | None = None) -> str:
        """See `AsyncLLM.start_profile`."""
        check_no_loop()
        return self._engine.wait_for(partial(self._engine.start_profile, folder))

    def stop_profile(self) -> str:
        """See `AsyncLLM.stop_profile`."""
        check_no_loop()
        return self._engine.wait_for(self._engine.stop_profile)

    # -- internals

    def _begin(self, prompt: Prompt, params: SamplingParams | None, **options: Any) -> ThreadStream:
        stream = self._engine._submit(prompt, params, **{"request_id": None, **options})
        assert isinstance(stream, ThreadStream)
        return stream

    @property
    def _window(self) -> int:
        """How many prompts of a list the engine has at once: enough to fill its batches for a while."""
        config = self._engine.config
        return max(1, min(config.max_num_queued_requests, max(64, 2 * config.max_num_seqs)))


LLM.__doc__ = described(LLM.__doc__, ENGINE_SETTINGS)
