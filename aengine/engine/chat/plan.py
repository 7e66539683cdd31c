"""Chats with tools, reasoning and an answer of a shape, over the engine's plain streams.

ChatRequest ──Admission.submit──> UserRequest ──plan_chat (a thread)──> ChatPlan: prompt ids + GrammarSpec
                                      │                                     │
                                      └──> TokenStream ──> ChatStream <─────┘ how the answer is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...errors import InvalidRequestError
from ...limits.checks import check_size, is_long
from ...params import SamplingParams, check_params
from ..structured.output_type import OnUnsupported, OutputType, check_on_unsupported, constraint_of
from ..structured.spec import GrammarSpec, spec_of
from ..tokenizer.messages import Messages, checked_messages
from ..tokenizer.prompt import PromptPart
from ..tokenizer.tokenizer import Tokenizer
from .compose import compose
from .formats import ReasoningFormat, ToolFormat, markers_of
from .parser import ChatParser
from .prompt import ChatPrompt, Encode, PromptOptions, encode_whole, token_ids_of
from .tools import Tool, ToolChoice, tools_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(PromptPart):
    """A caller's chat request; a prompt, for `Admission.submit`. Its messages are checked; they and the tools are lists
    of its own.

    Raises InvalidRequestError for what can be told at once, also for parameters that no chat can have.
    """

    kind: ClassVar[str] = "chat"

    messages: Messages
    params: SamplingParams = field(default_factory=SamplingParams)
    """With ``structured_output``, the shape of the answer, if it is not that of ``output_type``."""
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    output_type: Any = None
    on_unsupported: OnUnsupported = "error"
    """Whether keywords that can't be enforced, of the tools' schemas and the answer's, are left out."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    prompt_options: PromptOptions = field(init=False)
    """The last three."""

    def __post_init__(self) -> None:
        check_params(self.params)
        if not self.params.detokenize:
            raise InvalidRequestError("a chat needs the text: detokenize must be True", param="detokenize")
        object.__setattr__(self, "messages", checked_messages(self.messages))
        if isinstance(self.tools, list):
            object.__setattr__(self, "tools", self.tools.copy())
        parallel = self.parallel_tool_calls
        if parallel is not None and not isinstance(parallel, bool):
            raise InvalidRequestError("parallel_tool_calls must be True, False or None", param="parallel_tool_calls")
        if self.output_type is not None and self.params.structured_output is not None:
            raise InvalidRequestError("give output_type or params.structured_output, not both", param="output_type")
        check_on_unsupported(self.on_unsupported)
        options = PromptOptions.of(self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message)
        object.__setattr__(self, "prompt_options", options)

    @property
    def is_long(self) -> bool:
        """See `TextPart.is_long`."""
        shape = self.params.structured_output
        given = (self.messages, self.tools, self.chat_template_kwargs, shape and shape.json_schema)
        return is_long(*given)

    @property
    def is_relaxed(self) -> bool:
        return self.on_unsupported == "relax"

    def shape(self) -> tuple[GrammarSpec | None, OutputType | None]:
        """Return the shape of an answer without calls, and its type. Raises GrammarError and InvalidRequestError."""
        wanted, known = self.params.structured_output, None
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
    shape: GrammarSpec | None  # the part of ``spec`` for an answer without calls
    tools: tuple[Tool, ...]  # tools that the answer may call
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    output_type: OutputType | None
    tokenizer: Tokenizer = field(repr=False)
    stop: Sequence[str]  # the request's own stop strings
    stop_token_ids: frozenset[int]  # ids that end the answer
    marker_ids: frozenset[int]  # control tokens that tell the parts of the answer apart

    _parser: ChatParser = field(init=False, repr=False)  # a parser that has read nothing, copied for each answer

    def __post_init__(self) -> None:
        token_id = token_ids_of(self.tokenizer)
        parser = ChatParser(self.tool_format, self.reasoning, self.tools, self.shape is not None, token_id)
        object.__setattr__(self, "_parser", parser)

    def new_parser(self) -> ChatParser:
        """Make the parser of one answer. Quick, whatever the tools."""
        return copy(self._parser)

    def marker_of(self, token_id: int, *, is_stop: bool) -> int | None:
        """Return the token's id, which may be that of a marker; None if a stop string ended the text before it.

        ``is_stop``: the token ended the answer with FinishReason.STOP.
        """
        if not is_stop or token_id in self.stop_token_ids:
            return token_id
        name = self.tokenizer.token_text(token_id)
        return token_id if any(stop in name for stop in self.stop) else None

    def has_call(self, texts: Sequence[str], token_ids: Sequence[int]) -> bool:
        """Return whether an answer that ended with FinishReason.STOP calls a tool. ``texts``: the text of each
        token."""
        if not self.tools:
            return False
        parser, last, start = self.new_parser(), len(token_ids) - 1, 0
        for i, token_id in enumerate(token_ids):
            if i == last or token_id in self.marker_ids:
                parser.feed("".join(texts[start : i + 1]), self.marker_of(token_id, is_stop=i == last))
                start = i + 1
        parser.finish()
        return any(call.is_complete for call in parser.message.tool_calls)


def plan_chat(
    tokenizer: Tokenizer,
    asked: ChatRequest,
    max_model_len: int | None = None,
    encode: Encode = encode_whole,
) -> ChatPlan:
    """Plan a chat. Blocking, for a thread: large schemas take their time. ``encode`` makes the prompt's
    tokens of its text.

    Raises InvalidRequestError, GrammarError, and ContextLengthError for a prompt that can't be of fewer than
    ``max_model_len`` tokens, before any work that grows with it.
    """
    if max_model_len is not None:
        check_size((asked.messages, asked.tools, asked.chat_template_kwargs), max_model_len)
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
        token_id=token_ids_of(tokenizer),
        relax=asked.is_relaxed,
    )
    return ChatPlan(
        prompt=prompt.ids(tokenizer, max_model_len, encode),
        spec=spec,
        shape=shape,
        tools=allowed,
        tool_format=tool_format,
        reasoning=reasoning,
        output_type=output_type,
        tokenizer=tokenizer,
        stop=asked.params.stop,
        stop_token_ids=tokenizer.eos_token_ids | frozenset(asked.params.stop_token_ids),
        marker_ids=frozenset(
            token_id for _, token_id in markers_of(tool_format, reasoning, token_ids_of(tokenizer)).ids
        ),
    )
