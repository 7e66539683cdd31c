"""`ChatPrompt`: the prompt that a model is given for chat messages and tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import InvalidRequestError
from ...limits.bounds import MAX_VARIABLES
from ...limits.checks import check_num_characters
from ...limits.values import shown
from ..tokenizer.messages import WRITTEN_BY_MODEL, Messages
from ..tokenizer.tokenizer import Tokenizer
from ..tokenizer.traced_text import TracedText
from .formats import FORMATS, ReasoningFormat, ToolFormat, detect
from .history import with_calls_in_text, with_instructions, with_tools, written_out
from .syntax.markers import TextTokenId, TokenId
from .tools import tools_of

_RESERVED = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now",
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip
"""Variables of a template that a caller can't set, or sets by another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options for rendering messages through the chat template. Raises InvalidRequestError for an unknown option."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def of(
        cls,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> PromptOptions:
        """Check them, but not yet what is in ``chat_template_kwargs``: that takes its time, and `ChatPrompt.of` does.

        ``add_generation_prompt`` None: unless the final message is continued.
        """
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(value, bool) and not (value is None and name == "add_generation_prompt"):
                raise InvalidRequestError(f"{name} must be True or False", param=name)
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt begins another: "
                "give one of them",
                param="continue_final_message",
            )
        _check_mapping(chat_template_kwargs)
        return cls(
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
        )


Encode = Callable[[Tokenizer, TracedText], list[int]]


def encode_whole(tokenizer: Tokenizer, text: TracedText) -> list[int]:
    """Return the token ids of a rendered chat."""
    return tokenizer.encode(text, add_special_tokens=False)  # the template wrote the special tokens


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The text, and in which formats the answer to it comes."""

    text: TracedText
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    """Begun by the prompt, or None if it can't come any more."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        messages: Messages,
        tools: Sequence[Any] | None,
        options: PromptOptions,
    ) -> ChatPrompt:
        """Render the prompt. ``tools``: as of `tools_of`.

        Raises InvalidRequestError for those, for messages that can't be shown, and for variables that JSON can't say.
        """
        _check_variables(options.chat_template_kwargs)
        if options.continue_final_message:
            _check_continued(messages[-1])
        last = messages[-1]
        tool_format, reasoning = detect(tokenizer.chat_template_source)
        shown = [tool.for_template() for tool in tools_of(tools)]
        if not tool_format.shows_calls:  # the template shows no tools or calls in a known way
            messages = written_out(messages, tool_format)
            if shown and tool_format.tools_key:
                messages = with_tools(messages, tool_format.tools_key, shown)
            elif shown:
                takes_system = _takes_system(tokenizer)
                messages = with_instructions(messages, tool_format.describe(shown), takes_system=takes_system)
            shown = []
        elif tool_format.calls_in_text:
            messages = with_calls_in_text(messages, tool_format)
        text = tokenizer.apply_chat_template(
            messages,
            tools=shown or None,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.chat_template_kwargs,
        )
        if tool_format.channels and options.continue_final_message and last.get("content"):
            tool_format, reasoning = replace(FORMATS["json"], instructions=""), None  # it continues the final message
        if reasoning is not None:
            if options.continue_final_message:
                reasoning = _within(reasoning, last)
            else:  # a message's own "<think>" begins nothing
                reasoning = reasoning.after_prompt(text.without_messages())
        return cls(text, tool_format, reasoning)

    def ids(self, tokenizer: Tokenizer, max_model_len: int | None = None, encode: Encode = encode_whole) -> list[int]:
        """Return the token ids, by ``encode``. Raises ContextLengthError, before any work, for a text that can't fit
        into so many, and InvalidRequestError for one that is not Unicode."""
        if max_model_len is not None:
            check_num_characters(len(self.text), max_model_len)
        try:
            return encode(tokenizer, self.text)
        except InvalidRequestError as error:
            if error.param == "prompt":  # a chat has no such argument: messages or a tool's description are at fault
                error.param = "messages"
            raise


def token_ids_of(tokenizer: Tokenizer) -> TokenId:
    """Return a function that finds the id of a marker by its name."""

    def token_id(name: str) -> int | None:
        found = tokenizer.added_token_id(name)
        return found if found is None or found in tokenizer.special_ids else TextTokenId(found)

    return token_id


def _within(reasoning: ReasoningFormat, continued: Mapping[str, Any]) -> ReasoningFormat | None:
    """Return the reasoning that a continued message is in, or None if its answer proper has begun."""
    content = continued.get("content")
    if content and not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    is_open = content.rfind(reasoning.begin) > content.rfind(reasoning.end) if content else True
    return replace(reasoning, begun=True, is_continued=True) if is_open else None


def _takes_system(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders a system message. Some templates raise for one, others ignore it."""
    probe = [{"role": "system", "content": "system-probe"}, {"role": "user", "content": "Hello"}]
    try:
        return "system-probe" in tokenizer.apply_chat_template(probe)
    except InvalidRequestError:
        return False


def _check_mapping(extra: object) -> None:
    name = "chat_template_kwargs"
    if not isinstance(extra, Mapping | None):
        raise InvalidRequestError(f"{name} must be a mapping of names to values, or None", param=name)
    if extra and len(extra) > MAX_VARIABLES:
        raise InvalidRequestError(f"{name} has {len(extra)} variables: there may be {MAX_VARIABLES}", param=name)


def _check_variables(extra: Mapping[Any, Any]) -> None:
    """Raise InvalidRequestError unless the value maps names to what JSON can say, none of them reserved."""
    name = "chat_template_kwargs"
    for key, value in extra.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise InvalidRequestError(f"{name} has {shown(key)}, which is no name of a variable", param=name)
        if key in _RESERVED:
            raise InvalidRequestError(f"{name} can't set {key!r}: it is not a variable of the caller's", param=name)
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name}[{key!r}] can't be written as JSON: {error}", param=name) from None


def _check_continued(message: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError unless a completion can continue the message."""
    wrong = None
    if message["role"] != "assistant":
        wrong = f"it is of role {shown(message['role'])}"
    elif message.get("tool_calls"):
        wrong = "it has tool calls"
    elif not any(message.get(key) for key in WRITTEN_BY_MODEL):
        wrong = "it has no content: leave it out, and the answer begins as any does"
    if wrong is not None:
        raise InvalidRequestError(
            f"continue_final_message goes on with the last message, which must be an assistant's text; {wrong}",
            param="continue_final_message",
        )
