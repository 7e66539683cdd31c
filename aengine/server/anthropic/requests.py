"""Bodies of Anthropic's requests.

Of the body itself a field that is not here is refused by name, as Anthropic does. Blocks and tools may have others: the
hints about display that newer clients add change nothing in an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StrictBool, Tag, field_validator, model_validator

from ...limits.bounds import MAX_TOOLS
from ...limits.retention import SECONDS
from ...params import SamplingParams, StructuredOutput
from ..http import HTTPError
from ..openai.requests import Body, Ignored, Many, RequestBody, Text, Variables, at_most
from .errors import THREAD_UNSUPPORTED


class Open(Body):
    """Parent of what may have further fields, which have no effect."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CacheControl(Open):
    """Asks for the KV up to its place to be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Cached(Open):
    """Parent of what may ask for that."""

    cache_control: CacheControl | None = None


class TextBlock(Cached):
    type: Literal["text"]
    text: Text


class ThinkingBlock(Open):
    """What the model has thought. Its signature is not asked for: thoughts of other models may come, too."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Open):
    """Reasoning in an encrypted form, which only its author can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Cached):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]


class OtherBlock(Open):
    """A block that the engine can't read."""

    type: Any = None

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, block: Any) -> Any:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise ValueError('must be a block, as {"type": "text", "text": "..."}')
        raise ValueError(f"blocks of type {block['type'][:60]!r} are not supported: the engine reads text only")


def _kind_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result") else "other"


def _text_or_other(block: Any) -> str:
    return "text" if _kind_of(block) == "text" else "other"


TextOnly = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], Discriminator(_text_or_other)
]


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | Many[TextOnly] | None = None
    is_error: StrictBool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind_of),
]


class Message(Open):
    role: Literal["user", "assistant", "system"]
    content: Text | Many[Block]


class ToolBody(Cached):
    """A tool of the client's."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_others(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(
                f"tools of type {kind[:60]!r} are not supported: only those with an input_schema, which the client runs"
            )
        return tool


class ToolChoiceBody(Open):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool = False

    @model_validator(mode="after")
    def check_name(self) -> ToolChoiceBody:
        if self.type == "tool" and self.name is None:
            raise ValueError("the name of the tool is missing")
        return self


class ThinkingBody(Open):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Literal["summarized", "omitted"] | None = None


class FormatBody(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfigBody(Open):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: FormatBody | None = None


class CountBody(Body):
    """The prompt of a message: body of ``/v1/messages/count_tokens``."""

    model: str
    messages: Many[Message]
    system: Text | Many[TextOnly] | None = None
    tools: Annotated[Many[ToolBody], at_most(MAX_TOOLS, "tools")] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    output_format: FormatBody | None = None
    cache_control: CacheControl | None = None
    # fields of the engine's own
    chat_template_kwargs: Variables | None = None
    # what would change the answer, and what the engine does not have
    mcp_servers: Many[Any] | None = None
    container: Any = None
    compaction: Any = None
    thread: Any = None
    # fields that have no effect here
    betas: Ignored = None
    context_management: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    @field_validator("mcp_servers", "container", "compaction")
    @classmethod
    def refuse(cls, value: Any) -> None:
        if value:
            raise ValueError("it is not supported: the engine only answers messages")

    def check_thread(self) -> None:
        """Raise HTTPError 400 for a thread, whose messages a server would keep. Anthropic's client heeds the code, and
        sends all messages then."""
        if self.thread:
            message = "thread is not supported: send all messages of the conversation"
            raise HTTPError(400, message, code=THREAD_UNSUPPORTED, param="thread")

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the model's chat template."""
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type != "disabled")
        effort = self.output_config and self.output_config.effort
        if effort:
            variables.setdefault("reasoning_effort", "high" if effort in ("xhigh", "max") else effort)
        return variables

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        """Return the tools as the engine takes them. All are held to their schemas, as far as that is possible."""
        return [
            {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
            for tool in self.tools or ()
        ] or None


class MessagesBody(CountBody, RequestBody):
    """Body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stream: StrictBool = False
    stop_sequences: Many[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # a field of the engine's own
    # fields that have no effect here
    metadata: Ignored = None
    service_tier: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    fallbacks: Ignored = None
    fallback_credit_token: Ignored = None

    @property
    def wanted_keep(self) -> float | None:
        return max((SECONDS[control.ttl] for control in self._cache_controls()), default=None)

    def _cache_controls(self) -> Iterator[CacheControl]:
        lists = (self.tools, self.system, *(message.content for message in self.messages))
        parts = [part for one in lists if isinstance(one, list) for part in one]
        for part in (self, *parts):
            if (control := getattr(part, "cache_control", None)) is not None:
                yield control

    def params(self) -> SamplingParams:
        """Return the sampling parameters of the body. Raises HTTPError 400 and InvalidRequestError."""
        asked = self.output_config and self.output_config.format
        if asked and self.output_format:
            message = "give output_config.format or output_format, not both"
            raise HTTPError(400, message, param="output_format")
        shape = asked or self.output_format
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")},
            "stop": self.stop_sequences,
            "structured_output": StructuredOutput(json_schema=shape.schema_) if shape else None,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    @property
    def place_of_shape(self) -> str:
        """The field that says which shape the answer has."""
        return "output_format.schema" if self.output_format else "output_config.format.schema"

    def field_names(self) -> dict[str, str]:
        return {
            "stop": "stop_sequences",
            "structured_output": self.place_of_shape.removesuffix(".schema"),
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        }

    def chat_options(self) -> dict[str, Any]:
        """Return the options of the chat, as of `AsyncLLM.stream_chat`."""
        choice = self.tool_choice
        is_single = choice is not None and choice.disable_parallel_tool_use and bool(self.tools)
        return {
            "tools": self.tool_dicts(),
            "tool_choice": choice.model_dump(include={"type", "name"}, exclude_none=True) if choice else None,
            "parallel_tool_calls": False if is_single else None,
            "chat_template_kwargs": self.template_variables() or None,
            "on_unsupported": "error" if self.is_strict else "relax",
            **self.request_options(),
        }

    @property
    def is_strict(self) -> bool:
        """Whether a schema that can't be held as a whole is an error: the caller counts on it."""
        return any(tool.strict for tool in self.tools or ())

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"
