"""`register`: an engine of the same process as a provider of LiteLLM's, and so of what is built on LiteLLM.

register(engine, "local")
await litellm.acompletion("local/llm", messages=[...], tools=[...], stream=True)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from ..async_llm import AsyncLLM
from ..chat import Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from ..errors import (
    AEngineError,
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    InternalError,
    InvalidRequestError,
    RequestError,
)
from ..llm import LLM
from ..outputs import Usage
from .openai_style import async_side, blocking_side, check_not_aborted, openai_logprobs, openai_settings
from .settings import with_one_system_message

try:
    import httpx
    import litellm
    from litellm.llms.custom_llm import CustomLLM
    from litellm.types.utils import ChoiceLogprobs, Choices, GenericStreamingChunk, Message, ModelResponse
    from litellm.types.utils import Usage as TheirUsage
    from litellm.utils import custom_llm_setup
except ImportError as error:
    raise ImportError(f"{__name__} needs litellm: pip install litellm ({error})") from error

__all__ = ["AEngineProvider", "register", "unregister"]

_OF_HTTP = {"extra_headers", "max_retries"}
"""Parameters of requests that go through a network."""

_ERRORS: list[tuple[type[AEngineError], type[Exception]]] = [
    (ContextLengthError, litellm.ContextWindowExceededError),
    (DeadlineExceededError, litellm.Timeout),
    (RequestError, litellm.BadRequestError),
    (InternalError, litellm.InternalServerError),
    (EngineError, litellm.ServiceUnavailableError),
]


def register(engine: AsyncLLM | LLM, name: str) -> AEngineProvider:
    """Make an engine answer LiteLLM's calls of the models "NAME/...", whatever follows the slash.

    An engine that was registered by this name before is replaced.

    Args:
        engine: running when a call is made. `litellm.completion` blocks its thread and needs an `LLM`, or an `AsyncLLM`
            with ``own_thread=True``; `litellm.acompletion` takes any.
        name: of the provider.

    Raises:
        InvalidRequestError: LiteLLM has another provider of that name.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidRequestError(f"name={name!r} is not valid: it must be a text without a slash", param="name")
    async_side(engine)  # raises for what is no engine
    unregister(name)
    if name in litellm.provider_list or any(item["provider"] == name for item in litellm.custom_provider_map):
        raise InvalidRequestError(f"LiteLLM has a provider {name!r} already: choose another name", param="name")
    provider = AEngineProvider(engine, name)
    litellm.custom_provider_map.append({"provider": name, "custom_handler": provider})
    custom_llm_setup()  # routers must know the name before the first call
    return provider


def unregister(name: str) -> bool:
    """Take back `register`. Returns whether there was an engine of that name."""
    for item in litellm.custom_provider_map:
        if item["provider"] == name and isinstance(item["custom_handler"], AEngineProvider):
            litellm.custom_provider_map.remove(item)
            for names in (litellm.provider_list, litellm._custom_providers):
                if name in names:
                    names.remove(name)
            return True
    return False


class AEngineProvider(CustomLLM):
    """An engine as LiteLLM calls it. Its errors are LiteLLM's exceptions, with the engine's as their causes.

    A call's ``timeout`` is its deadline, and while it streams the deadline of its first token. Parameters that LiteLLM
    does not know, as ``min_p`` or ``priority``, are passed on to the engine.
    """

    def __init__(self, engine: AsyncLLM | LLM, name: str) -> None:
        super().__init__()
        self.engine = engine
        self.name = name

    async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        with self._errors(kwargs):
            messages, params, options = self._request(kwargs)
            engine = async_side(self.engine)
            return _whole(kwargs, await engine.chat(messages, params, **options), engine)

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        with self._errors(kwargs):
            messages, params, options = self._request(kwargs)
            engine = blocking_side(self.engine)
            return _whole(kwargs, engine.chat(messages, params, **options), engine)

    async def astreaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[GenericStreamingChunk]:  # type: ignore[override]
        with self._errors(kwargs):
            messages, params, options = self._request(kwargs, streams=True)
            async with async_side(self.engine).stream_chat(messages, params, **options) as stream:
                while deltas := await stream.read():
                    for chunk in _chunks(stream.request_id, deltas):
                        yield chunk
                yield _last_chunk(stream.completion)

    def streaming(self, *args: Any, **kwargs: Any) -> Iterator[GenericStreamingChunk]:
        with self._errors(kwargs):
            messages, params, options = self._request(kwargs, streams=True)
            with blocking_side(self.engine).stream_chat(messages, params, **options) as stream:
                for delta in stream:
                    yield from _chunks(stream.request_id, [delta])
                yield _last_chunk(stream.completion)

    def _request(self, call: Mapping[str, Any], *, streams: bool = False) -> tuple[list[dict[str, Any]], Any, Any]:
        """Return messages, parameters and options. Raises InvalidRequestError."""
        given = {name: value for name, value in call["optional_params"].items() if name not in _OF_HTTP}
        if streams:
            for name in ("logprobs", "n"):
                if given.get(name) not in (None, False, 1):
                    raise InvalidRequestError(f"{name} can't be streamed through LiteLLM", param=name)
        timeout = call.get("timeout")
        timeout = getattr(timeout, "read", timeout)  # an httpx.Timeout has several
        if timeout is not None:
            given["first_token_deadline" if streams else "deadline"] = float(timeout)
        params, options = openai_settings(given)
        return with_one_system_message(call["messages"]), params, options

    @contextmanager
    def _errors(self, call: Mapping[str, Any]) -> Iterator[None]:
        """Raise the engine's errors as LiteLLM's."""
        try:
            yield
        except EngineOverloadedError as error:
            wait = {"retry-after": str(round(error.retry_after, 3))}
            response = httpx.Response(429, headers=wait)
            raise litellm.RateLimitError(str(error), self.name, call["model"], response=response) from error
        except AEngineError as error:
            kind: Any = next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))
            raise kind(message=str(error), model=call["model"], llm_provider=self.name) from error


# -- the engine's answers as theirs


def _whole(call: Mapping[str, Any], completion: Any, engine: Any) -> ModelResponse:
    check_not_aborted(completion)
    response: ModelResponse = call["model_response"]
    response.id = completion.request_id
    response.model = call["model"]
    response.choices = [_choice(choice, engine) for choice in completion.choices]
    response.usage = _usage(completion.usage)  # type: ignore[attr-defined]  # as LiteLLM itself sets it
    return response


def _choice(choice: Any, engine: Any) -> Choices:
    message = choice.message
    calls = [_call(index, call.id, call.name, call.arguments) for index, call in enumerate(message.tool_calls)]
    reasoning = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return Choices(
        index=choice.index,
        finish_reason=str(choice.finish_reason),
        message=Message(content=message.content, role="assistant", tool_calls=calls or None, **reasoning),
        logprobs=None if choice.logprobs is None else _logprobs(choice, engine),
    )


def _logprobs(choice: Any, engine: Any) -> ChoiceLogprobs:
    content: Any = openai_logprobs(choice.logprobs, engine.tokenizer)
    return ChoiceLogprobs(content=content)


def _usage(usage: Usage) -> TheirUsage:
    return TheirUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details={"cached_tokens": usage.cached_tokens},
    )


def _call(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}


class _Chunk(dict[str, Any]):
    """A `GenericStreamingChunk`. LiteLLM gives each chunk an id of its own, unless it has one as an attribute."""

    def __init__(self, request_id: str, text: str = "", **others: Any) -> None:
        super().__init__(
            {"text": text, "tool_use": None, "is_finished": False, "finish_reason": "", "usage": None, "index": 0}
            | others
        )
        self.id = request_id


def _chunks(request_id: str, deltas: Iterable[Delta]) -> Iterator[Any]:
    """Make the chunks of deltas that came at once; texts that follow each other are one."""
    for kind, group in groupby(deltas, type):
        if kind in (TextDelta, ReasoningDelta):
            text = "".join(delta.text for delta in group)  # type: ignore[union-attr]
            if kind is TextDelta:
                yield _Chunk(request_id, text)
            else:  # such a chunk has no other place for it
                yield _Chunk(request_id, provider_specific_fields={"reasoning_content": text})
            continue
        for delta in group:
            if isinstance(delta, ToolCallStart):
                yield _Chunk(request_id, tool_use=_call(delta.index, delta.id, delta.name, ""))
            elif isinstance(delta, ToolCallDelta):
                yield _Chunk(request_id, tool_use=_call(delta.index, None, None, delta.arguments))


def _last_chunk(completion: Any) -> Any:
    check_not_aborted(completion)
    usage = _usage(completion.usage).model_dump(exclude_none=True)
    reason = str(completion.finish_reason)
    return _Chunk(completion.request_id, is_finished=True, finish_reason=reason, usage=usage)
