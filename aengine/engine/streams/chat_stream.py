"""`ChatStream`: the answers of one chat as they come.

TokenStream: token ──_Answer (of the token's index): ChatParser──> deltas, and at the end a ChatMessage
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...errors import AEngineError, InvalidRequestError
from ...outputs import Choice, FinishReason, Token, Usage
from ...params import SamplingParams
from ..chat.messages import ChatChoice, ChatCompletion, ChatMessage, Delta, ReasoningDelta, TextDelta
from ..chat.plan import ChatPlan
from ..structured.partial_json import partial_json
from .token_stream import TokenStream

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ChatStream"]


class _Answer:
    """One of the n answers of a chat, made of the tokens that have been read so far."""

    def __init__(self, index: int, plan: ChatPlan, *, has_logprobs: bool) -> None:
        self._index = index
        self._plan = plan
        self._parser = plan.new_parser()
        # tokens since the last delta; None: no log-probabilities were asked for
        self._tokens: list[Token] | None = [] if has_logprobs else None
        self.has_ended = False  # the last token of the answer has been read
        self.num_reasoning_tokens = 0
        self._num_unsure = 0  # tokens since the last reasoning, which count as reasoning if more of it follows

    @property
    def message(self) -> ChatMessage:
        return self._parser.message

    def read(self, token: Token) -> list[Delta]:
        """Parse one more token. Returns the deltas that are certain now."""
        if self._tokens is not None:
            self._tokens.append(token)
        is_stop = token.finish_reason is FinishReason.STOP
        deltas = self._parser.feed(token.text, self._plan.marker_of(token.token_id, is_stop=is_stop))
        self._count_reasoning(deltas)
        if token.finish_reason is None:
            return self._with_index(deltas)
        self.has_ended = True
        return self.finish(deltas)

    def _count_reasoning(self, deltas: Sequence[Delta]) -> None:
        """Count a token as reasoning, given the ``deltas`` that it made. One that made none counts if more reasoning
        follows."""
        if any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.num_reasoning_tokens += self._num_unsure + 1
            self._num_unsure = 0
        elif self.num_reasoning_tokens:
            self._num_unsure += 1

    def finish(self, deltas: Sequence[Delta] = ()) -> list[Delta]:
        """Return the answer's last deltas. If tokens with log-probabilities are left over, there is at least one,
        perhaps without text. Idempotent."""
        rest = self._parser.finish()
        if any(isinstance(delta, ReasoningDelta) for delta in rest):
            self.num_reasoning_tokens += self._num_unsure
        last = [*deltas, *rest]
        if self._tokens and not last:
            last.append(TextDelta(""))
        return self._with_index(last)

    def _with_index(self, deltas: list[Delta]) -> list[Delta]:
        """Set the answer's index in all deltas, and the tokens read since the last delta in the first."""
        if deltas and self._index:
            deltas = [replace(delta, choice=self._index) for delta in deltas]
        if deltas and self._tokens:
            deltas[0] = replace(deltas[0], tokens=tuple(self._tokens))
            self._tokens.clear()
        return deltas

    def choice(self, plain: Choice) -> ChatChoice:
        """Make the chat's choice of a completion's choice."""
        message = self.message
        choice, output_type = _chat_choice(plain, message), self._plan.output_type
        if choice.finish_reason is not FinishReason.STOP or output_type is None or message.tool_calls:
            return choice
        parsed, parse_error = output_type.parse(message.content or "")
        return replace(choice, parsed=parsed, parse_error=parse_error)


def _chat_choice(plain: Choice, message: ChatMessage) -> ChatChoice:
    return ChatChoice(
        plain.index,
        plain.text,
        plain.token_ids,
        plain.finish_reason,
        plain.logprobs,
        message=message,
        stop_reason=plain.stop_reason,
    )


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

    def __init__(self, stream: TokenStream, params: SamplingParams) -> None:
        """``stream``: of a request whose prompt is a `ChatRequest`. How its answers are read is in its plan, which is
        there before the first token."""
        self._stream = stream
        self._params = params
        self._answers: list[_Answer] = []  # one for each completion; empty before the chat is planned
        self._is_json = False  # the shape of the answer is a JSON schema
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
            await self._read_tokens(at_most=1)  # one, so that `message` agrees with the deltas handed out
        if not self._deltas:
            raise StopAsyncIteration
        return self._taken(self._deltas.popleft())

    async def read(self) -> list[Delta]:
        """Wait for a delta, and return all that have come: a step's as a rule, more if the reader is slow; [] at the
        end.

        Raises the request's error, once all deltas before it have been read.
        """
        if not self._deltas:
            await self._read_tokens(at_most=None)
        deltas = [self._taken(delta) for delta in self._deltas]
        self._deltas.clear()
        return deltas

    async def _read_tokens(self, at_most: int | None) -> None:
        """Read tokens, ``at_most`` so many at once, until they make a delta, or to the end."""
        while not self._deltas and not self._is_read:
            try:
                tokens = await self._stream.read(at_most)
            except AEngineError as error:
                self._has_failed = True
                if error.completion is not None:
                    error.completion = self._new_completion()
                raise
            self._begin()
            if not tokens:
                self._is_read = self._has_ended = True
                for answer in self._answers:
                    self._deltas.extend(answer.finish())
            for token in tokens:
                self._deltas.extend(self._answers[token.index].read(token))

    def _taken(self, delta: Delta) -> Delta:
        if self._is_json and isinstance(delta, TextDelta) and delta.choice == 0:
            self._texts.append(delta.text)
        return delta

    @property
    def message(self) -> ChatMessage:
        """What has come so far; the whole answer once the stream has been read to its end."""
        return self.messages[0]

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages of the n answers, as `message`."""
        if not self._answers:
            return (ChatMessage(),) * self._params.n
        return tuple(answer.message for answer in self._answers)

    @property
    def partial(self) -> Any:
        """What the answer's text, a JSON text, says so far, as `TokenStream.partial`; None: nothing yet, or no JSON was
        asked for."""
        if not self._is_json:
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
        is_read = dict.fromkeys((i for i, answer in enumerate(self._answers) if answer.has_ended), True)
        is_read |= {delta.choice: False for delta in self._deltas}
        return tuple(reason if is_read.get(i) else None for i, reason in enumerate(reasons))

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
        completion, plan = self._stream.completion, self._plan
        self._begin()
        if plan is None:  # the chat ended before it was planned
            choices = tuple(_chat_choice(plain, ChatMessage()) for plain in completion.choices)
        else:
            pairs = zip(self._answers, completion.choices, strict=True)
            choices = tuple(answer.choice(plain) for answer, plain in pairs)
        num_reasoning_tokens = sum(answer.num_reasoning_tokens for answer in self._answers)
        usage = replace(completion.usage, reasoning_tokens=num_reasoning_tokens)
        return ChatCompletion(completion.request_id, choices, usage, completion.warnings, completion.timings)

    @property
    def _plan(self) -> ChatPlan | None:
        return self._stream._mailbox.plan

    def _begin(self) -> None:
        """Make a reader for each answer, once the chat is planned."""
        plan = self._plan
        if not self._answers and plan is not None:
            self._is_json = plan.shape is not None and plan.shape.kind == "json_schema"
            has_logprobs = self._params.logprobs is not None
            self._answers = [_Answer(i, plan, has_logprobs=has_logprobs) for i in range(self._params.n)]

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
            for answer in self._answers:
                answer.finish()
            self._deltas.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
