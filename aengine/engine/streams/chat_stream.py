"""`ChatStream`: the answers of one chat as they come.

TokenStream: tokens ──Answers──> deltas, and at the end a ChatMessage each
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from ...errors import AEngineError, InvalidRequestError
from ...outputs import FinishReason, Usage
from ...params import SamplingParams
from ..chat.messages import ChatCompletion, ChatMessage, Delta, TextDelta
from ..structured.partial_json import partial_json
from .chat_answers import Answers, ParsedAnswers, chat_completion
from .chat_record import ChatRecord, said_by_tokens
from .token_stream import TokenStream


class ChatStream:
    """The answer of one chat as it comes: an async iterator of deltas.

        async for delta in stream:      # ReasoningDelta, TextDelta, ToolCallStart, ToolCallDelta, ToolCallEnd
        stream.message                  # a ChatMessage: content, reasoning, tool_calls; so far, or whole at the end
        stream.partial                  # with an output_type or a JSON schema: what the answer says so far
        stream.completion               # once it has ended: usage, finish reason, parsed

    With ``n`` answers, ``delta.choice`` says whose the delta is, ``stream.messages`` has all of them, and ``message``
    and ``partial`` are the first one's. With ``logprobs``, ``delta.tokens`` are the tokens that it was made of.

    Closing, dropping or cancelling it ends the request, as with `TokenStream`.
    """

    def __init__(self, stream: TokenStream, params: SamplingParams, answers: Answers | None = None) -> None:
        """
        Args:
            stream: of a request whose prompt is a `ChatRequest`. How its answers are read is in its plan, which is
                there before the first token.
            answers: those that take what the stream brings, if these are no tokens.
        """
        self._stream = stream
        self._params = params
        self._answers = answers  # None: the chat is yet to be planned
        self._texts: list[str] = []  # texts of the first answer's deltas that have been read, if it is JSON
        self._deltas: deque[Delta] = deque()
        self._is_read = False  # the stream was read to its end, or closed
        self._has_ended = False  # the stream ended without being closed by the caller
        self._has_failed = False  # all that came before the error has been read
        self._completion: ChatCompletion | None = None

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if not self._deltas:
            await self._read_tokens(at_most=1)  # more, and `message` would be ahead of the deltas handed out
        if not self._deltas:
            raise StopAsyncIteration
        delta = self._deltas.popleft()
        self._note_read((delta,))
        return delta

    async def read(self) -> list[Delta]:
        """Wait for a delta, and return all that have come: a step's as a rule, more if the reader is slow; [] at the
        end.

        Raises the request's error, once all deltas before it have been read.
        """
        if not self._deltas:
            await self._read_tokens(at_most=None)
        deltas = list(self._deltas)
        self._deltas.clear()
        self._note_read(deltas)
        return deltas

    async def _read_tokens(self, at_most: int | None) -> None:
        """Read tokens, ``at_most`` so many at once, until they make a delta, or to the end."""
        while not self._deltas and not self._is_read:
            try:
                tokens = await self._stream.read(at_most)
            except AEngineError as error:
                self._note_failure(error)
                raise
            answers = self._planned()
            if not tokens:
                self._is_read = self._has_ended = True
            if answers is not None:
                self._deltas.extend(answers.read(tokens) if tokens else answers.finish())

    def _note_failure(self, error: BaseException) -> None:
        self._has_failed = True
        if isinstance(error, AEngineError) and error.completion is not None:
            error.completion = self._new_completion()

    def _note_read(self, deltas: Sequence[Delta]) -> None:
        if self._answers is not None and self._answers.is_json:
            self._texts += [delta.text for delta in deltas if isinstance(delta, TextDelta) and delta.choice == 0]

    @property
    def message(self) -> ChatMessage:
        """What has come so far; the whole answer once the stream has been read to its end."""
        return self.messages[0]

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages of the n answers, as `message`."""
        if self._answers is None:
            return (ChatMessage(),) * self._params.n
        return tuple(self._answers.messages)

    @property
    def partial(self) -> Any:
        """What the answer's text, a JSON text, says so far, as `TokenStream.partial`; None: nothing yet, or no JSON was
        asked for."""
        if self._answers is None or not self._answers.is_json:
            return None
        has_ended = self._has_ended and not self._deltas and self.completion.finish_reason is FinishReason.STOP
        return partial_json("".join(self._texts), has_ended=has_ended)

    @property
    def usage(self) -> Usage:
        """The tokens so far, as `TokenStream.usage`."""
        return self._stream.usage

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Why each of the n answers has ended; None: it has not, or not all of its deltas have been read."""
        reasons = self._stream.finish_reasons or (None,) * self._params.n
        if self._is_read or self._has_failed:
            return reasons
        if self._answers is None:
            return (None,) * self._params.n
        unread = {*self._answers.unread(), *(delta.choice for delta in self._deltas)}
        return tuple(None if i in unread else reason for i, reason in enumerate(reasons))

    @property
    def stop_reasons(self) -> tuple[str | int | None, ...]:
        """The `Choice.stop_reason` of each of the n answers, known with its finish reason."""
        finish_reasons = self.finish_reasons
        stop_reasons = self._stream.stop_reasons or (None,) * self._params.n
        return tuple(None if finish is None else stop for finish, stop in zip(finish_reasons, stop_reasons))

    @property
    def completion(self) -> ChatCompletion:
        """Once it has been read to its end, or closed: each choice with its ``message``; ``parsed`` is of the message's
        content.

        Raises InvalidRequestError before.
        """
        if not self._is_read:
            raise InvalidRequestError(f"stream {self.request_id} has not been read to its end yet")
        if self._completion is None:
            self._completion = self._new_completion()
        return self._completion

    def _new_completion(self) -> ChatCompletion:
        completion, answers = self._stream.completion, self._planned()
        return chat_completion(completion) if answers is None else answers.completion(completion)

    @property
    def record(self) -> ChatRecord:
        """What has come, read or not; it may be held without the stream."""
        return ChatRecord(self._stream.place, said_by_tokens)

    def _planned(self) -> Answers | None:
        """Return what reads the answers; None before the chat is planned."""
        if self._answers is None and (plan := self._stream._mailbox.plan) is not None:
            self._answers = ParsedAnswers(plan, self._params)
        return self._answers

    async def wait(self) -> ChatCompletion:
        """Read to the end."""
        async for _ in self:
            pass
        return self.completion

    async def rest(self, seconds: float) -> None:
        """Wait without reading, see `TokenStream.rest`."""
        await self._stream.rest(seconds)

    async def aclose(self) -> None:
        """Abort the request if it still runs; what has come is the message. Idempotent."""
        await self._stream.aclose()
        if not self._is_read:
            self._is_read = True
            if self._answers is not None:
                self._answers.finish()
            self._deltas.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
