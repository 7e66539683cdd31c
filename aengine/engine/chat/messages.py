"""Values of a chat completion, as it streams and as a whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidRequestError
from ...outputs import Choice, Completion, T_co, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """Fields that all deltas have."""

    choice: int = 0
    """Which of the chat's n answers it belongs to."""
    tokens: tuple[Token, ...] = field(default=(), repr=False)
    """The tokens since the answer's delta before, with ``SamplingParams.logprobs``: each with its ``logprob`` and
    ``top_logprobs``. Tokens that are left at the end, as the end of sequence, come with a TextDelta of no text."""


@dataclass(frozen=True, slots=True)
class TextDelta(_Delta):
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta(_Delta):
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart(_Delta):
    """A call of a tool begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta(_Delta):
    """A piece of the JSON text of a call's arguments."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd(_Delta):
    """The call is complete. Never comes for a call that was cut off."""

    index: int


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of an object, whole only if ``is_complete``."""
    is_complete: bool = True
    """False: the completion ended inside it, or it is not JSON. Don't run it."""

    def parsed_arguments(self) -> dict[str, Any]:
        """Return the arguments as a dict. Raises InvalidRequestError if the call is incomplete."""
        if not self.is_complete:
            raise InvalidRequestError(
                f"the call of {self.name!r} was cut off: let the model finish it with a larger max_tokens",
                param="max_tokens",
            )
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """The model's answer. What is not there is None, or empty."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as OpenAI writes it, to go on with: ``messages.append(completion.message.to_dict())``.

        ``reasoning_content`` is for chat templates, which know how long a model should see it. Calls that were cut off
        are left out, and so are blanks between text and calls, which a template writes itself.
        """
        content = self.content.rstrip() if self.content and self.tool_calls else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
            if c.is_complete
        ]
        return message | {"tool_calls": calls} if calls else message


@dataclass(frozen=True, slots=True)
class ChatChoice(Choice[T_co]):
    """One of the n answers of a chat."""

    message: ChatMessage = field(kw_only=True)
    """Content, reasoning and tool calls, told apart."""


@dataclass(frozen=True, slots=True)
class ChatCompletion(Completion[T_co]):
    """The whole answer to a chat. ``message`` is that of its first choice."""

    choices: tuple[ChatChoice[T_co], ...]

    @property
    def message(self) -> ChatMessage:
        return self.choices[0].message
