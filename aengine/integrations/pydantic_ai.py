"""`AEngineModel`: a pydantic-ai model over an engine in the same process.

agent = Agent(AEngineModel(engine), tools=[...], output_type=Report)

Tools, the schema of a native output and free text are one grammar, so an answer is always one of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from ..chat import ChatCompletion, ChatMessage, Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ..errors import (
    AEngineError,
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    InternalError,
    RequestError,
)
from ..outputs import FinishReason
from ..params import OnUnsupported, StructuredOutput
from .openai_style import async_side
from .settings import (
    allowed_tools,
    answer_message,
    as_of_type,
    engine_settings,
    function_call,
    function_tool,
    reasoning_variables,
    with_one_system_message,
)

try:
    from pydantic_ai.exceptions import (
        IncompleteToolCall,
        ModelAPIError,
        ModelContextWindowExceededError,
        ModelOverloadedError,
        ModelRequestRejectedError,
        ModelServerError,
        ModelTimeoutError,
        ModelUnavailableError,
        UserError,
    )
    from pydantic_ai.messages import (
        CachePoint,
        CompactionPart,
        ModelMessage,
        ModelRequest,
        ModelResponse,
        ModelResponsePart,
        ModelResponseStreamEvent,
        SystemPromptPart,
        TextContent,
        TextPart,
        ThinkingPart,
        ToolCallPart,
        ToolReturnPart,
        UserContent,
        UserPromptPart,
    )
    from pydantic_ai.messages import FinishReason as TheirFinishReason
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, check_allow_model_requests
    from pydantic_ai.profiles import ModelProfile, ModelProfileSpec
    from pydantic_ai.settings import ModelSettings, ToolOrOutput
    from pydantic_ai.tools import RunContext
    from pydantic_ai.usage import RequestUsage
except ImportError as error:
    raise ImportError(f"{__name__} needs pydantic-ai: pip install pydantic-ai-slim ({error})") from error

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from ..engine.streams.chat_stream import ChatStream
    from ..llm import LLM

__all__ = ["AEngineModel", "AEngineStreamedResponse"]

SYSTEM = "aengine"
KEEP = 60.0
"""Seconds for which a conversation's KV is kept after each request; ``extra_body={"keep": ...}`` has others."""
_EQUAL_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)
"""Settings that are called as the engine's."""

PROFILE = ModelProfile(
    supports_tools=True,
    supports_json_schema_output=True,
    supports_json_object_output=True,
    supports_thinking=True,
    supports_image_input=False,
    supports_document_input=False,
    supports_audio_file_input=False,
    supports_video_input=False,
    default_structured_output_mode="native",
    native_output_requires_schema_in_instructions=True,  # the grammar holds the answer to it, and says nothing of it
    supported_native_tools=frozenset(),
)

_FINISH_REASONS: dict[FinishReason, TheirFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_call",
    FinishReason.LENGTH: "length",
}

_ERRORS: list[tuple[type[AEngineError], type[ModelAPIError]]] = [
    (ContextLengthError, ModelContextWindowExceededError),
    (EngineOverloadedError, ModelOverloadedError),
    (DeadlineExceededError, ModelTimeoutError),
    (RequestError, ModelRequestRejectedError),
    (InternalError, ModelServerError),
    (EngineError, ModelUnavailableError),
]


class AEngineModel(Model[None]):
    """A pydantic-ai model that an engine answers.

    Of `ModelSettings` it takes max_tokens, temperature, top_p, top_k, seed, stop_sequences, presence_penalty,
    frequency_penalty, logit_bias, parallel_tool_calls, tool_choice, thinking, and timeout, which is the deadline of the
    whole request; ``extra_body`` has other parameters of `SamplingParams` and `ChatOptions` by their names.

    A tool's arguments and a native or prompted output follow their schema. What a grammar can't hold of it is left to
    pydantic-ai's validation; with ``strict=True`` it is an error. A prompted output differs from a native one in its
    prompt only.

    The engine's errors are pydantic-ai's `ModelAPIError`\\ s, each with the engine's as its cause: so a `FallbackModel`
    goes on with its next model.
    """

    system = SYSTEM
    unsupported_settings = frozenset({"extra_headers", "max_retries", "service_tier"})

    def __init__(
        self,
        engine: AsyncLLM | LLM,
        *,
        model_name: str | None = None,
        profile: ModelProfileSpec | None = None,
        settings: ModelSettings | None = None,
    ) -> None:
        """
        Args:
            engine: running when a request is made; on the agent's event loop, with ``own_thread=True``, or an `LLM`.
            model_name: in messages, traces and usage. None: the name the engine was made with.
            profile: changes to the model's profile, such as ``{"default_structured_output_mode": "tool"}``.
            settings: of all requests, as far as an agent or a run gives no others.
        """
        self.engine = async_side(engine)
        self._model_name = model_name or self.engine.config.model_name
        self._changes = profile
        super().__init__(settings=settings, profile=self._changed_profile)

    def _changed_profile(self, default: ModelProfile) -> ModelProfile:
        profile = ModelProfile(**{**default, **PROFILE})
        if self.engine.state == "running":
            profile["context_window"] = self.engine.describe()["max_model_len"]
        if callable(self._changes):
            return self._changes(profile)
        return ModelProfile(**{**profile, **(self._changes or {})})

    @property
    def model_name(self) -> str:
        return self._model_name

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        check_allow_model_requests()
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        with _api_errors(self._model_name):
            async with self._begin(messages, settings, parameters) as stream:
                completion = await stream.wait()
            _check_whole(completion)
        return ModelResponse(
            parts=_parts_of(completion.message),
            usage=_usage_of(completion),
            model_name=self._model_name,
            provider_name=SYSTEM,
            provider_response_id=completion.request_id,
            provider_details=_details_of(completion),
            finish_reason=_FINISH_REASONS[completion.finish_reason],
        )

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        check_allow_model_requests()
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        with _api_errors(self._model_name):
            stream = self._begin(messages, settings, parameters)
        async with stream:
            with _api_errors(self._model_name):
                first = await stream.read()  # what is wrong with the request is raised here, and not while it is read
            yield AEngineStreamedResponse(parameters, stream, first, self._model_name)

    async def count_tokens(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> RequestUsage:
        """Count the tokens of the prompt as the model gets it, with its chat template and tools."""
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        with _api_errors(self._model_name):
            _, options = self._engine_settings(settings or {}, parameters)
            number = await self.engine.async_tokenizer.count(
                self._messages(messages, parameters),
                options.get("tools"),
                chat_template_kwargs=options.get("chat_template_kwargs"),
            )
        return RequestUsage(input_tokens=number)

    # -- a request to the engine

    def _begin(
        self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: ModelRequestParameters
    ) -> ChatStream:
        params, options = self._engine_settings(settings or {}, parameters)
        if conversation := messages[-1].conversation_id:  # a session, whose KV is kept while it waits for tools
            options = {"session_id": f"pydantic-ai-{conversation}", "keep": KEEP, **options}
        return self.engine.stream_chat(self._messages(messages, parameters), params, **options)

    def _engine_settings(self, settings: ModelSettings, parameters: ModelRequestParameters) -> Any:
        timeout = settings.get("timeout")
        if timeout is not None and not isinstance(timeout, int | float):
            raise UserError(
                "timeout must be a number of seconds: it is the deadline of the request, not of a connection"
            )
        more = settings.get("extra_body")
        if more is not None and not isinstance(more, Mapping):
            raise UserError("extra_body must be a dict of parameters of aengine's SamplingParams and ChatOptions")
        tools = parameters.declared_tool_defs
        output = parameters.output_object
        is_strict = any(tool.strict is True for tool in tools.values()) or bool(output and output.strict)
        on_unsupported: OnUnsupported = "error" if is_strict else "relax"
        given: dict[str, Any] = {
            **{name: settings.get(name) for name in _EQUAL_NAMES},
            "stop": settings.get("stop_sequences"),
            "deadline": timeout,
            "chat_template_kwargs": reasoning_variables(parameters.thinking),
            "on_unsupported": on_unsupported,
        }
        if output is not None:
            schema = output.json_schema if output.strict else as_of_type(output.json_schema)
            given["structured_output"] = StructuredOutput(json_schema=schema, on_unsupported=on_unsupported)
        if tools:
            given["tools"] = [
                function_tool(tool.name, tool.description, tool.parameters_json_schema, tool.strict)
                for tool in tools.values()
            ]
            given["tool_choice"] = _tool_choice(settings, parameters)
            given["parallel_tool_calls"] = settings.get("parallel_tool_calls")
        return engine_settings(given, more)

    def _messages(self, messages: Sequence[ModelMessage], parameters: ModelRequestParameters) -> list[dict[str, Any]]:
        """Write the messages as OpenAI's; instructions come after the system prompts that begin them."""
        written: list[dict[str, Any]] = []
        for message in messages:
            written += _of_request(message) if isinstance(message, ModelRequest) else [_of_response(message)]
        num_leading = next((i for i, message in enumerate(written) if message["role"] != "system"), len(written))
        instructions = self._get_instruction_parts(messages, parameters) or ()
        written[num_leading:num_leading] = [{"role": "system", "content": part.content} for part in instructions]
        return with_one_system_message(written)


@dataclass
class AEngineStreamedResponse(StreamedResponse):
    """An answer as it comes."""

    provider_name: ClassVar[str] = SYSTEM
    provider_url: ClassVar[None] = None
    _stream: ChatStream
    _first: list[Delta]
    _model_name: str
    _timestamp: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def close_stream(self) -> None:
        await self._stream.aclose()

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        self.provider_response_id = self._stream.request_id
        deltas = self._first
        with _api_errors(self._model_name):
            while deltas:
                for delta in deltas:
                    for event in self._events(delta):
                        yield event
                deltas = await self._stream.read()
            completion = self._stream.completion
            self._usage = _usage_of(completion)
            self.provider_details = _details_of(completion)
            if not self.cancelled:
                _check_whole(completion)
                self.finish_reason = _FINISH_REASONS[completion.finish_reason]

    def _events(self, delta: Delta) -> Iterator[ModelResponseStreamEvent]:
        parts = self._parts_manager
        match delta:
            case TextDelta(text=text) if text:
                # Blanks before the calls of tools must not pass for an answer.
                yield from parts.handle_text_delta(vendor_part_id=None, content=text, ignore_leading_whitespace=True)
            case ReasoningDelta(text=text):
                yield from parts.handle_thinking_delta(vendor_part_id=None, content=text)
            case ToolCallStart():
                event = parts.handle_tool_call_delta(
                    vendor_part_id=delta.index, tool_name=delta.name, args="", tool_call_id=delta.id
                )
                if event is not None:
                    yield event
            case ToolCallDelta():
                event = parts.handle_tool_call_delta(vendor_part_id=delta.index, args=delta.arguments)
                if event is not None:
                    yield event

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def timestamp(self) -> datetime:
        return self._timestamp


# -- their messages and tools as the engine's


def _of_request(message: ModelRequest) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    files: list[UserContent] = []
    for part in message.parts:
        if isinstance(part, SystemPromptPart):
            written.append({"role": "system", "content": part.content})
        elif isinstance(part, UserPromptPart):
            written.append({"role": "user", "content": _text_of(part.content)})
        elif isinstance(part, ToolReturnPart):
            text, more = part.model_response_str_and_user_content()
            files += more
            written.append({"role": "tool", "tool_call_id": part.tool_call_id, "name": part.tool_name, "content": text})
        elif isinstance(part, CompactionPart):
            written.append({"role": "user", "content": part.content or ""})
        else:
            kind = type(part).__name__
            raise UserError(f"a {kind} can't be sent as it is: call model.prepare_messages(messages) first")
    if files:
        written.append({"role": "user", "content": _text_of(files)})
    return written


def _text_of(content: str | Sequence[UserContent]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for item in content:
        if isinstance(item, str | TextContent):
            texts.append(item if isinstance(item, str) else item.content)
        elif not isinstance(item, CachePoint):
            raise UserError(f"the engine reads text only, and no {type(item).__name__}")
    return "\n\n".join(texts)


def _of_response(message: ModelResponse) -> dict[str, Any]:
    """Write an earlier answer; what only its provider could read again is left out."""
    texts = [part.content for part in message.parts if isinstance(part, TextPart)]
    thoughts = [part.content for part in message.parts if isinstance(part, ThinkingPart) and part.content]
    calls = [
        function_call(part.tool_call_id, part.tool_name, part.args_as_json_str())
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    return answer_message("\n\n".join(texts) if texts else None, thoughts, calls, "\n\n")


def _tool_choice(settings: ModelSettings, parameters: ModelRequestParameters) -> Any:
    """Return which tools may or must be called. A text may be the answer unless the output is by a tool."""
    choice = settings.get("tool_choice")
    tools = list(parameters.declared_tool_defs)
    outputs = [tool.name for tool in parameters.output_tools]
    mode = "auto" if parameters.allow_text_output else "required"
    names = tools
    if choice == "required":
        mode = "required"
    elif choice == "none" or choice == []:
        names = outputs
    elif isinstance(choice, list):
        mode, names = "required", [name for name in tools if name in choice]
        if not names:
            raise UserError(f"none of tool_choice={choice} is there; there are: {', '.join(tools)}")
    elif isinstance(choice, ToolOrOutput):
        names = [name for name in tools if name in choice.function_tools or name in outputs]
    if not names:
        return "none"
    return allowed_tools(mode, names)


# -- the engine's answers as theirs


def _parts_of(message: ChatMessage) -> list[ModelResponsePart]:
    parts: list[ModelResponsePart] = []
    if message.reasoning:
        parts.append(ThinkingPart(message.reasoning))
    if message.content and message.content.strip():
        parts.append(TextPart(message.content))
    parts += [ToolCallPart(call.name, call.arguments, tool_call_id=call.id) for call in message.tool_calls]
    return parts


def _usage_of(completion: ChatCompletion[Any]) -> RequestUsage:
    usage = completion.usage
    return RequestUsage(
        input_tokens=usage.prompt_tokens,
        cache_read_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _details_of(completion: ChatCompletion[Any]) -> dict[str, Any]:
    details: dict[str, Any] = {"finish_reason": str(completion.finish_reason)}
    if completion.warnings:
        details["warnings"] = list(completion.warnings)
    return details


class _AbortedError(RequestError):
    """Somebody else ended the request: by `AsyncLLM.abort` or `AsyncLLM.abort_all`."""


def _check_whole(completion: ChatCompletion[Any]) -> None:
    """Raise for what an agent would take for whole: an answer that was aborted, a call that was cut off."""
    if completion.finish_reason not in _FINISH_REASONS:
        raise _AbortedError(f"the request {completion.request_id} was aborted")
    for call in completion.message.tool_calls:
        if not call.is_complete:
            raise IncompleteToolCall(f"the answer was cut off inside the call of {call.name!r}: raise max_tokens")


@contextmanager
def _api_errors(model_name: str) -> Iterator[None]:
    """Raise the engine's errors as pydantic-ai's."""
    try:
        yield
    except AEngineError as error:
        kind = next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))
        retry_after = error.retry_after if isinstance(error, EngineOverloadedError) else None
        raise kind(model_name, str(error), retry_after=retry_after) from error
