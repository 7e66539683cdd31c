"""`RemoteMailbox`: the mailbox of a request whose engine is in another process; the wire fills it.

the engine's process: TokenStream, ChatStream ══ items of each read ══> RemoteMailbox <──__anext__── RemoteTokenStream
                      allowed so many reads   <══ "more" ═════════════                                    ChatStream
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any

from ..chat import ChatCompletion, Delta
from ..engine.streams.chat_answers import ReceivedAnswers
from ..engine.streams.chat_record import ChatRecord
from ..engine.streams.chat_stream import ChatStream
from ..engine.streams.logprobs import Logprobs, LogprobTable, TopLogprobs
from ..engine.streams.prompt_logprobs import PromptLogprobs
from ..engine.streams.token_stream import Mailbox, TokenStream
from ..errors import AEngineError
from ..outputs import Completion, FinishReason, Timings, Token, Usage
from ..params import SamplingParams

WINDOW = 64
"""Reads of the engine's stream that may be under way or unread here. More lie in the engine, where its unread_timeout
counts."""

Ends = tuple[Sequence[str | None], Sequence[str | int | None]]
"""Finish reasons and stop reasons of the n completions."""


class RemoteMailbox(Mailbox):
    """What one request gets from the engine's process. ``pending`` has tokens, or a chat's deltas."""

    def __init__(
        self,
        request_id: str,
        send: Callable[..., None],
        *,
        is_chat: bool = False,
        final_only: bool = False,
        **how: Any,
    ) -> None:
        """``send`` sends a message about the request: its kind, and arguments. The others are as of `Mailbox`."""
        super().__init__(final_only=final_only, **how)
        self.request_id = request_id
        self.is_chat = is_chat
        self._sends = send
        self._held: list[tuple[Any, ...]] | None = []  # what to send once the request has been sent
        self._is_asked = False  # the engine was asked for what comes
        self._wants_end_only = final_only
        self._num_reads = 0  # reads since the engine was last told of them
        self._counts: Sequence[int] = (0, 0, 0, 0)  # fields of the `Usage` so far
        self._timings = Timings()
        self._prompt_logprobs: PromptLogprobs | None = None
        self._whole: Completion | None = None  # the completion of a chat, which its deltas alone do not make

    def begin(self, *request: Any) -> None:
        """Send the request, unless it has been ended, and then what has been asked about it. Raises InvalidRequestError
        for what is no plain data."""
        if not self.done:
            self._sends("begin", *request)
            held, self._held = self._held or [], None
            for message in held:
                self._sends(*message)

    def send(self, *message: Any) -> None:
        """Send a message about the request: its kind, and arguments."""
        if self._held is None:
            self._sends(*message)
        else:
            self._held.append(message)

    # -- what the connection brings

    def put_tokens(self, tokens: Sequence[Token], counts: Sequence[int], ends: Ends | None) -> None:
        """Take the tokens of a read.

        ``counts``: tokens of the prompt, generated and cached, until then; ``ends``: None: no completion has ended.
        """
        if self.done:
            return
        for token in tokens:
            choice, value, top = self.choices[token.index], token.logprob, token.top_logprobs
            choice.token_ids.append(token.token_id)
            choice.texts.append(token.text)
            if choice.logprobs is not None:
                row = (value, *top.columns()) if value is not None and isinstance(top, TopLogprobs) else None
                choice.logprobs.append(token.token_id, row)
        self.put(tokens, counts, ends)

    def put(self, items: Sequence[Any], counts: Sequence[int], ends: Ends | None) -> None:
        """Take the deltas of a read, likewise."""
        if self.done:
            return
        if self.times.scheduled is None:
            self.times.scheduled = perf_counter()
        self.pending.extend(items)
        self._counts = counts
        if ends is not None:
            self._note_ends(ends)
        self._num_reads += 1
        if self.end_waiter is not None:  # the reader takes all of it when it has rested
            self.ask()
        self.wake()

    def finish(self, whole: Completion, ends: Ends) -> None:
        """End: the request has ended without an error. ``whole`` has no choices if all tokens have come."""
        if self.done:
            return
        usage, self._timings, self.warnings = whole.usage, whole.timings, whole.warnings
        self.weight_versions = whole.weight_versions
        if isinstance(whole.prompt_logprobs, PromptLogprobs):
            self._prompt_logprobs = whole.prompt_logprobs
        self._counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens
        self._note_ends(ends)
        for choice, got in zip(self.choices, whole.choices):
            choice.token_ids, choice.texts = list(got.token_ids), [got.text]
            if isinstance(got.logprobs, Logprobs):
                choice.logprobs = LogprobTable(*got.logprobs.columns())
        if self.is_chat:
            self._whole = whole
        self._end_all(FinishReason.ABORT)

    def _note_ends(self, ends: Ends) -> None:
        for choice, reason, stop_reason in zip(self.choices, *ends, strict=True):
            choice.finish_reason = None if reason is None else FinishReason(reason)
            choice.stop_reason = stop_reason

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.error = error
            come = error.completion if isinstance(error, AEngineError) else None
            if self.is_chat:
                self._whole = come
            self._end_all(FinishReason.ERROR)

    def abort(self) -> None:
        if not self.done:
            self._end_all(FinishReason.ABORT)

    def _end_all(self, reason: FinishReason) -> None:
        """End the completions that have not ended, with this reason."""
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or reason
            choice.mailbox = None
        self.num_open = 0
        self.close()

    # -- what the reader asks for

    def ask(self) -> None:
        """Allow the engine to send more."""
        if self._wants_end_only or self.done:
            return
        if not self._is_asked:
            self._is_asked = True
            self.send("more", WINDOW)
        elif self._num_reads >= WINDOW // 2:
            self.send("more", self._num_reads)
            self._num_reads = 0

    def ask_for_end(self) -> None:
        """Have the engine send the end, and nothing before it."""
        if not self._wants_end_only and not self.done:
            self._wants_end_only = True
            self.send("more", None)

    def leave(self, _: str = "") -> None:
        """End the request, which nobody reads any more."""
        if not self.done:
            self.send("end")
            self.abort()

    def prompt_logprobs(self) -> PromptLogprobs | None:
        return self._prompt_logprobs

    def completion(self, request_id: str) -> Completion:
        return super().completion(request_id) if self._whole is None else self._whole

    def usage(self) -> Usage:
        return Usage(*self._counts)

    def timings(self) -> Timings:
        return self._timings


class RemoteTokenStream(TokenStream):
    """See `TokenStream`; of a chat it brings deltas."""

    __slots__ = ()

    _mailbox: RemoteMailbox

    def _wait(self) -> Coroutine[Any, Any, None]:
        if asyncio.get_running_loop() is self._loop:  # on another one nothing is sent, and waiting raises
            self._mailbox.ask()
        return super()._wait()


class RemoteChatStream(ChatStream):
    """See `ChatStream`; its deltas are made in the engine's process, and lie in the mailbox until they are read."""

    _answers: ReceivedAnswers
    _stream: RemoteTokenStream

    def __init__(self, stream: RemoteTokenStream, params: SamplingParams) -> None:
        super().__init__(stream, params, ReceivedAnswers(stream._mailbox))
        self._deltas = stream._mailbox.pending  # type: ignore[assignment]  # a chat has deltas there

    @property
    def record(self) -> ChatRecord:
        return ChatRecord(self._stream.place, self._answers.said)

    async def _read_tokens(self, at_most: int | None) -> None:
        mailbox = self._stream._mailbox
        while not self._deltas and not self._is_read:
            if mailbox.error is not None:
                error = self._stream._failure()
                self._note_failure(error)
                raise error
            if mailbox.done:
                self._is_read = self._has_ended = True
            else:
                await self._stream._wait()

    def _note_read(self, deltas: Sequence[Delta]) -> None:
        self._answers.handed_out.extend(deltas)  # they become part of the message when that is asked for
        super()._note_read(deltas)

    async def wait(self) -> ChatCompletion:
        """Wait for the end without reading single deltas. Raises the request's error."""
        if asyncio.get_running_loop() is self._stream._loop:
            self._stream._mailbox.ask_for_end()
        completion = await super().wait()
        self._texts = [completion.message.content or ""]
        return completion
