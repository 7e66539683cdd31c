"""Parts of `SyncLLM`: iterators that block, lists of prompts, and the line of their progress."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar, cast

from ...errors import AEngineError, InvalidRequestError
from ...outputs import Completion, FinishReason, Token, Usage
from ...params import Progress, SamplingParams, Show
from .cross_thread_stream import BlockingStream, run_now

if TYPE_CHECKING:
    from typing import Self

    from ..chat.messages import ChatCompletion, ChatMessage, Delta  # noqa: F401  # in quotes below
    from ..tokenizer.prompt import Prompt
    from .chat_record import ChatRecord
    from .chat_stream import ChatStream
    from .token_stream import TokenStream

T = TypeVar("T")
C = TypeVar("C", bound=Completion)
_SHOW_SECONDS = 0.1


class _Blocking(Generic[T, C]):
    """A stream as a blocking iterator. Its request is aborted when the iterator is closed, dropped, or interrupted
    while it waits.

    Raises what the stream raises, and what ``check`` raises where a thread may not be blocked.
    """

    def __init__(self, stream: TokenStream | ChatStream, check: Callable[[], None]) -> None:
        self._stream = stream  # a stream over a `BlockingStream`: none of its awaits ever suspends
        self._check = check

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request_id}>"

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return self._stream.usage

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Why each of the n completions has ended; see `TokenStream.finish_reasons` and `ChatStream`'s."""
        return self._stream.finish_reasons

    @property
    def stop_reasons(self) -> tuple[str | int | None, ...]:
        """The `Choice.stop_reason` of each of the n completions, known with its finish reason."""
        return self._stream.stop_reasons

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self._check()
        try:
            return run_now(self._stream.__anext__())  # type: ignore[return-value]  # a cast is a call
        except StopAsyncIteration:
            raise StopIteration from None

    def wait(self) -> C:
        """Wait for the end without looking at what comes. Raises the request's error."""
        self._check()
        return cast("C", run_now(self._stream.wait()))

    @property
    def completion(self) -> C:
        """The whole answer, once it has ended. Raises InvalidRequestError before."""
        return cast("C", self._stream.completion)

    @property
    def partial(self) -> Any:
        """What the answer, a JSON text, says so far; see `TokenStream.partial` and `ChatStream.partial`."""
        return self._stream.partial

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        self._check()
        run_now(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TokenIterator(_Blocking[Token, Completion]):
    """The tokens of one request, see `TokenStream`; ``for token in iterator``."""


class ChatIterator(_Blocking["Delta", "ChatCompletion"]):
    """The deltas of one chat's answer, see `ChatStream`; ``for delta in iterator``."""

    _stream: ChatStream

    @property
    def record(self) -> ChatRecord:
        """What has come, read or not; it may be held without the iterator."""
        return self._stream.record

    @property
    def message(self) -> ChatMessage:
        """What has come so far; the whole answer once it has been read to its end."""
        return self._stream.message

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages of the n answers, as `message`."""
        return self._stream.messages


class Batch:
    """Runs a list of prompts, ``window`` of them at a time; whenever one ends, the next is submitted.

    Not all at once, because each that is submitted takes memory for its answer.
    """

    def __init__(
        self,
        begin: Callable[[Prompt, SamplingParams | None], BlockingStream],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        window: int,
        return_exceptions: bool,
    ) -> None:
        self._begin = begin
        self._left = zip(range(len(prompts)), prompts, params, strict=True)
        self._num_done = 0
        self._window = window
        self._return_exceptions = return_exceptions
        self._running: dict[int, BlockingStream] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._results: list[Any] = [None] * len(prompts)

    def run(self, show: Show) -> list[Any]:
        """Return the completions in the prompts' order. ``show`` gets the numbers of those done, and of all."""
        show(0, len(self._results))
        try:
            while self._fill():
                i = self._ended.get()
                stream = self._running.pop(i, None)
                if stream is None:  # the end of this stream was reported twice
                    continue
                with self._keeping_error(i):
                    self._results[i] = run_now(stream.wait())
                self._num_done += 1
                show(self._num_done, len(self._results))
        except BaseException:
            self._abort()
            raise
        return self._results

    def _fill(self) -> bool:
        """Submit prompts until ``window`` of them run. Returns whether any runs."""
        while len(self._running) < self._window:
            following = next(self._left, None)
            if following is None:
                break
            with self._keeping_error(following[0]):
                self._start(*following)
        return bool(self._running)

    def _start(self, i: int, prompt: Prompt, params: SamplingParams | None) -> None:
        stream = self._running[i] = self._begin(prompt, params)
        stream.when_ended(lambda: self._ended.put(i))

    @contextlib.contextmanager
    def _keeping_error(self, i: int) -> Iterator[None]:
        try:
            yield
        except AEngineError as error:
            if not self._return_exceptions:
                raise
            self._results[i] = error

    def _abort(self) -> None:
        """Abort the running requests, and wait until the engine has ended them."""
        streams = list(self._running.values())
        for stream in streams:
            stream.end_soon()
        if streams:
            run_now(streams[-1].aclose())  # they end in order, so this one is the last


def is_list_of_prompts(prompts: Any) -> bool:
    """Return whether the value is a list of prompts rather than one prompt: a text, token ids, or messages."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Sequence):
        return False
    return not prompts or (isinstance(prompts[0], Sequence) and not isinstance(prompts[0], bytes | bytearray))


def one_each(params: Any, number: int) -> Sequence[SamplingParams | None]:
    """Return the parameters of each of ``number`` prompts. Raises InvalidRequestError for a list of another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * number
    if not isinstance(params, Sequence) or len(params) != number:
        raise InvalidRequestError(
            f"params must be SamplingParams, or a list with one for each of the {number} prompts", param="params"
        )
    return params


@contextlib.contextmanager
def showing(progress: Progress, number: int) -> Iterator[Show]:
    """Return the function to call with each completion. Raises InvalidRequestError for other types."""
    if callable(progress):
        yield progress
    elif not isinstance(progress, bool):
        raise InvalidRequestError("progress must be True, False, or a function of (done, all)", param="progress")
    elif progress and number and sys.stderr.isatty():
        line = _Line(sys.stderr)
        try:
            yield line
        finally:
            line.end()
    else:
        yield lambda done, num: None


class _Line:
    """One line on a terminal, rewritten some ten times a second."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._begun = time.monotonic()
        self._shown = float("-inf")

    def __call__(self, done: int, num: int) -> None:
        now = time.monotonic()
        if done < num and now - self._shown < _SHOW_SECONDS:
            return
        self._shown = now
        rate = done / (now - self._begun) if done else 0.0
        self._out.write(f"\r\x1b[2K{done}/{num} completions, {rate:.1f}/s")
        self._out.flush()

    def end(self) -> None:
        self._out.write("\n")
        self._out.flush()
