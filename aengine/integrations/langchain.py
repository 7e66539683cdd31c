"""`ChatAEngine`: LangChain's chat model of OpenAI over an engine in the same process.

model = ChatAEngine(engine=engine, temperature=0)
await model.ainvoke("Hello"); model.bind_tools([...]); model.with_structured_output(Report)

The async methods need an engine on the same event loop; the blocking ones (invoke, stream, batch) an `LLM`, or an
`AsyncLLM` with ``own_thread=True``. Both of these serve the async ones, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Literal

from ..errors import (
    AEngineError,
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    RequestError,
)
from .clients import async_client, blocking_client, engine_errors
from .langchain_embeddings import AEngineEmbeddings
from .openai_style import async_side
from .settings import reasoning_variables, with_one_system_message

try:
    import openai
    from langchain_core.exceptions import (
        ContextOverflowError,
        ModelAPIError,
        ModelError,
        ModelInvalidRequestError,
        ModelRateLimitError,
        ModelTimeoutError,
    )
    from langchain_core.language_models import ModelProfile
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_openai import ChatOpenAI
    from pydantic import Field, SkipValidation, model_validator
except ImportError as error:
    raise ImportError(f"{__name__} needs langchain-openai: pip install langchain-openai ({error})") from error

__all__ = ["AEngineEmbeddings", "ChatAEngine"]

_ERRORS: list[tuple[type[AEngineError], type[ModelError]]] = [
    (ContextLengthError, ContextOverflowError),
    (EngineOverloadedError, ModelRateLimitError),
    (DeadlineExceededError, ModelTimeoutError),
    (RequestError, ModelInvalidRequestError),
    (EngineError, ModelAPIError),
]

_OF_CLIENT = ("model", "stream", "stream_options")

_LATER = object()
"""Stands for the blocking client until it is asked for: an engine on an event loop has none."""


class ChatAEngine(ChatOpenAI):
    """LangChain's chat model of OpenAI, whose requests an engine answers.

    Parameters can be given here, by ``bind``, or with a call: ``model.ainvoke(messages, temperature=0.2)``; so can any
    other name of `SamplingParams` and `ChatOptions`, such as ``min_p`` or ``priority``, here in ``model_kwargs``.
    ``timeout`` is the deadline of the whole request; no request is tried again.

    The engine's errors are LangChain's `ModelError`\\ s, each with the engine's as its cause.
    """

    engine: SkipValidation[Any] = Field(exclude=True, repr=False)
    """An `AsyncLLM` or `LLM`, running when a request is made. It is neither started nor closed by the model."""
    top_k: int | None = None
    reasoning_effort: Any = None
    """Whether (a bool), or how much (a str), the model reasons before it answers, if its template can be told."""
    client: Any = Field(default=_LATER, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _of_engine(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "engine" not in values:
            return values  # pydantic says that it is missing
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        if unknown := values.keys() - known:
            raise ValueError(
                f"{cls.__name__} has no {', '.join(sorted(unknown))}; model_kwargs has names of the engine"
            )
        name = values.get("model") or async_side(values["engine"]).config.model_name
        client = async_client(values["engine"], name)
        clients = {"root_async_client": client, "async_client": _Chats(client, openai.AsyncStream)}
        fixed = {"use_responses_api": False, "stream_usage": True, "stream_chunk_timeout": None}
        return {**values, "model": name, **clients, **fixed}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    @property
    def _llm_type(self) -> str:
        return "aengine-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(text_inputs=True, text_outputs=True, tool_calling=True, tool_choice=True)
        profile |= ModelProfile(structured_output=True, image_inputs=False, audio_inputs=False, video_inputs=False)
        if async_side(self.engine).state == "running":
            profile["max_input_tokens"] = self.engine.describe()["max_model_len"]
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, without those that begin a prompt."""
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def get_num_tokens_from_messages(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return the number of tokens of the prompt that these messages make, with the model's chat template and the
        tools."""
        functions = [convert_to_openai_tool(tool) for tool in tools or ()]
        return self.engine.tokenizer.count(self._get_request_payload(messages)["messages"], functions)

    # -- answers

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        with _their_errors():
            self._bind_blocking_client()
            return self._whole(super()._generate(messages, *args, **kwargs), kwargs)

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        with _their_errors():
            return self._whole(await super()._agenerate(messages, *args, **kwargs), kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        with _their_errors():
            self._bind_blocking_client()
            end = _End(self._has_shape(kwargs))
            for chunk in super()._stream(*args, **kwargs):
                end.check_chunk(chunk)
                yield chunk

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        with _their_errors():
            end = _End(self._has_shape(kwargs))
            stream: Any = super()._astream(*args, **kwargs)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    end.check_chunk(chunk)
                    yield chunk

    def _bind_blocking_client(self) -> None:
        if self.client is _LATER:
            self.root_client = blocking_client(self.engine, self.model_name)
            self.client = _Chats(self.root_client, openai.Stream)

    def _has_shape(self, kwargs: dict[str, Any]) -> bool:
        return "response_format" in {**self.model_kwargs, **kwargs}

    def _whole(self, result: ChatResult, kwargs: dict[str, Any]) -> ChatResult:
        for generation in result.generations:
            end = _End(self._has_shape(kwargs))
            message: Any = generation.message
            end.calls = [call["args"] or "" for call in message.invalid_tool_calls]
            end.check((generation.generation_info or {}).get("finish_reason"), bool(message.tool_calls))
        return result

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        for generation, choice in zip(result.generations, response.choices, strict=True):
            _complete(generation.message, getattr(choice.message, "reasoning_content", None))
            if warnings := (response.model_extra or {}).get("warnings"):
                generation.message.response_metadata["warnings"] = warnings
        return result

    def _convert_chunk_to_generation_chunk(self, chunk: dict[str, Any], *args: Any) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(chunk, *args)
        if generation is not None:
            delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
            _complete(generation.message, delta.get("reasoning_content"))
        return generation

    # -- requests

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return what OpenAI's client is to send: all that it may not know is in ``extra_body``."""
        effort = kwargs.pop("reasoning_effort", self.reasoning_effort)
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        messages = self._convert_input(input_).to_messages()
        for message, written in zip(messages, payload["messages"], strict=True):
            if isinstance(message, AIMessage) and (reasoning := message.additional_kwargs.get("reasoning_content")):
                written["reasoning_content"] = reasoning
            if isinstance(written["content"], list):
                written["content"] = [
                    {"type": "text", "text": b} if isinstance(b, str) else b for b in written["content"]
                ]
        body = {
            "top_k": self.top_k,
            "deadline": self.request_timeout,
            **payload,
            **(payload.pop("extra_body", None) or {}),
        }
        body.pop("reasoning_effort", None)
        for name in ("messages", "ls_structured_output_format", *_OF_CLIENT):
            body.pop(name, None)
        if not body.get("logprobs"):
            body.pop("top_logprobs", None)
        if "timeout" in body:
            body["deadline"] = body.pop("timeout")
        body["chat_template_kwargs"] = {**reasoning_variables(effort), **body.get("chat_template_kwargs", {})} or None
        kept: dict[str, Any] = {name: payload[name] for name in _OF_CLIENT if name in payload}
        kept["messages"] = with_one_system_message(payload["messages"])
        return {**kept, "extra_body": {k: v for k, v in body.items() if v is not None}}

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a runnable whose answers are values of a schema. Arguments as of `ChatOpenAI.with_structured_output`.

        ``strict``: a keyword of the schema that can't be held is an error. Otherwise it is left out, and a pydantic
        class checks it.
        """
        if method == "json_schema" and schema is not None:
            json_schema = convert_to_json_schema(schema)
            named = {"name": json_schema.get("title", "answer"), "schema": json_schema, "strict": bool(strict)}
            shape = {"type": "json_schema", "json_schema": named}
            traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
            kwargs = {"response_format": shape, "ls_structured_output_format": traced, **kwargs}
            method, strict = "json_mode", None  # parsers of both methods read the same
        return super().with_structured_output(schema, method=method, include_raw=include_raw, strict=strict, **kwargs)


class _Chats:
    """Chat completions of OpenAI's client. Streams are of dicts, which is what LangChain makes of openai's chunks."""

    def __init__(self, client: Any, stream_class: Any) -> None:
        self._client = client
        self._stream_class = stream_class[object]
        self.with_raw_response = client.chat.completions.with_raw_response

    def create(self, *, extra_body: dict[str, Any], **body: Any) -> Any:
        body |= extra_body
        how = {"cast_to": object, "stream": True, "stream_cls": self._stream_class}
        return self._client.post("/chat/completions", body=body, **how)


def _complete(message: BaseMessage, reasoning: str | None) -> None:
    message.response_metadata["model_provider"] = "aengine"
    if message.additional_kwargs.get("refusal", "") is None:
        del message.additional_kwargs["refusal"]
    if reasoning:
        message.additional_kwargs["reasoning_content"] = reasoning


class _End:
    """Raises ModelError at the end of an answer that was cut off inside of JSON, which LangChain would complete."""

    def __init__(self, has_shape: bool) -> None:
        self._has_shape = has_shape
        self.calls: list[str] = []  # arguments so far

    def check_chunk(self, chunk: ChatGenerationChunk) -> None:
        for call in getattr(chunk.message, "tool_call_chunks", ()):
            if call["name"]:
                self.calls.append("")
            self.calls[-1] += call["args"] or ""
        self.check((chunk.generation_info or {}).get("finish_reason"), bool(self.calls))

    def check(self, finish_reason: str | None, has_calls: bool) -> None:
        if finish_reason != "length":
            return
        if self.calls:
            try:
                json.loads(self.calls[-1])
            except ValueError:
                raise ModelError("the answer was cut off inside the call of a tool: raise max_tokens") from None
        elif self._has_shape and not has_calls:
            raise ModelError("the answer was cut off before it was of its schema: raise max_tokens")


@contextmanager
def _their_errors() -> Iterator[None]:
    """Raise the engine's errors as LangChain's."""
    try:
        with engine_errors():
            yield
    except AEngineError as error:
        raise next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))(str(error)) from error
