"""`AEngineModel`: a smolagents model over an engine in the same process.

agent = ToolCallingAgent(model=AEngineModel(engine), tools=[...])

smolagents blocks the thread that it runs in, so the engine is an `LLM`, or an `AsyncLLM` with a thread of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from ..async_llm import AsyncLLM
from ..chat import Delta, TextDelta, ToolCallDelta, ToolCallStart
from ..engine.streams.blocking import ChatIterator
from ..llm import LLM
from ..outputs import Completion
from .openai_style import async_side, blocking_side, check_not_aborted, openai_settings, text_of
from .settings import with_one_system_message

try:
    from smolagents.models import (
        ChatMessage,
        ChatMessageStreamDelta,
        ChatMessageToolCall,
        ChatMessageToolCallFunction,
        ChatMessageToolCallStreamDelta,
        MessageRole,
        Model,
    )
    from smolagents.monitoring import TokenUsage
    from smolagents.tools import Tool
except ImportError as error:
    raise ImportError(f"{__name__} needs smolagents: pip install smolagents ({error})") from error

__all__ = ["AEngineModel"]

_OBJECT_TYPES = ("image", "audio")
"""Types of smolagents whose values a model names by a variable of the agent."""


class AEngineModel(Model):
    """A smolagents model that an engine answers.

    The calls of a `ToolCallingAgent` and the JSON of a `CodeAgent` with structured outputs follow their schemas. Any
    thread may run an agent, and any number of agents may share the engine.

    The engine's errors are raised as they are; agents make `AgentGenerationError`\\ s of them.
    """

    def __init__(
        self,
        engine: AsyncLLM | LLM,
        *,
        model_id: str | None = None,
        custom_role_conversions: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            engine: running when a request is made.
            model_id: in the agent's records. None: the name the engine was made with.
            custom_role_conversions: roles of smolagents as others. None: calls are the assistant's, results the user's.
            kwargs: of all requests: parameters of `SamplingParams` and `ChatOptions` by their names, or OpenAI's.

        Raises:
            InvalidRequestError: the engine has no thread of its own: make it with ``own_thread=True``.
        """
        super().__init__(model_id=model_id or async_side(engine).config.model_name, **kwargs)
        self.engine = engine
        self.custom_role_conversions = custom_role_conversions
        self._calls = blocking_side(engine)

    @property
    def supports_stop_parameter(self) -> bool:
        return True

    def generate(
        self,
        messages: list[ChatMessage | dict[str, Any]],
        stop_sequences: list[str] | None = None,
        response_format: dict[str, Any] | None = None,
        tools_to_call_from: list[Tool] | None = None,
        **kwargs: Any,
    ) -> ChatMessage:
        with self._begin(messages, stop_sequences, response_format, tools_to_call_from, kwargs) as stream:
            completion = stream.wait()
        _check_whole(completion)
        calls = [
            ChatMessageToolCall(ChatMessageToolCallFunction(call.arguments, call.name), id=call.id, type="function")
            for call in completion.message.tool_calls
        ]
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            content=completion.message.content,
            tool_calls=calls or None,
            raw=completion,
            token_usage=_usage_of(completion),
        )

    def generate_stream(
        self,
        messages: list[ChatMessage | dict[str, Any]],
        stop_sequences: list[str] | None = None,
        response_format: dict[str, Any] | None = None,
        tools_to_call_from: list[Tool] | None = None,
        **kwargs: Any,
    ) -> Generator[ChatMessageStreamDelta, None, None]:
        """Yield an answer's pieces, and at last its tokens. Closing the generator ends the request."""
        with self._begin(messages, stop_sequences, response_format, tools_to_call_from, kwargs) as stream:
            for delta in stream:
                piece = _piece_of(delta)
                if piece is not None:
                    yield piece
            completion = stream.completion
        _check_whole(completion)
        yield ChatMessageStreamDelta(content="", token_usage=_usage_of(completion))

    def _begin(
        self,
        messages: list[ChatMessage | dict[str, Any]],
        stop_sequences: list[str] | None,
        response_format: dict[str, Any] | None,
        tools: list[Tool] | None,
        kwargs: dict[str, Any],
    ) -> ChatIterator:
        given = self._prepare_completion_kwargs(
            messages=[_in_parts(message) for message in messages],
            stop_sequences=stop_sequences,
            response_format=response_format,
            tools_to_call_from=tools,
            custom_role_conversions=self.custom_role_conversions,
            **kwargs,
        )
        written = [
            {"role": MessageRole(message["role"]).value, "content": message["content"][0]["text"]}
            for message in given.pop("messages")
        ]
        for tool in given.get("tools", ()):
            _replace_object_types(tool["function"]["parameters"]["properties"])
        params, options = openai_settings(given)
        return self._calls.stream_chat(with_one_system_message(written), params, **options)


def _in_parts(message: ChatMessage | dict[str, Any]) -> ChatMessage:
    """Return a message whose content is a list, as smolagents joins messages of one role.

    Raises InvalidRequestError for what is not text.
    """
    if isinstance(message, dict):
        message = ChatMessage.from_dict(dict(message))
    return ChatMessage(role=message.role, content=[{"type": "text", "text": text_of(message.content) or ""}])


def _replace_object_types(properties: Mapping[str, Any]) -> None:
    for schema in properties.values():
        kinds = schema.get("type")
        if isinstance(kinds, str):
            schema["type"] = "string" if kinds in _OBJECT_TYPES else kinds
        elif isinstance(kinds, Sequence):
            schema["type"] = sorted({"string" if kind in _OBJECT_TYPES else kind for kind in kinds})


def _piece_of(delta: Delta) -> ChatMessageStreamDelta | None:
    if isinstance(delta, TextDelta):
        return ChatMessageStreamDelta(content=delta.text)
    if isinstance(delta, ToolCallStart):
        function = ChatMessageToolCallFunction("", delta.name)
        call = ChatMessageToolCallStreamDelta(index=delta.index, id=delta.id, type="function", function=function)
        return ChatMessageStreamDelta(tool_calls=[call])
    if isinstance(delta, ToolCallDelta):
        function = ChatMessageToolCallFunction(delta.arguments, "")
        return ChatMessageStreamDelta(tool_calls=[ChatMessageToolCallStreamDelta(index=delta.index, function=function)])
    return None


def _check_whole(completion: Any) -> None:
    """Raise InvalidRequestError if a call was cut off: an agent might run it with the text that there is."""
    check_not_aborted(completion)
    for call in completion.message.tool_calls:
        call.parsed_arguments()


def _usage_of(completion: Completion[Any]) -> TokenUsage:
    return TokenUsage(input_tokens=completion.usage.prompt_tokens, output_tokens=completion.usage.completion_tokens)
