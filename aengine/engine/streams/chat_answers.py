"""The n answers of a chat under way: made of tokens by the chat's plan, or of deltas that another process has made.

TokenStream: token ──_Answer (of the token's index): ChatParser──> deltas, and at the end a ChatMessage
the engine's process: delta ──MessageBuilder──> ChatMessage
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ...outputs import Choice, Completion, FinishReason, Token
from ...params import SamplingParams
from ..chat.message_builder import MessageBuilder
from ..chat.messages import ChatChoice, ChatCompletion, ChatMessage, Delta, ReasoningDelta, TextDelta
from ..chat.plan import ChatPlan

if TYPE_CHECKING:
    from ..structured.output_type import OutputType
    from .token_stream import Mailbox


class Answers(Protocol):
    """Interface of the answers of one chat, as `ChatStream` uses it."""

    is_json: bool
    """The shape of an answer is a JSON schema."""

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """What each answer says so far."""
        ...

    def read(self, items: list[Any]) -> list[Delta]:
        """Take what the request's stream has brought. Returns the deltas that are certain now."""
        ...

    def finish(self) -> list[Delta]:
        """Return the last deltas: the stream has ended. Idempotent."""
        ...

    def unread(self) -> Collection[int]:
        """Return the indices of answers of which not all has been given to `read`."""
        ...

    def completion(self, plain: Completion) -> ChatCompletion:
        """Make the chat's completion of what the stream has as its completion."""
        ...


class ParsedAnswers:
    """The answers of a chat whose tokens are read here."""

    def __init__(self, plan: ChatPlan, params: SamplingParams) -> None:
        self.is_json = plan.shape is not None and plan.shape.kind == "json_schema"
        has_logprobs = params.logprobs is not None
        self._answers = [_Answer(i, plan, has_logprobs=has_logprobs) for i in range(params.n)]

    @property
    def messages(self) -> Sequence[ChatMessage]:
        return tuple(answer.message for answer in self._answers)

    def read(self, items: list[Token]) -> list[Delta]:
        deltas: list[Delta] = []
        for token in items:
            deltas += self._answers[token.index].read(token)
        return deltas

    def finish(self) -> list[Delta]:
        return [delta for answer in self._answers for delta in answer.finish()]

    def unread(self) -> Collection[int]:
        return {i for i, answer in enumerate(self._answers) if not answer.has_ended}

    def completion(self, plain: Completion) -> ChatCompletion:
        choices = [answer.choice(choice) for answer, choice in zip(self._answers, plain.choices, strict=True)]
        return chat_completion(plain, choices, self.num_reasoning_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(answer.num_reasoning_tokens for answer in self._answers)


class _Answer:
    """One of the n answers of a chat, made of the tokens that have been read so far."""

    def __init__(self, index: int, plan: ChatPlan, *, has_logprobs: bool) -> None:
        self._index = index
        self._plan = plan
        self._parser = plan.new_parser()
        # Tokens since the last delta; None: no log-probabilities were asked for.
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
        return _with_value(_chat_choice(plain, self.message), self._plan.output_type)


class ReceivedAnswers:
    """The answers of a chat whose tokens another process reads."""

    def __init__(self, mailbox: Mailbox) -> None:
        """``mailbox``: of the request; what is pending in it are deltas, not tokens."""
        self.is_json = mailbox.is_json
        self._mailbox = mailbox
        self._builders = [MessageBuilder(None, {}) for _ in mailbox.choices]
        self.handed_out: list[Delta] = []  # deltas that no builder has yet: few readers ask for the message so far

    @property
    def messages(self) -> Sequence[ChatMessage]:
        handed_out, self.handed_out = self.handed_out, []
        for delta in handed_out:
            self._builders[delta.choice].add(delta)
        if self._mailbox.done and not self._mailbox.pending:
            whole = self._mailbox.completion("")
            if isinstance(whole, ChatCompletion):  # the completion also has what no delta brought
                return [choice.message for choice in whole.choices]
        return [builder.message for builder in self._builders]

    def said(self, mailbox: Mailbox) -> tuple[ChatMessage, int]:
        """Return what the first answer says so far, read or not, and how many of its tokens are reasoning."""
        whole = mailbox.completion("") if mailbox.done else None
        if isinstance(whole, ChatCompletion):
            return whole.message, whole.usage.reasoning_tokens
        before = self.messages[0]  # the builders have all that was handed out then
        unread: list[Any] = [delta for delta in mailbox.pending if delta.choice == 0]  # type: ignore[attr-defined]
        if not unread:
            return before, 0
        builder = deepcopy(self._builders[0])
        for delta in unread:
            builder.add(delta)
        return builder.message, 0

    def read(self, items: list[Delta]) -> list[Delta]:
        return items

    def finish(self) -> list[Delta]:
        return []

    def unread(self) -> Collection[int]:
        return ()

    def completion(self, plain: Completion) -> ChatCompletion:
        if isinstance(plain, ChatCompletion):
            output_type = self._mailbox.output_type
            return replace(plain, choices=tuple(_with_value(choice, output_type) for choice in plain.choices))
        pairs = zip(plain.choices, self.messages, strict=True)
        return chat_completion(
            plain, [_chat_choice(replace(one, text=said.content or ""), said) for one, said in pairs]
        )


def chat_completion(
    plain: Completion, choices: Sequence[ChatChoice] | None = None, num_reasoning_tokens: int = 0
) -> ChatCompletion:
    """Make a chat's completion of a request's. ``choices``: None: the chat ended before it was planned, and says
    nothing."""
    if choices is None:
        choices = [_chat_choice(choice, ChatMessage()) for choice in plain.choices]
    usage = replace(plain.usage, reasoning_tokens=num_reasoning_tokens)
    end = usage, plain.warnings, plain.timings
    rest: dict[str, Any] = {"prompt_logprobs": plain.prompt_logprobs, "weight_versions": plain.weight_versions}
    return ChatCompletion(plain.request_id, tuple(choices), *end, **rest)


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


def _with_value(choice: ChatChoice, output_type: OutputType | None) -> ChatChoice:
    """Return the choice with the value of its message's content, if the answer is one of the type."""
    if choice.finish_reason is not FinishReason.STOP or output_type is None or choice.message.tool_calls:
        return choice
    parsed, parse_error = output_type.parse(choice.message.content or "")
    return replace(choice, parsed=parsed, parse_error=parse_error)
