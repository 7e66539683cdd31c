"""Chats with tools, reasoning and an answer of a shape, over the engine's plain streams.

ChatRequest ──Admission.submit──> UserRequest ──plan_chat (a thread)──> ChatPlan: prompt ids + GrammarSpec
                                      │                                     │
                                      └──> TokenStream ──> ChatStream <─────┘ how the answer is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..errors import InvalidRequestError
from ..params import SamplingParams, StructuredOutput
from ..structured.asked_type import OnUnsupported, check_on_unsupported, constraint_of
from ..structured.output_type import OutputType
from ..structured.spec import GrammarSpec, spec_of
from ..tokenizer.messages import Messages, checked_messages
from ..tokenizer.prompt import PromptPart
from ..tokenizer.tokenizer import Tokenizer
from . import (
    ReasoningFormat,
    Tool,
    ToolChoice,
    ToolFormat,
    compose,
    tools_of,
)
from .formats import Markers
from .prompt import ChatPrompt, PromptOptions, marker_ids

__all__ = ["ChatPlan", "ChatRequest", "plan_chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(PromptPart):
    """A caller's chat request, without sampling parameters; a prompt, for `Admission.submit`.

    Raises InvalidRequestError for what can be told at once. Its messages are checked, and a list of its own.
    """

    kind: ClassVar[str] = "chat"

    messages: Messages
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    output_type: Any = None
    structured_output: StructuredOutput | None = None
    """The shape of the answer, if it is not that of ``output_type``."""
    on_unsupported: OnUnsupported = "error"
    """Whether keywords that can't be enforced, of the tools' schemas and the answer's, are left out."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    prompt_options: PromptOptions = field(init=False)
    """The last three."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", checked_messages(self.messages))
        parallel = self.parallel_tool_calls
        if parallel is not None and not isinstance(parallel, bool):
            raise InvalidRequestError("parallel_tool_calls must be True, False or None", param="parallel_tool_calls")
        if self.output_type is not None and self.structured_output is not None:
            raise InvalidRequestError("give output_type or params.structured_output, not both", param="output_type")
        check_on_unsupported(self.on_unsupported)
        options = PromptOptions.of(self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message)
        object.__setattr__(self, "prompt_options", options)

    @classmethod
    def of(cls, params: SamplingParams, **asked: Any) -> ChatRequest:
        """Raises InvalidRequestError, also for parameters that no chat can have."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
        if not params.detokenize:
            raise InvalidRequestError("a chat needs the text: detokenize must be True", param="detokenize")
        return cls(structured_output=params.structured_output, **asked)

    @property
    def is_relaxed(self) -> bool:
        return self.on_unsupported == "relax"

    def shape(self) -> tuple[GrammarSpec | None, OutputType | None]:
        """Return the shape of an answer without calls, and its type. Raises GrammarError and InvalidRequestError."""
        wanted, known = self.structured_output, None
        if self.output_type is not None:
            known = OutputType.of(self.output_type)
            wanted = constraint_of(known, self.on_unsupported)
        if wanted is None:
            return None, None
        return spec_of(replace(wanted, on_unsupported="relax") if self.is_relaxed else wanted), known


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The prompt and the constraint of a chat, and how its answer is read."""

    prompt: list[int]
    spec: GrammarSpec | None
    shape: GrammarSpec | None  # of an answer that calls nothing; a part of the spec
    tools: tuple[Tool, ...]  # that the answer may call
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    output_type: OutputType | None
    marker_ids: frozenset[int]  # control tokens that tell the parts of the answer apart


def plan_chat(tokenizer: Tokenizer, asked: ChatRequest, max_model_len: int | None = None) -> ChatPlan:
    """Plan a chat. Blocking, for a thread: large schemas take their time.

    Raises InvalidRequestError, GrammarError, and ContextLengthError for a prompt that can't be of fewer than
    ``max_model_len`` tokens.
    """
    known = tools_of(asked.tools)
    choice = ToolChoice.of(asked.tool_choice, known)
    allowed = choice.allowed(known)
    shape, output_type = asked.shape()
    parallel = asked.parallel_tool_calls
    prompt = ChatPrompt.of(tokenizer, asked.messages, known, asked.prompt_options)
    tool_format, reasoning = prompt.tool_format, prompt.reasoning
    spec = compose(
        tools=known,
        tool_choice=choice,
        parallel=tool_format.parallel if parallel is None else parallel,
        tool_format=tool_format,
        reasoning=reasoning,
        shape=shape,
        token_id=marker_ids(tokenizer),
        relax=asked.is_relaxed,
    )
    return ChatPlan(
        prompt=prompt.ids(tokenizer, max_model_len),
        spec=spec,
        shape=shape,
        tools=allowed,
        tool_format=tool_format,
        reasoning=reasoning,
        output_type=output_type,
        marker_ids=frozenset(token_id for _, token_id in Markers.of(tool_format, reasoning, marker_ids(tokenizer)).ids),
    )
