"""`AEngine`: a LlamaIndex LLM over an engine in the same process.

agent = FunctionAgent(llm=AEngine(engine), tools=[...])
report = await AEngine(engine).astructured_predict(Report, PromptTemplate("..."))
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..chat import ChatMessage as Answer
from ..chat import Delta, ReasoningDelta, TextDelta, ToolCall
from ..errors import InvalidRequestError
from ..outputs import Completion, FinishReason, Token
from .llama_index_embeddings import AEngineEmbedding, OverEngine
from .openai_style import async_side, blocking_side, check_not_aborted, openai_settings
from .settings import answer_message, function_call, with_one_system_message

try:
    from llama_index.core.base.llms.types import (
        CachePoint,
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
        TextBlock,
        ThinkingBlock,
        ToolCallBlock,
    )
    from llama_index.core.bridge.pydantic import BaseModel, Field, ValidationError
    from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.llms.utils import parse_partial_json
    from llama_index.core.output_parsers import PydanticOutputParser
    from llama_index.core.program.utils import create_flexible_model
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools.types import BaseTool
    from llama_index.core.types import PydanticProgramMode
except ImportError as error:
    raise ImportError(f"{__name__} needs llama-index-core: pip install llama-index-core ({error})") from error

__all__ = ["AEngine", "AEngineEmbedding"]

dispatcher = get_dispatcher(__name__)

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


class AEngine(OverEngine, FunctionCallingLLM):
    """A LlamaIndex LLM that an engine answers.

    Keyword arguments of its calls are parameters of `SamplingParams` and `ChatOptions` by their names, or OpenAI's:
    ``await llm.achat(messages, max_tokens=100, response_format={...})``.

    Its ``chat``, ``complete``, ``stream_...`` block their thread: they need an `LLM`, or an `AsyncLLM` with
    ``own_thread=True``, and raise InvalidRequestError with another. The engine's errors are raised as they are.
    """

    model_name: str = Field(description="The model's name in events and traces.")
    context_window: int | None = Field(default=None, description="Tokens; None: what the running engine says.")
    max_tokens: int | None = Field(default=None, description="Most tokens of an answer.")
    temperature: float | None = Field(default=None, description="None: the model's own.")
    is_chat_model: bool = Field(default=True, description="False: `complete` and `predict` use no chat template.")
    is_function_calling_model: bool = Field(default=True, description="False: agents and programs use prompts.")
    additional_kwargs: dict[str, Any] = Field(default_factory=dict, description="Of all calls.")

    @classmethod
    def class_name(cls) -> str:
        return "AEngine"

    @property
    def metadata(self) -> LLMMetadata:
        context_window = self.context_window
        if context_window is None and self._engine.state == "running":
            context_window = self._engine.describe()["max_model_len"]
        return LLMMetadata(
            context_window=context_window or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model_name,
        )

    # -- chat

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        params, options = self._settings(kwargs)
        return _whole_chat(await async_side(self._engine).chat(_written(messages), params, **options))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        params, options = self._settings(kwargs)
        return _whole_chat(blocking_side(self._engine).chat(_written(messages), params, **options))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        params, options = self._settings(kwargs)

        async def responses() -> ChatResponseAsyncGen:
            async with async_side(self._engine).stream_chat(_written(messages), params, **options) as stream:
                while deltas := await stream.read():
                    yield _chat_so_far(stream.message, deltas)
                yield _whole_chat(stream.completion, delta="")

        return responses()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        params, options = self._settings(kwargs)
        calls = blocking_side(self._engine)

        def responses() -> ChatResponseGen:
            with calls.stream_chat(_written(messages), params, **options) as stream:
                for delta in stream:
                    yield _chat_so_far(stream.message, [delta])
                yield _whole_chat(stream.completion, delta="")

        return responses()

    # -- completion

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        complete = self._text_request(async_side(self._engine), prompt, formatted, kwargs, is_whole=True)
        return _whole_text(await complete())

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        complete = self._text_request(blocking_side(self._engine), prompt, formatted, kwargs, is_whole=True)
        return _whole_text(complete())

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        begin = self._text_request(async_side(self._engine), prompt, formatted, kwargs)

        async def responses() -> CompletionResponseAsyncGen:
            text = ""
            async with begin() as stream:
                while pieces := await stream.read():
                    delta = _text(pieces)
                    text += delta
                    yield CompletionResponse(text=text, delta=delta)
                yield _whole_text(stream.completion, delta="")

        return responses()

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        begin = self._text_request(blocking_side(self._engine), prompt, formatted, kwargs)

        def responses() -> CompletionResponseGen:
            text = ""
            with begin() as stream:
                for piece in stream:
                    delta = _text([piece])
                    text += delta
                    yield CompletionResponse(text=text, delta=delta)
                yield _whole_text(stream.completion, delta="")

        return responses()

    def _text_request(
        self, engine: Any, prompt: str, formatted: bool, kwargs: Mapping[str, Any], *, is_whole: bool = False
    ) -> Any:
        """Return what begins a completion, which comes as a whole or as a stream: of tokens if the prompt is not made a
        chat, else of deltas."""
        params, options = self._settings(kwargs)
        if self.is_chat_model and not formatted:
            chat = engine.chat if is_whole else engine.stream_chat
            return partial(chat, [{"role": "user", "content": prompt}], params, **options)
        options.pop("on_unsupported", None)  # without tools and a type there are no schemas to be relaxed
        return partial(engine.generate if is_whole else engine.stream, prompt, params, **options)

    # -- tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            if isinstance(user_msg, str):
                user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
            messages.append(user_msg)
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("required" if tool_required else "auto"),
            "parallel_tool_calls": None if allow_parallel_tool_calls else False,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls; while it streams, of a call that is not complete what has come of its arguments.

        Raises:
            ValueError: there are none, and that is an error.
            InvalidRequestError: the answer has ended inside a call.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"the answer calls no tool: {response.message.content!r}")
        has_ended = "finish_reason" in response.additional_kwargs
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=_kwargs(call, has_ended)
            )
            for call in calls
        ]

    # -- structured answers: the schema is in the prompt and in the grammar, and no tool is needed for it

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        dispatcher.event(_structured_start(output_cls, prompt, prompt_args))
        messages, params, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        completion = await async_side(self._engine).chat(messages, params, output_type=output_cls, **options)
        value = _value_of(completion)
        dispatcher.event(LLMStructuredPredictEndEvent(output=value))
        return value

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        dispatcher.event(_structured_start(output_cls, prompt, prompt_args))
        messages, params, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        value = _value_of(blocking_side(self._engine).chat(messages, params, output_type=output_cls, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=value))
        return value

    async def _structured_astream_call(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, params, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)

        async def values() -> AsyncGenerator[Any, None]:
            partial_cls = create_flexible_model(output_cls)
            engine = async_side(self._engine)
            async with engine.stream_chat(messages, params, output_type=output_cls, **options) as stream:
                while await stream.read():
                    if isinstance(stream.partial, dict):
                        yield _partial(output_cls, partial_cls, stream.partial)
                yield _value_of(stream.completion)

        return values()

    def _structured_stream_call(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages, params, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        partial_cls = create_flexible_model(output_cls)
        calls = blocking_side(self._engine)
        with calls.stream_chat(messages, params, output_type=output_cls, **options) as stream:
            for _ in stream:
                if isinstance(stream.partial, dict):
                    yield _partial(output_cls, partial_cls, stream.partial)
            yield _value_of(stream.completion)

    def _structured(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[list[dict[str, Any]], Any, Any]:
        messages = _written(self._extend_messages(prompt.format_messages(llm=self, **prompt_args)))
        instructions = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = f"{messages[-1]['content'] or ''}\n{instructions}"
        else:
            messages.append({"role": "user", "content": instructions})
        return messages, *self._settings(llm_kwargs or {})

    def _settings(self, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, **self.additional_kwargs, **kwargs}
        return openai_settings(given)


# -- their messages as the engine's


def _written(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return with_one_system_message(_one_written(message) for message in messages)


def _one_written(message: ChatMessage) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role.value)
    texts, thoughts, calls = [], [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.content or "")
        elif isinstance(block, ToolCallBlock):
            arguments = block.tool_kwargs if isinstance(block.tool_kwargs, str) else json.dumps(block.tool_kwargs)
            calls.append(function_call(block.tool_call_id or "", block.tool_name, arguments))
        elif not isinstance(block, CachePoint):
            raise InvalidRequestError(f"the engine reads text only, and no {type(block).__name__}", param="messages")
    text = "\n".join(texts)
    if role == "assistant":
        calls = calls or message.additional_kwargs.get("tool_calls") or []
        return answer_message(text if texts else None, thoughts, calls, "\n")
    named = {"tool_call_id": message.additional_kwargs.get("tool_call_id", "")} if role == "tool" else {}
    return {"role": role, "content": text, **named}


# -- the engine's answers as theirs


def _chat_so_far(answer: Answer, deltas: Iterable[Delta]) -> ChatResponse:
    thoughts = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return ChatResponse(
        message=_message(answer),
        delta=_text(deltas),
        additional_kwargs={"thinking_delta": thoughts} if thoughts else {},
    )


def _whole_chat(completion: Any, delta: str | None = None) -> ChatResponse:
    """Make the last response of an answer, or its only one."""
    return ChatResponse(message=_message(completion.message), delta=delta, **_facts(completion))


def _whole_text(completion: Any, delta: str | None = None) -> CompletionResponse:
    message = getattr(completion, "message", None)
    text = completion.text if message is None else message.content or ""
    return CompletionResponse(text=text, delta=delta, **_facts(completion))


def _facts(completion: Completion[Any]) -> dict[str, Any]:
    """Return what else is known of an answer, by OpenAI's names, where LlamaIndex' counters of tokens look for it."""
    check_not_aborted(completion)
    counts = {
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "total_tokens": completion.usage.total_tokens,
        "cached_tokens": completion.usage.cached_tokens,
    }
    ended: dict[str, Any] = {"id": completion.request_id, "finish_reason": str(completion.finish_reason)}
    if completion.warnings:
        ended["warnings"] = list(completion.warnings)
    return {"raw": ended | {"usage": counts}, "additional_kwargs": ended | counts}


def _message(answer: Answer) -> ChatMessage:
    blocks: list[Any] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(content=answer.reasoning))
    content = answer.content.rstrip() if answer.content and answer.tool_calls else answer.content
    if content or not answer.tool_calls:
        blocks.append(TextBlock(text=content or ""))
    blocks += [_call_block(call) for call in answer.tool_calls]
    calls = answer.to_dict().get("tool_calls")  # the place where memories and streaming programs look for them
    return ChatMessage(
        role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs={"tool_calls": calls} if calls else {}
    )


def _call_block(call: ToolCall) -> ToolCallBlock:
    """Make a call's block; the arguments of one that is not complete are a text."""
    arguments = call.parsed_arguments() if call.is_complete else call.arguments
    return ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments)


def _kwargs(call: ToolCallBlock, has_ended: bool) -> dict[str, Any]:
    if isinstance(call.tool_kwargs, dict):
        return call.tool_kwargs
    if has_ended:
        return ToolCall(call.tool_call_id or "", call.tool_name, call.tool_kwargs, False).parsed_arguments()  # raises
    try:
        so_far: dict[str, Any] = parse_partial_json(call.tool_kwargs)
    except ValueError:
        return {}
    return so_far


def _text(pieces: Iterable[Token | Delta]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Token | TextDelta))


def _structured_start(output_cls: type[Any], prompt: PromptTemplate, prompt_args: Any) -> Any:
    return LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)


def _value_of(completion: Any) -> Any:
    """Return the answer's value. Raises what its validators do, or ValueError if it was cut off."""
    check_not_aborted(completion)
    if completion.parse_error is not None:
        raise completion.parse_error
    if completion.parsed is None:
        limit = "max_tokens" if completion.finish_reason is FinishReason.LENGTH else "a stop string"
        raise ValueError(f"the answer was cut off by {limit}: {completion.message.content!r}")
    return completion.parsed


def _partial(output_cls: type[Any], partial_cls: type[BaseModel], value: dict[str, Any]) -> Any:
    """Make the value that the answer has so far; of a class with the same fields, all optional, until it is whole."""
    try:
        return output_cls.model_validate(value)
    except ValidationError:
        return partial_cls.model_validate(value)
