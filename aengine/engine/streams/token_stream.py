"""`TokenStream`: what a caller reads, over a mailbox that merges.

    step loop --put()--> ChoiceOutput (one per completion) --> Mailbox (one per user call) <--__anext__-- TokenStream
                                                               Mailbox --on_end()--> Admission, once

The mailbox is a list: a consumer that is slow finds all that came meanwhile at its next turn and is woken once, not
once a token. No queue, no task, and at most one future while a reader waits. It can't outgrow the request's own
max_tokens.

The engine holds mailboxes, never streams: dropping a `TokenStream` (``break``, a finished task, garbage collection)
runs its finaliser, which aborts the request.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import AEngineError, InvalidRequestError
from ...outputs import Choice, Completion, FinishReason, Timings, Token, Usage
from ...telemetry.request_times import RequestTimes
from ..threads.futures import settle, wait_at_most
from .logprobs import Logprobs, LogprobTable, TokenLogprobs
from .prompt_logprobs import PromptLogprobs, of_pieces

if TYPE_CHECKING:
    from typing import Self

    from ..chat.plan import ChatPlan
    from ..structured.output_type import OutputType
    from ..tokenizer.detokenizer import Detokenizer


class Buffer(Protocol):
    """Interface of the buffer from which a reader on another thread takes tokens."""

    is_due: bool  # the buffer takes what has come at the end of this turn of the loop

    def note_news(self) -> None: ...

    def oldest_unread(self) -> Token | None: ...


class Mailbox:
    """Everything that one user call gets: the tokens of its completions as they come, then the end or an error."""

    def __init__(
        self,
        *,
        final_only: bool,
        num_choices: int = 0,
        want_logprobs: bool = False,
        has_results: bool = False,
        times: RequestTimes | None = None,
        output_type: OutputType | None = None,
        is_json: bool = False,
        buffer: Buffer | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``num_choices``: completions of the call; 0: the engine does not have the request yet. ``is_json``: the text
        will be JSON. ``has_results``: the prompt's tokens have log-probabilities, the numbers of the first completion.
        ``buffer``: where a reader on another thread takes tokens from. ``on_end`` is called once, when nothing more
        will come."""
        self._on_end: Callable[[], None] | None = on_end
        self.times = times or RequestTimes()
        self.final_only = final_only  # no `Token`s are made, since only the completion is read
        self.pending: deque[Token] = deque()
        self.waiter: asyncio.Future[None] | None = None  # future of a reader on this loop that waits for tokens
        self.end_waiter: asyncio.Future[None] | None = None  # future of a reader that waits for the end alone
        self.buffer = buffer
        self.error: BaseException | None = None
        self.choices = [ChoiceOutput(self, i, want_logprobs) for i in range(num_choices)]
        self.num_open = num_choices or 1  # completions that have not ended
        self._has_results = has_results
        self.num_prompt_tokens = 0
        self.cached_tokens = 0
        self.output_type = output_type
        self.is_json = is_json
        self.warnings: tuple[str, ...] = ()
        self.plan: ChatPlan | None = None  # the plan of a chat, once it is made
        self.weight_versions: tuple[str, ...] = ()  # see `Completion.weight_versions`
        self.stop_token_ids: frozenset[int] = frozenset()  # the caller's own; the completion may end by others

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.num_open == 0 or self.error is not None

    @property
    def has_tokens(self) -> bool:
        """Whether the first token of any completion has come."""
        return any(choice.token_ids for choice in self.choices)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the call ended: by an error, by an abort, or as its first completion did."""
        if self.error is not None:
            return FinishReason.ERROR
        if any(choice.finish_reason is FinishReason.ABORT for choice in self.choices):
            return FinishReason.ABORT
        return self.choices[0].finish_reason

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)
        elif self.buffer is not None:
            self.buffer.note_news()

    def fail(self, error: BaseException) -> None:
        """End every open completion with an error; tokens already here are still delivered first."""
        if self.done:
            return
        self.error = error
        for choice in self.choices:
            choice.end(FinishReason.ERROR)
        if self.num_open:  # the request was never made, so there is no completion that could close the stream
            self.num_open = 0
            self.close()

    def abort(self) -> None:
        """End every open completion without an error. Idempotent."""
        for choice in self.choices:
            choice.end(FinishReason.ABORT)

    def close(self) -> None:
        """Wake the reader: nothing more will come. Idempotent."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
        settle(self.end_waiter)
        self.wake()

    def oldest_unread(self) -> Token | None:
        """Return the first token that the reader has not taken; None if there is none or the reader waits for more."""
        if self.buffer is not None:
            return self.buffer.oldest_unread()
        return self.pending[0] if self.pending and self.waiter is None else None

    def completion(self, request_id: str) -> Completion:
        choices = tuple(choice.result(self.output_type) for choice in self.choices)
        of_prompt = self.prompt_logprobs()
        end = self.usage(), self.warnings, self.timings()
        versions = self.weight_versions
        return Completion(request_id, choices, *end, prompt_logprobs=of_prompt, weight_versions=versions)

    def prompt_logprobs(self) -> PromptLogprobs | None:
        """See `Completion.prompt_logprobs`; those that have come."""
        if not self._has_results:
            return None
        return of_pieces(self.choices[0].numbers, self.num_prompt_tokens)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=self.cached_tokens,
        )

    def timings(self) -> Timings:
        return self.times.timings(max((len(choice.token_ids) for choice in self.choices), default=0))


class ChoiceOutput:
    """One completion under way: the sink of one scheduler `Request`."""

    def __init__(self, mailbox: Mailbox, index: int, want_logprobs: bool) -> None:
        self.mailbox: Mailbox | None = mailbox
        """None at the end: of what refers to itself, only the garbage collector frees the tokens."""
        self.times = mailbox.times
        self.index = index
        self.detokenizer: Detokenizer | None = None  # None: the completion has no text
        self.token_ids: list[int] = []
        self.texts: list[str] = []  # one for each token, perhaps empty, if there is a detokenizer
        self.logprobs = LogprobTable() if want_logprobs else None
        self.finish_reason: FinishReason | None = None
        self.numbers = array("f")  # the pieces of the result that the request gets beside or in place of tokens
        self.stop_reason: str | int | None = None
        """See `Choice.stop_reason`. None before the end."""
        # The parsed value or the error, kept since a type's own validators may be slow.
        self._parsed: tuple[Any, Exception | None] | None = None

    def begin(self, detokenizer: Detokenizer) -> None:
        """Set the ``detokenizer`` that makes the text of the tokens to come."""
        self.detokenizer = detokenizer

    def put(self, token_id: int, finish_reason: FinishReason | None, logprobs: TokenLogprobs | None = None) -> bool:
        """Deliver one token.

        Returns whether a stop string ends the completion here, which the scheduler can't know: the caller takes
        it out there, and then calls `end`.
        """
        stopped = False
        text = ""
        detokenizer = self.detokenizer
        if detokenizer is not None:
            if finish_reason is not FinishReason.STOP:  # the text of a stop token is not part of the completion
                text = detokenizer.put(token_id)
                if detokenizer.stopped:
                    stopped = finish_reason is None
                    finish_reason = FinishReason.STOP
            if finish_reason is not None:
                text += detokenizer.flush()  # this adds nothing after a stop string
                if detokenizer.stopped:  # the text that was held back may contain one
                    finish_reason = FinishReason.STOP
            self.texts.append(text)
        ids = self.token_ids
        ids.append(token_id)
        top = () if self.logprobs is None else self.logprobs.append(token_id, logprobs)
        mailbox = self.mailbox
        assert mailbox is not None, "it has not ended"
        if not mailbox.final_only:
            logprob = None if logprobs is None else logprobs[0]
            mailbox.pending.append(Token(text, token_id, self.index, logprob, finish_reason, len(ids) - 1, top))
            if mailbox.waiter is not None or (mailbox.buffer is not None and not mailbox.buffer.is_due):
                mailbox.wake()
        if finish_reason is not None and not stopped:
            self.end(finish_reason)
        return stopped

    def put_result(self, piece: array[float], finish_reason: FinishReason | None) -> None:
        """Deliver a piece of the request's result. ``finish_reason``: of a request that gets nothing else, with its
        last piece."""
        if self.finish_reason is None:
            self.numbers.extend(piece)
            if finish_reason is not None:
                self.end(finish_reason)

    def fail(self, error: BaseException) -> None:
        """End the whole call, of which this is one completion, with an error. Without effect once this completion has
        ended."""
        if self.mailbox is not None:
            self.mailbox.fail(error)

    def end(self, reason: FinishReason) -> None:
        """End the completion: no token comes any more. Idempotent: the first reason counts."""
        mailbox = self.mailbox
        if mailbox is None:
            return
        plan = mailbox.plan
        if plan is not None and reason is FinishReason.STOP and plan.has_call(self.texts, self.token_ids):
            reason = FinishReason.TOOL_CALLS
        self.finish_reason = reason
        if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
            self.stop_reason = self._why_stopped(mailbox.stop_token_ids)
        self.detokenizer = None  # it refers to the tokenizer, and a stream may be kept for long
        self.mailbox = None
        mailbox.num_open -= 1
        if mailbox.num_open == 0:
            mailbox.close()

    def _why_stopped(self, stop_token_ids: frozenset[int]) -> str | int | None:
        stop_string = None if self.detokenizer is None else self.detokenizer.stop_string
        if stop_string is None and self.token_ids and self.token_ids[-1] in stop_token_ids:
            return self.token_ids[-1]
        return stop_string

    def result(self, output_type: OutputType | None) -> Choice:
        text = "".join(self.texts)
        if self._parsed is None and output_type is not None and self.finish_reason is FinishReason.STOP:
            self._parsed = output_type.parse(text)
        parsed, parse_error = self._parsed or (None, None)
        return Choice(
            index=self.index,
            text=text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or FinishReason.ABORT,
            logprobs=None if self.logprobs is None else Logprobs(self.logprobs, range(len(self.logprobs))),
            parsed=parsed,
            parse_error=parse_error,
            stop_reason=self.stop_reason,
        )


class TokenStream:
    """The tokens of one request, as an async iterator of `Token`\\ s.

    The request runs from the moment that the stream exists, whether or not somebody reads. It is aborted, and its KV
    memory freed, when the stream is closed, dropped, or when the task that reads it is cancelled; and it fails when its
    tokens lie unread for ``unread_timeout``, see `EngineConfig`.

        async for token in stream: ...          # until the end; raises the request's error, typed
        stream.completion                       # text, usage and finish reason, once it has ended

    Use ``async with stream:`` or `aclose` where a reference to it may outlive the loop over it.
    """

    __slots__ = ("__weakref__", "_end", "_loop", "_mailbox", "request_id")

    def __init__(
        self,
        request_id: str,
        mailbox: Mailbox,
        loop: asyncio.AbstractEventLoop,
        abort: Callable[[str], object],
    ) -> None:
        self.request_id = request_id
        self._mailbox = mailbox
        self._loop = loop
        self._end = partial(end_call, mailbox, abort, request_id)

    @property
    def place(self) -> list[Mailbox]:
        """The mailbox, in a list that may be held without the stream, and has the request's own one as soon as there is
        one."""
        return [self._mailbox]

    def __repr__(self) -> str:
        state = "ended" if self._mailbox.done else "running"
        return f"<TokenStream {self.request_id} {state}: {sum(len(c.token_ids) for c in self._mailbox.choices)} tokens>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        mailbox = self._mailbox
        while not mailbox.pending:
            if mailbox.error is not None:
                raise self._failure()
            if mailbox.num_open == 0:
                raise StopAsyncIteration
            await self._wait()
        return mailbox.pending.popleft()

    async def read(self, at_most: int | None = None) -> list[Token]:
        """Wait for a token, and return all that have come, ``at_most`` so many: a step's as a rule, more if the reader
        is slow; [] at the end.

        Raises the request's error, once all tokens before it have been read.
        """
        try:
            tokens = [await anext(self)]
        except StopAsyncIteration:
            return []
        ready = self._ready()
        num_more = len(ready) if at_most is None else min(len(ready), at_most - 1)
        tokens += [ready.popleft() for _ in range(num_more)]
        return tokens

    def _ready(self) -> deque[Token]:
        """Return the tokens that can be taken without waiting."""
        return self._mailbox.pending

    async def _wait(self) -> None:
        """Wait until something has come. Being cancelled here ends the request, as it would end an async generator."""
        mailbox = self._mailbox
        if mailbox.waiter is not None:
            raise InvalidRequestError(f"stream {self.request_id} is already being read by another task")
        mailbox.waiter = waiter = self._loop.create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            self._end()
            raise
        except RuntimeError:  # asyncio raises it for a future of another loop than the task's
            raise InvalidRequestError(
                f"stream {self.request_id} belongs to the event loop of its engine, and can be read on that one only; "
                f"streams of an engine with own_thread=True can be read on any"
            ) from None
        finally:
            if mailbox.waiter is waiter:
                mailbox.waiter = None

    @property
    def partial(self) -> Any:
        """What the first completion, a JSON text, says so far: dicts, lists, strings and numbers; None: nothing yet,
        or no JSON was asked for.

        Each snapshot is a prefix of the final value: strings and lists grow at their end, a key is there once its value
        has begun, a number once it is complete. The text is read anew each time. Needs pydantic.
        """
        if not self._mailbox.is_json:
            return None
        from ..structured.partial_json import partial_json

        choices = self._mailbox.choices
        is_done = self._mailbox.done  # read before the texts: with own_thread more may come between two lines
        if not choices:
            return None
        has_ended = is_done and choices[0].finish_reason is FinishReason.STOP
        return partial_json("".join(choices[0].texts), has_ended=has_ended)

    @property
    def usage(self) -> Usage:
        """The tokens so far, those that have not been read yet included. ``prompt_tokens`` is 0 before the prompt is
        encoded, ``cached_tokens`` before the request's first step."""
        return self._mailbox.usage()

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Why each of the n completions has ended; None: it has not. Also of what has not been read yet. Empty
        before the engine has the request, which with ``own_thread=True`` it may not yet have when `stream` returns."""
        return tuple(choice.finish_reason for choice in self._mailbox.choices)

    @property
    def stop_reasons(self) -> tuple[str | int | None, ...]:
        """The `Choice.stop_reason` of each of the n completions, known with its finish reason."""
        return tuple(choice.stop_reason for choice in self._mailbox.choices)

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended. Raises InvalidRequestError before."""
        if not self._mailbox.done:
            raise InvalidRequestError(
                f"stream {self.request_id} has not ended yet: read it to its end, or close it, before its completion"
            )
        return self._mailbox.completion(self.request_id)

    async def wait(self) -> Completion:
        """Wait for the end without reading single tokens. Raises the request's error."""
        mailbox = self._mailbox
        while not mailbox.done:
            await self._wait()
        if mailbox.error is not None:
            raise self._failure()
        return mailbox.completion(self.request_id)

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until nothing more will come. What comes meanwhile is there at the next `read`, and wakes
        nobody. Being cancelled here ends the request."""
        mailbox = self._mailbox
        if mailbox.done:
            return
        mailbox.end_waiter = waiter = self._loop.create_future()
        try:
            await wait_at_most(seconds, waiter)
        except asyncio.CancelledError:
            self._end()
            raise
        finally:
            mailbox.end_waiter = None

    def _failure(self) -> BaseException:
        """Return the request's error, with the tokens that had come before it."""
        error = self._mailbox.error
        assert error is not None
        has_begun = self._mailbox.times.scheduled is not None
        if has_begun and isinstance(error, AEngineError) and error.completion is None:
            error.completion = self._mailbox.completion(self.request_id)
        return error

    async def aclose(self) -> None:
        """Abort the request if it still runs. Its KV memory is free from the next step on. Idempotent."""
        self._end()
        self._mailbox.pending.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        mailbox = getattr(self, "_mailbox", None)
        if mailbox is None or mailbox.done or self._loop.is_closed():
            return
        # The garbage collector may run this in any thread, and on the loop's own thread in the middle of the scheduler.
        try:
            self._loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop was closed since
            pass


def end_call(mailbox: Mailbox, abort: Callable[[str], object], request_id: str) -> None:
    """Abort the request of ``mailbox``, on the engine's loop, unless it has ended: another request may have its id by
    now."""
    if mailbox.num_open:
        abort(request_id)
