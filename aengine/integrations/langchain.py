"""`ChatAEngine`: a chat model of LangChain over an engine in the same process.

model = ChatAEngine(engine=engine, temperature=0)
await model.ainvoke("Hello"); model.bind_tools([...]); model.with_structured_output(Report)

The async methods need an engine on the same event loop; the blocking ones (invoke, stream, batch) an `LLM`, or an
`AsyncLLM` with ``own_thread=True``. Both of these serve the async ones, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal

from ..async_llm import AsyncLLM
from ..chat.messages import ChatChoice, ChatCompletion, Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ..errors import (
    AEngineError,
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
)
from ..llm import LLM
from ..outputs import FinishReason, Logprob, Usage
from ..params import SamplingParams
from .langchain_embeddings import AEngineEmbeddings
from .openai_style import async_side, blocking_side, openai_logprobs, openai_settings
from .settings import as_of_type, model_name_of, with_one_system_message

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.exceptions import (
        ContextOverflowError,
        ModelAPIError,
        ModelError,
        ModelInvalidRequestError,
        ModelRateLimitError,
        ModelTimeoutError,
    )
    from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        ChatMessage,
        HumanMessage,
        SystemMessage,
        ToolCall,
        ToolMessage,
    )
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
    from langchain_core.output_parsers import (
        JsonOutputKeyToolsParser,
        JsonOutputParser,
        PydanticOutputParser,
        PydanticToolsParser,
    )
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import ConfigDict, Field, SkipValidation
except ImportError as error:
    raise ImportError(f"{__name__} needs langchain-core: pip install langchain-core ({error})") from error

__all__ = ["AEngineEmbeddings", "ChatAEngine"]

PROVIDER = "aengine"

_ERRORS: list[tuple[type[AEngineError], type[ModelError]]] = [
    (ContextLengthError, ContextOverflowError),
    (EngineOverloadedError, ModelRateLimitError),
    (DeadlineExceededError, ModelTimeoutError),
    (RequestError, ModelInvalidRequestError),
    (EngineError, ModelAPIError),
]


class ChatAEngine(BaseChatModel):
    """A chat model of LangChain that an engine answers.

    Every parameter can be given here, by ``bind``, or with a call: ``model.ainvoke(messages, temperature=0.2)``; so can
    any other name of `SamplingParams` and `ChatOptions`, such as ``min_p``, ``priority`` or ``structured_output``.

    The engine's errors are LangChain's `ModelError`\\ s, each with the engine's as its cause.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    engine: SkipValidation[AsyncLLM | LLM] = Field(exclude=True, repr=False)  # or what has its calls
    """Running when a request is made. It is neither started nor closed by the model."""
    model: str = ""
    """The model's name in metadata and traces. "": the name the engine was made with."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    """The log-probability of each token, in ``message.response_metadata["logprobs"]["content"]``."""
    top_logprobs: int | None = None
    """So many of the likeliest tokens at each place beside it, with ``logprobs``."""
    timeout: float | None = None
    """Seconds; the deadline of the whole request."""
    reasoning_effort: bool | str | None = None
    """Whether, or how much, the model reasons before it answers, if its chat template can be told."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other parameters of `SamplingParams` and `ChatOptions` by their names, such as ``{"min_p": 0.1}``."""
    streaming: bool = False
    """`invoke` reads the answer as a stream, so that callbacks see its tokens."""
    max_retries: int | None = None
    """Without effect, as there is no connection to fail: `with_retry` tries again what the engine refuses."""
    api_key: Any = Field(default=None, exclude=True, repr=False)
    """Without effect."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.model = self.model or model_name_of(async_side(self.engine))

    # -- what LangChain asks a model about itself

    @property
    def _llm_type(self) -> str:
        return "aengine-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, **self._given()}

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
        )
        if async_side(self.engine).state == "running":
            profile["max_input_tokens"] = self.engine.describe()["max_model_len"]
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text's tokens, without those that begin a prompt."""
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """The tokens of the prompt that these messages make, with the model's chat template and the tools."""
        functions = [_function_of(tool, None) for tool in tools or ()]
        return self.engine.tokenizer.count(_written(messages), functions)

    # -- answers

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with _their_errors():
            params, options = self._asked(stop, kwargs)
            completion = blocking_side(self.engine).chat(_written(messages), params, **options)
        return self._result(completion, params)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with _their_errors():
            params, options = self._asked(stop, kwargs)
            completion = await async_side(self.engine).chat(_written(messages), params, **options)
        return self._result(completion, params)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with _their_errors():
            params, options = self._asked(stop, kwargs, streams=True)
            with blocking_side(self.engine).stream_chat(_written(messages), params, **options) as stream:
                for delta in stream:
                    if (chunk := self._chunk([delta])) is not None:
                        if run_manager is not None:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
                last = self._last_chunk(stream.completion, params)
        if run_manager is not None:
            run_manager.on_llm_new_token("", chunk=last)
        yield last

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with _their_errors():
            params, options = self._asked(stop, kwargs, streams=True)
            async with async_side(self.engine).stream_chat(_written(messages), params, **options) as stream:
                while deltas := await stream.read():
                    if (chunk := self._chunk(deltas)) is not None:
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
                last = self._last_chunk(stream.completion, params)
        if run_manager is not None:
            await run_manager.on_llm_new_token("", chunk=last)
        yield last

    def _result(self, completion: ChatCompletion[Any], params: SamplingParams) -> ChatResult:
        generations = []
        for choice in completion.choices:
            _check_whole(choice, params)
            metadata = self._metadata(choice, completion)
            message = _message(choice, metadata, completion.usage if choice.index == 0 else None)
            info: dict[str, Any] = {k: v for k, v in metadata.items() if k in ("finish_reason", "logprobs")}
            generations.append(ChatGeneration(message=message, generation_info=info))
        return ChatResult(generations=generations, llm_output={"model_name": self.model})

    def _chunk(self, deltas: Sequence[Delta]) -> ChatGenerationChunk | None:
        """Return what has come at once as one chunk, if there is anything in it."""
        message = _message_chunk(deltas)
        rows = [
            (Logprob(token.token_id, token.logprob), *token.top_logprobs)
            for delta in deltas
            for token in delta.tokens
            if token.logprob is not None
        ]
        if rows:
            message = message or AIMessageChunk(content="")
            message.response_metadata = self._logprobs(rows)
        return None if message is None else ChatGenerationChunk(message=message)

    def _last_chunk(self, completion: ChatCompletion[Any], params: SamplingParams) -> ChatGenerationChunk:
        choice = completion.choices[0]
        _check_whole(choice, params)
        message = AIMessageChunk(
            content="",
            response_metadata=self._ending(choice, completion),
            usage_metadata=_usage(completion.usage),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _metadata(self, choice: ChatChoice[Any], completion: ChatCompletion[Any]) -> dict[str, Any]:
        logprobs = {} if choice.logprobs is None else self._logprobs(choice.logprobs)
        return self._ending(choice, completion) | logprobs

    def _logprobs(self, rows: Iterable[Sequence[Logprob]]) -> dict[str, Any]:
        return {"logprobs": {"content": openai_logprobs(rows, self.engine.tokenizer)}}

    def _ending(self, choice: ChatChoice[Any], completion: ChatCompletion[Any]) -> dict[str, Any]:
        metadata = {
            "model_name": self.model,
            "model_provider": PROVIDER,
            "finish_reason": str(choice.finish_reason),
            "request_id": completion.request_id,
        }
        return metadata | ({"warnings": list(completion.warnings)} if completion.warnings else {})

    # -- a request to the engine

    def _given(self) -> dict[str, Any]:
        """Return the parameters of this model that are given."""
        names = (
            *("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "presence_penalty", "frequency_penalty"),
            *("logit_bias", "logprobs", "top_logprobs", "timeout", "reasoning_effort"),
        )
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None} | self.model_kwargs

    def _asked(self, stop: list[str] | None, kwargs: Mapping[str, Any], *, streams: bool = False) -> Any:
        """Return the params and options of a request. Raises InvalidRequestError."""
        asked = {**self._given(), **kwargs} | ({} if stop is None else {"stop": stop})
        model = asked.get("model", self.model)
        if model != self.model:
            raise InvalidRequestError(f"this engine has the model {self.model!r}, and no {model!r}", param="model")
        if streams and asked.get("n") not in (None, 1):
            raise InvalidRequestError("n is for answers that don't stream", param="n")
        return openai_settings(asked)

    # -- tools and types

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools to the model.

        Args:
            tools: functions, LangChain's tools, pydantic or TypedDict classes, or dicts as OpenAI's or Anthropic's.
            tool_choice: "auto", "none", "any" or "required" (also True), a tool's name, or a dict as OpenAI's.
            strict: a keyword of a tool's schema that can't be held is an error. Otherwise it is left out.
            parallel_tool_calls: several calls in one answer. None: as the model's chat template allows.
        """
        functions = [_function_of(tool, strict) for tool in tools]
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if tool_choice:
            kwargs["tool_choice"] = _tool_choice(tool_choice, functions)
        return super().bind(tools=functions, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Make a runnable whose answers are values of a schema.

        Args:
            schema: a pydantic or TypedDict class, a JSON schema, or a function as OpenAI's. With "json_mode" it may be
                None.
            method: "json_schema": the answer is JSON of the schema. "function_calling": it is the call of a tool with
                the schema's name, which the model is shown as it is shown its tools. "json_mode": it is a JSON object,
                and the prompt must ask for its keys.
            include_raw: return ``{"raw": message, "parsed": value or None, "parsing_error": exception or None}``.
            strict: a keyword of the schema that can't be held is an error. Otherwise it is left out, and a pydantic
                class checks it.
            kwargs: bound to the model, such as ``tools``.
        """
        if schema is None and method != "json_mode":
            raise ValueError(f"method={method!r} needs a schema")
        given: Any = schema
        is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
        if schema is not None:
            kwargs["ls_structured_output_format"] = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        parser: Runnable[Any, Any]
        if method == "function_calling":
            name = convert_to_openai_tool(given)["function"]["name"]
            model = self.bind_tools([given], tool_choice=name, strict=strict, parallel_tool_calls=False, **kwargs)
            if is_pydantic:
                parser = PydanticToolsParser(tools=[given], first_tool_only=True)
            else:
                parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        else:
            model = self.bind(response_format=_response_format(given, method, strict), **kwargs)
            parser = PydanticOutputParser(pydantic_object=given) if is_pydantic else JsonOutputParser()
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


# -- their messages, tools and schemas as the engine's


def _written(messages: Iterable[BaseMessage]) -> list[dict[str, Any]]:
    return with_one_system_message([_written_message(message) for message in messages])


def _written_message(message: BaseMessage) -> dict[str, Any]:
    """Write a message as OpenAI's. Raises InvalidRequestError for what is no text."""
    written: dict[str, Any] = {"content": _text_of(message)}
    if message.name:
        written["name"] = message.name
    match message:
        case SystemMessage():
            return {"role": "system", **written}
        case HumanMessage():
            return {"role": "user", **written}
        case ToolMessage():
            return {"role": "tool", "tool_call_id": message.tool_call_id, **written}
        case ChatMessage():
            return {"role": message.role, **written}
        case AIMessage():
            written |= {"role": "assistant", "content": written["content"] or None}
        case _:
            raise InvalidRequestError(f"a {type(message).__name__} can't be put into a prompt", param="messages")
    if reasoning := _reasoning_of(message):
        written["reasoning_content"] = reasoning
    calls = [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    calls += [(call["id"], call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    if calls:
        written["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return written


def _text_of(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text":
            texts.append(block["text"])
        elif not isinstance(message, AIMessage):  # whose other blocks are calls, which it has apart, or reasoning
            raise InvalidRequestError(f"the engine reads text only, and no {block.get('type')!r}", param="messages")
    return "".join(texts)


def _reasoning_of(message: AIMessage) -> str:
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        return str(reasoning)
    blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") == "reasoning"]
    return "".join(str(block.get("reasoning") or "") for block in blocks)


def _function_of(tool: Any, strict: bool | None) -> dict[str, Any]:
    """Return the tool as OpenAI's function. ``strict=False`` is left out: it would allow any arguments."""
    written: dict[str, Any] = convert_to_openai_tool(tool, strict=strict)
    function = written.get("function")
    if not isinstance(function, dict):
        return written
    function = {key: value for key, value in function.items() if key != "strict" or value}
    if not isinstance(tool, dict) and not strict and function.get("parameters"):
        function["parameters"] = as_of_type(function["parameters"])
    return {**written, "function": function}


def _tool_choice(choice: str | dict[str, Any] | bool, functions: Sequence[dict[str, Any]]) -> Any:
    """Return the choice as the engine takes it; of a name a dict, as it may be that of a mode."""
    if choice is True:
        return "required"
    if isinstance(choice, str) and choice in [function.get("function", {}).get("name") for function in functions]:
        return {"type": "function", "function": {"name": choice}}
    return choice


def _response_format(schema: Any, method: str, strict: bool | None) -> dict[str, Any]:
    """Return the ``response_format`` as OpenAI's."""
    if method == "json_mode":
        return {"type": "json_object"}
    if method != "json_schema":
        raise ValueError(f"method must be 'json_schema', 'function_calling' or 'json_mode', not {method!r}")
    json_schema = convert_to_json_schema(schema)
    if not isinstance(schema, dict) and not strict:
        json_schema = as_of_type(json_schema)
    named = {"name": json_schema.get("title", "answer"), "schema": json_schema, "strict": bool(strict)}
    return {"type": "json_schema", "json_schema": named}


# -- the engine's answers as theirs


def _message(choice: ChatChoice[Any], metadata: dict[str, Any], usage: Usage | None) -> AIMessage:
    message = choice.message
    calls = [
        ToolCall(name=call.name, args=call.parsed_arguments(), id=call.id, type="tool_call")
        for call in message.tool_calls
    ]
    return AIMessage(
        content=message.content or "",
        additional_kwargs={"reasoning_content": message.reasoning} if message.reasoning else {},
        tool_calls=calls,
        response_metadata=metadata,
        usage_metadata=None if usage is None else _usage(usage),
    )


def _message_chunk(deltas: Iterable[Delta]) -> AIMessageChunk | None:
    """Return the message of what has come at once; None: nothing. Of each call it has one piece, as pieces are joined
    only from one chunk to the next."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, ToolCallChunk] = {}
    for delta in deltas:
        match delta:
            case TextDelta(text=text):
                texts.append(text)
            case ReasoningDelta(text=text):
                thoughts.append(text)
            case ToolCallStart():
                calls[delta.index] = tool_call_chunk(name=delta.name, args="", id=delta.id, index=delta.index)
            case ToolCallDelta():
                call = calls.setdefault(delta.index, tool_call_chunk(args="", index=delta.index))
                call["args"] = (call["args"] or "") + delta.arguments
    content, reasoning = "".join(texts), "".join(thoughts)
    if not (content or reasoning or calls):
        return None
    return AIMessageChunk(
        content=content,
        additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
        tool_call_chunks=list(calls.values()),
    )


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )


def _check_whole(choice: ChatChoice[Any], params: SamplingParams) -> None:
    """Raise ModelError for what would pass for whole: an answer that was aborted, or cut off inside of JSON, which
    LangChain completes as it does while it streams."""
    calls = choice.message.tool_calls
    if choice.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise ModelError("the request was aborted")
    if not all(call.is_complete for call in calls):
        raise ModelError(f"the answer was cut off inside the call of {calls[-1].name!r}: raise max_tokens")
    if choice.finish_reason is FinishReason.LENGTH and params.structured_output is not None and not calls:
        raise ModelError("the answer was cut off before it was of its schema: raise max_tokens")


@contextmanager
def _their_errors() -> Iterator[None]:
    """Raise the engine's errors as LangChain's."""
    try:
        yield
    except AEngineError as error:
        raise next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))(str(error)) from error
