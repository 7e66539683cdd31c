"""`AEngineModel`: a model of OpenAI's Agents SDK over an engine in the same process.

agent = Agent(name="assistant", model=AEngineModel(engine), tools=[...], output_type=Report)

items ──Converter──> messages ──> stream_chat ──> chunks of a chat completion ──ChatCmplStreamHandler──> events

The two in the middle are the SDK's own, as its other models for chat completions use them: so the events, items and ids
are those that its runner knows.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from ..chat.messages import ChatCompletion, ChatMessage, Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ..errors import EngineError, EngineOverloadedError, RequestError
from ..outputs import FinishReason, Usage
from ..params import StructuredOutput
from .openai_style import async_side
from .settings import (
    as_of_type,
    engine_settings,
    function_tool,
    model_name_of,
    reasoning_variables,
    with_one_system_message,
)

try:
    from agents import (
        AgentOutputSchemaBase,
        GenerationSpanData,
        Handoff,
        ModelBehaviorError,
        ModelProvider,
        ModelResponse,
        ModelRetryAdvice,
        ModelRetryAdviceRequest,
        ModelSettings,
        ModelTracing,
        Span,
        TResponseInputItem,
        UserError,
        generation_span,
    )
    from agents import Model as SDKModel
    from agents import Tool as SDKTool
    from agents import Usage as SDKUsage
    from agents.items import TResponseStreamEvent
    from agents.models.chatcmpl_converter import Converter
    from agents.models.chatcmpl_stream_handler import ChatCmplStreamHandler
    from agents.models.fake_id import FAKE_RESPONSES_ID
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage
    from openai.types.responses import Response, ResponsePromptParam
    from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
except ImportError as error:
    raise ImportError(f"{__name__} needs openai-agents: pip install openai-agents ({error})") from error

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from ..llm import LLM
    from ..streams.chat_stream import ChatStream

__all__ = ["AEngineModel", "AEngineProvider"]


class AEngineModel(SDKModel):
    """A model of the Agents SDK that an engine answers.

    Of `ModelSettings` it takes temperature, top_p, frequency_penalty, presence_penalty, max_tokens, tool_choice,
    parallel_tool_calls, reasoning.effort; ``extra_body`` and ``extra_args`` have other parameters of `SamplingParams`
    and `ChatOptions` by their names. Those about OpenAI's servers (store, metadata, extra_headers, ...) are without
    effect; what would change the answer and isn't there (top_logprobs, prompt, previous_response_id, conversation_id)
    is a `UserError`. A timeout, retries and tracing are the runner's.

    The schema of the output is held to in every turn, beside the tools. What a grammar can't hold of a schema is left
    to the SDK's validation, unless the tool or the output is strict, as it is by default: then it is an error.

    The engine's errors are raised as they are; the retry policies of a runner get advice about them.
    """

    def __init__(self, engine: AsyncLLM | LLM, *, model_name: str | None = None) -> None:
        """
        Args:
            engine: running when a request is made; on the runner's event loop, with ``own_thread=True``, or an `LLM`.
            model_name: in traces. None: the name the engine was made with.
        """
        self.engine = async_side(engine)
        self.model = model_name or model_name_of(self.engine)

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        tools: list[SDKTool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> ModelResponse:
        _check_unsupported(previous_response_id, conversation_id, prompt)
        with self._span(model_settings, tracing) as span:
            messages = _messages(system_instructions, input, self.model)
            if tracing.include_data():
                span.span_data.input = messages
            async with self._begin(messages, model_settings, tools, output_schema, handoffs) as stream:
                completion = await stream.wait()
            usage = completion.usage
            span.span_data.usage = _span_usage(usage)
            _check_whole(completion)
            message = _message(completion.message)
            if tracing.include_data():
                span.span_data.output = [message.model_dump()]
            details = {"model": self.model, "response_id": completion.request_id}
            return ModelResponse(
                output=Converter.message_to_output_items(message, provider_data=details),
                usage=SDKUsage(
                    requests=1,
                    input_tokens=usage.prompt_tokens,
                    output_tokens=usage.completion_tokens,
                    total_tokens=usage.total_tokens,
                    input_tokens_details=_input_details(usage),
                    output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
                ),
                response_id=None,  # there is nothing on a server to go on from
                request_id=completion.request_id,
            )

    async def stream_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        tools: list[SDKTool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> AsyncGenerator[TResponseStreamEvent, None]:
        _check_unsupported(previous_response_id, conversation_id, prompt)
        with self._span(model_settings, tracing) as span:
            messages = _messages(system_instructions, input, self.model)
            if tracing.include_data():
                span.span_data.input = messages
            stream = self._begin(messages, model_settings, tools, output_schema, handoffs)
            response = Response(
                id=FAKE_RESPONSES_ID,
                created_at=time.time(),
                model=self.model,
                object="response",
                output=[],
                tool_choice="auto",
                tools=[],
                parallel_tool_calls=model_settings.parallel_tool_calls is not False,
                temperature=model_settings.temperature,
                top_p=model_settings.top_p,
                reasoning=model_settings.reasoning,
            )
            chunks: Any = self._chunks(stream)
            events: Any = ChatCmplStreamHandler.handle_stream(response, chunks, model=self.model)
            async with aclosing(chunks), aclosing(events):
                async for event in events:
                    if event.type == "response.completed":
                        span.span_data.usage = _span_usage(stream.completion.usage)
                        if tracing.include_data():
                            span.span_data.output = [event.response.model_dump()]
                    yield event

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        """Say that another try may help when the engine was full or has failed, and not when the request is wrong."""
        error = request.error
        if isinstance(error, EngineOverloadedError):
            return ModelRetryAdvice(True, retry_after=error.retry_after, replay_safety="safe", reason=str(error))
        if isinstance(error, EngineError | RequestError):
            return ModelRetryAdvice(isinstance(error, EngineError), replay_safety="safe", reason=str(error))
        return None

    @contextmanager
    def _span(self, settings: ModelSettings, tracing: ModelTracing) -> Iterator[Span[GenerationSpanData]]:
        """Trace a request as the SDK's other models do."""
        config = settings.to_traceable_dict() | {"model_impl": "aengine"}
        if not tracing.include_data():
            config.pop("metadata", None)
        with generation_span(model=self.model, model_config=config, disabled=tracing.is_disabled()) as span:
            try:
                yield span
            except Exception as error:
                text = str(error) if tracing.include_data() else type(error).__name__
                span.set_error({"message": "Error getting response", "data": {"error": text}})
                raise

    def _begin(
        self,
        messages: list[dict[str, Any]],
        settings: ModelSettings,
        tools: list[SDKTool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
    ) -> ChatStream:
        if settings.top_logprobs is not None:
            raise UserError("top_logprobs is not supported by aengine's model")
        functions = [Converter.tool_to_openai(tool)["function"] for tool in tools]
        functions += [Converter.convert_handoff_tool(handoff)["function"] for handoff in handoffs]
        has_schema = output_schema is not None and not output_schema.is_plain_text()
        is_strict = any(function.get("strict") for function in functions)
        is_strict |= output_schema is not None and has_schema and output_schema.is_strict_json_schema()
        given: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "frequency_penalty": settings.frequency_penalty,
            "presence_penalty": settings.presence_penalty,
            "max_tokens": settings.max_tokens,
            "chat_template_kwargs": reasoning_variables(settings.reasoning.effort if settings.reasoning else None),
            "on_unsupported": "error" if is_strict else "relax",
        }
        if output_schema is not None and has_schema:
            schema = output_schema.json_schema()
            given["structured_output"] = (
                StructuredOutput(json_schema=schema, on_unsupported="error")
                if output_schema.is_strict_json_schema()
                else StructuredOutput(json_schema=as_of_type(schema), on_unsupported="relax")
            )
        choice: Any = Converter.convert_tool_choice(settings.tool_choice)
        if functions:
            given["tools"] = [
                function_tool(f["name"], f.get("description"), f.get("parameters") or {}, f.get("strict"))
                for f in functions
            ]
            given["tool_choice"] = choice if isinstance(choice, str | dict) else None
            given["parallel_tool_calls"] = settings.parallel_tool_calls
        more = {**_mapping(settings.extra_body, "extra_body"), **(settings.extra_args or {})}
        params, options = engine_settings(given, more)
        return self.engine.stream_chat(messages, params, **options)

    async def _chunks(self, stream: ChatStream) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yield the answer as chunks of a chat completion, which is what the SDK makes its events of."""
        head = {
            "id": stream.request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.model,
        }

        def chunk(change: dict[str, Any], reason: str | None = None, **more: Any) -> ChatCompletionChunk:
            choices = [{"index": 0, "delta": change, "finish_reason": reason}]
            return ChatCompletionChunk.model_validate({**head, "choices": choices, **more})

        has_text = False
        async with stream:
            while deltas := await stream.read():
                for delta in deltas:
                    if not has_text and isinstance(delta, TextDelta):
                        has_text = bool(delta.text.strip())
                        if not has_text:  # blanks before the calls of tools are no message
                            continue
                    change = _change(delta)
                    if change is not None:
                        yield chunk(change)
            completion = stream.completion
            _check_whole(completion)
            yield chunk({}, str(completion.finish_reason), usage=_chat_usage(completion.usage))


class AEngineProvider(ModelProvider):
    """A provider of one engine's model: ``RunConfig(model_provider=AEngineProvider(engine))``."""

    def __init__(self, engine: AsyncLLM | LLM, *, model_name: str | None = None) -> None:
        """Arguments as of `AEngineModel`."""
        self._model = AEngineModel(engine, model_name=model_name)

    def get_model(self, model_name: str | None) -> SDKModel:
        """Return the engine's model. None: of agents that name none.

        Raises:
            UserError: the model has another name.
        """
        if model_name not in (None, self._model.model):
            raise UserError(f"there is no model {model_name!r}: this provider has {self._model.model!r}")
        return self._model


# -- their items as the engine's messages


def _check_unsupported(
    previous_response_id: str | None, conversation_id: str | None, prompt: ResponsePromptParam | None
) -> None:
    """Raise UserError for what is kept on OpenAI's servers."""
    given = {"previous_response_id": previous_response_id, "conversation_id": conversation_id, "prompt": prompt}
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name} is kept on OpenAI's servers: give aengine's model the whole input instead")


def _messages(instructions: str | None, items: str | list[TResponseInputItem], model: str) -> list[dict[str, Any]]:
    """Write instructions and items as messages of a chat; reasoning goes along, for chat templates to use or not."""
    converted: list[Any] = list(
        Converter.items_to_messages(items, model=model, should_replay_reasoning_content=lambda context: True)
    )
    if instructions:
        converted.insert(0, {"role": "system", "content": instructions})
    for message in converted:
        if message["role"] == "developer":
            message["role"] = "system"  # which is what chat templates know
    return with_one_system_message(converted)


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{name} must be a dict of parameters of aengine's SamplingParams and ChatOptions")
    return value or {}


# -- the engine's answers as OpenAI's


def _change(delta: Delta) -> dict[str, Any] | None:
    match delta:
        case TextDelta(text=text):
            return {"content": text}
        case ReasoningDelta(text=text):
            return {"reasoning_content": text}
        case ToolCallStart():
            function = {"name": delta.name, "arguments": ""}
            return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
        case ToolCallDelta():
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
        case _:
            return None


def _message(message: ChatMessage) -> ChatCompletionMessage:
    content = message.content if message.content and message.content.strip() else None
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": content,
            "tool_calls": calls or None,
            "reasoning_content": message.reasoning or "",
        }
    )


def _check_whole(completion: ChatCompletion[Any]) -> None:
    """Raise ModelBehaviorError for an answer that an agent would take for whole."""
    request_id, message = completion.request_id, completion.message
    if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise ModelBehaviorError(f"the request {request_id} was aborted")
    if not all(call.is_complete for call in message.tool_calls):
        raise ModelBehaviorError(f"the answer {request_id} was cut off inside the call of a tool: raise max_tokens")
    is_empty = not message.tool_calls and not (message.content or "").strip()
    if completion.finish_reason is FinishReason.LENGTH and is_empty:
        raise ModelBehaviorError(f"the answer {request_id} was cut off before its text: raise max_tokens")


def _chat_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _input_details(usage: Usage) -> InputTokensDetails:
    return InputTokensDetails.model_validate({"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0})


def _span_usage(usage: Usage) -> dict[str, Any]:
    return {
        "requests": 1,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "input_tokens_details": _input_details(usage).model_dump(),
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
