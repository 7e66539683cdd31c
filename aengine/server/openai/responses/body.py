"""The body of a response."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, StrictBool

from ....limits.bounds import MAX_NAME_CHARACTERS, MAX_TOOLS
from ....params import SamplingParams, StructuredOutput
from ..requests import (
    Body,
    Ignored,
    JSONSchemaFormat,
    Many,
    Refused,
    SamplingBody,
    Text,
    TopLogprobs,
    Variables,
    any_strict,
    at_most,
    structured_output_of,
    template_variables,
    tool_choice_of,
)
from .tools import ResponseTools

_LOGPROBS = "message.output_text.logprobs"

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
"""What the answer repeats, and what is stored with it."""


class TextFormat(JSONSchemaFormat):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None  # type: ignore[assignment]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(Body):
    effort: str | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class ResponseStreamOptions(Body):
    include_obfuscation: Ignored = None


class ResponseBody(SamplingBody):
    """The body of a response."""

    input: str | Many[dict[str, Any]]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: StrictBool | None = None
    max_output_tokens: int | None = None
    tools: Annotated[Many[dict[str, Any]], at_most(MAX_TOOLS, "tools")] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Many[str] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Annotated[dict[Name, Name], at_most(16, "entries")] | None = None
    user: Name | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # fields of vLLM's
    chat_template_kwargs: Variables | None = None
    # fields that have no effect here
    max_tool_calls: Ignored = None
    access_programs: Ignored = None
    client_metadata: Ignored = None
    background_options: Ignored = None
    image: Ignored = None
    # fields that are not supported
    background: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    moderation: Refused = None
    prompt: Refused = None

    _chain: str | None = PrivateAttr(None)

    def go_on_with(self, chain: str) -> None:
        """Note the responses that it goes on with, which are a session if it names no other."""
        self._chain = chain

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key or self._chain

    @cached_property
    def functions(self) -> ResponseTools:
        """The tools that can be called. Raises HTTPError 400."""
        return ResponseTools.of(self.tools)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    @property
    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def place_of_shape(self) -> str:
        """The field that says which shape the answer has."""
        return "text.format.schema" if self.structured_outputs is None else self.structured_outputs.place

    def field_names(self) -> dict[str, str]:
        names = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        return super().field_names() | names

    def params(self) -> SamplingParams:
        """Return the sampling parameters of the body. Raises HTTPError 400 and InvalidRequestError."""
        return self.sampling_params(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured_output=self._structured_output(),
        )

    def _structured_output(self) -> StructuredOutput | None:
        wanted, structured = self.text_format, self.structured_outputs
        place = "text.format.schema"
        return structured_output_of(wanted.type, wanted, structured, param="text.format", place=place)

    def chat_options(self) -> dict[str, Any]:
        """Return the options of the chat, as of `AsyncLLM.stream_chat`."""
        effort = self.reasoning.effort if self.reasoning else None
        tools = self.functions.functions or None
        is_strict = any_strict(tools) or bool(self.text_format.strict)
        options = {
            "tools": tools,
            "tool_choice": tool_choice_of(self.tool_choice, tools),
            "parallel_tool_calls": self.parallel_tool_calls if tools else None,
            "chat_template_kwargs": template_variables(self.chat_template_kwargs, effort),
            "on_unsupported": "error" if is_strict else "relax",
        }
        return options | self.request_options()
