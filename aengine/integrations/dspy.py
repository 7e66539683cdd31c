"""`lm`: a `dspy.LM` over an engine in the same process; `AEngine` and `AsyncAEngine` are what DSPy calls.

dspy.configure(lm=lm(engine), adapter=dspy.JSONAdapter())
answer = await dspy.Predict("question -> answer: int").acall(question="...")
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from ..async_llm import AsyncLLM
from ..chat import Delta, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, ToolCallStart
from ..errors import (
    AEngineError,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    RequestError,
)
from ..llm import LLM
from ..outputs import Completion, FinishReason, Logprob, Usage
from .openai_style import async_side, blocking_side, check_not_aborted, openai_settings
from .settings import allowed_tools, answer_message, function_call, with_one_system_message

try:
    from dspy import LM, lm15
except ImportError as error:
    raise ImportError(f"{__name__} needs dspy: pip install dspy ({error})") from error

__all__ = ["AEngine", "AsyncAEngine", "lm"]

_PROVIDER = "aengine"
_EQUAL_NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed"),
    *("frequency_penalty", "presence_penalty", "logprobs", "response_format"),
)
"""Settings that are called as the engine's."""

_FINISH_REASONS: dict[FinishReason, Any] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_call",
    FinishReason.LENGTH: "length",
}

_ERRORS: list[tuple[type[AEngineError], type[lm15.LM15Error]]] = [
    (ContextLengthError, lm15.ContextLengthError),
    (EngineOverloadedError, lm15.RateLimitError),
    (DeadlineExceededError, lm15.TimeoutError),
    (RequestError, lm15.InvalidRequestError),
    (EngineClosedError, lm15.ConfigurationError),  # DSPy does not try again after these
    (EngineError, lm15.ServerError),
]


def lm(
    engine: AsyncLLM | LLM,
    model: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    supports_reasoning: bool = False,
    **settings: Any,
) -> LM:
    """Make a `dspy.LM` that an engine answers, to calls that are awaited and to those that block.

    Args:
        engine: running when a call is made. Calls that block need an `LLM`, or an `AsyncLLM` with ``own_thread=True``.
        model: in records and usage. DSPy's cache of answers goes by it, too: with ``cache=True``, the default, engines
            of one name share their answers. None: "aengine/" and the name the engine was made with.
        options: of all requests: parameters of `SamplingParams` and `ChatOptions`, which a call's own go before. DSPy
            takes no names that it does not know, as ``min_p`` or ``deadline``, in another way.
        supports_reasoning: the model reasons before it answers, so that an output field of the type `dspy.Reasoning` is
            its reasoning, if a ``reasoning_effort`` is given.
        settings: of `dspy.LM`: temperature, max_tokens, cache, num_retries, callbacks, ...
    """
    name = model or f"{_PROVIDER}/{async_side(engine).config.model_name}"
    engines = [kind(engine, options, supports_reasoning=supports_reasoning) for kind in (AEngine, AsyncAEngine)]
    return LM(name, engine=engines[0], async_engine=engines[1], **settings)


class _Borrowed:
    """What both have: what the engine can do, as adapters ask for it. The engine is borrowed: nobody copies or closes
    it here."""

    supports_function_calling = True
    supports_response_schema = True
    supported_params = frozenset({"max_tokens", "reasoning_effort", "response_format", "stop", "temperature", "tools"})

    def __init__(
        self,
        engine: AsyncLLM | LLM,
        options: Mapping[str, Any] | None = None,
        *,
        supports_reasoning: bool = False,
    ) -> None:
        """Arguments as of `lm`."""
        self.engine = engine
        self.options = dict(options or {})
        self.supports_reasoning = supports_reasoning

    def __deepcopy__(self, memo: object) -> Self:
        return self


class AEngine(_Borrowed):
    """An engine as DSPy's `Engine`: one request, one response, or a stream of events. Its calls block their thread.

    The engine's errors are `dspy.lm15` errors, with the engine's as their causes: an `EngineOverloadedError` is a
    RateLimitError, and is tried again after the seconds that it says.
    """

    def complete(self, request: lm15.Request) -> lm15.Response:
        with _lm15_errors():
            messages, params, options = _asked(request, self.options)
            engine = blocking_side(self.engine)
            return _response(request, engine.chat(messages, params, **options), engine.tokenizer)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        with _lm15_errors():
            messages, params, options = _asked(request, self.options, streams=True)
            with blocking_side(self.engine).stream_chat(messages, params, **options) as stream:
                events = _Events()
                yield lm15.StreamStartEvent(id=stream.request_id, model=request.model)
                for delta in stream:
                    yield from events.of([delta])
                yield _end_event(stream.completion)

    def close(self) -> None:
        """Do nothing: who started the engine closes it."""


class AsyncAEngine(_Borrowed):
    """An engine as DSPy's `AsyncEngine`. Cancelling a call, or closing its stream, ends the request."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with _lm15_errors():
            messages, params, options = _asked(request, self.options)
            engine = async_side(self.engine)
            return _response(request, await engine.chat(messages, params, **options), engine.tokenizer)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        with _lm15_errors():
            messages, params, options = _asked(request, self.options, streams=True)
            async with async_side(self.engine).stream_chat(messages, params, **options) as stream:
                events = _Events()
                yield lm15.StreamStartEvent(id=stream.request_id, model=request.model)
                while deltas := await stream.read():
                    for event in events.of(deltas):
                        yield event
                yield _end_event(stream.completion)

    async def aclose(self) -> None:
        """Do nothing: who started the engine closes it."""


# -- their requests as the engine's


def _asked(
    request: lm15.Request, defaults: Mapping[str, Any], *, streams: bool = False
) -> tuple[list[dict[str, Any]], Any, Any]:
    """Return messages, parameters and options. Raises lm15.UnsupportedFeatureError and InvalidRequestError."""
    config = request.config
    if config.probabilities == "required":
        raise _unsupported("config.probabilities", "an engine measures no probabilities of keys")
    if streams and config.logprobs is not None:
        raise _unsupported("config.logprobs", "log-probabilities are not streamed")
    given: dict[str, Any] = {
        **{name: getattr(config, name) for name in _EQUAL_NAMES},
        "stop": config.stop or None,
        "tools": [_tool(tool) for tool in request.tools] or None,
        "on_unsupported": "relax",  # DSPy says of every schema that it is strict, and validates the answer itself
        **(config.extensions or {}),
    }
    if config.reasoning is not None:
        if config.reasoning.thinking_budget is not None:
            raise _unsupported("config.reasoning.thinking_budget", "limit the whole answer by max_tokens")
        given["reasoning_effort"] = "none" if config.reasoning.is_off else config.reasoning.effort
    if config.tool_choice is not None:
        given["tool_choice"] = _tool_choice(config.tool_choice)
        given["parallel_tool_calls"] = config.tool_choice.parallel
    params, options = openai_settings(
        {**defaults, **{name: value for name, value in given.items() if value is not None}}
    )
    return _messages(request), params, options


def _unsupported(feature: str, message: str) -> lm15.UnsupportedFeatureError:
    return lm15.UnsupportedFeatureError(f"{feature}: {message}", feature=feature, provider=_PROVIDER)


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, lm15.FunctionTool):
        raise _unsupported(f"tools[{tool.name}]", "only functions are tools of an engine")
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _tool_choice(choice: lm15.ToolChoice) -> Any:
    if not choice.allowed:
        return choice.mode
    return allowed_tools(choice.mode, choice.allowed)


def _messages(request: lm15.Request) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    if request.system is not None:
        text = request.system if isinstance(request.system, str) else _text_of(request.system)
        written.append({"role": "system", "content": text})
    for message in request.messages:
        if message.role == "tool":
            written += [_result(part) for part in message.parts]
        elif message.role == "assistant":
            written.append(_answer(message.parts))
        else:
            role = "system" if message.role == "developer" else message.role
            written.append({"role": role, "content": _text_of(message.parts)})
    return with_one_system_message(written)


def _text_of(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, lm15.TextPart | lm15.RefusalPart):
            texts.append(part.text)
        elif isinstance(part, lm15.DataPart):
            texts.append(json.dumps(part.value, ensure_ascii=False))
        else:
            raise _unsupported(f"messages.parts.{part.type}", "the engine reads text only")
    return "\n".join(texts)


def _result(part: Any) -> dict[str, Any]:
    named = {"name": part.name} if part.name else {}
    return {"role": "tool", "tool_call_id": part.id, "content": _text_of(part.content), **named}


def _answer(parts: Sequence[Any]) -> dict[str, Any]:
    thoughts = [part.text for part in parts if isinstance(part, lm15.ThinkingPart)]
    calls = [
        function_call(part.id, part.name, json.dumps(part.input, ensure_ascii=False))
        for part in parts
        if isinstance(part, lm15.ToolCallPart)
    ]
    rest = [part for part in parts if not isinstance(part, lm15.ThinkingPart | lm15.ToolCallPart)]
    return answer_message(_text_of(rest) if rest else None, thoughts, calls, "\n")


# -- the engine's answers as theirs


def _response(request: lm15.Request, completion: Any, tokenizer: Any) -> lm15.Response:
    check_not_aborted(completion)
    message = completion.message
    parts: list[Any] = [lm15.ThinkingPart(message.reasoning)] if message.reasoning else []
    if message.content or not message.tool_calls:
        parts.append(lm15.TextPart(message.content or ""))
    parts += [_call_part(call) for call in message.tool_calls if call.is_complete]
    logprobs = completion.choices[0].logprobs
    return lm15.Response(
        id=completion.request_id,
        model=request.model,
        message=lm15.Message("assistant", tuple(parts or [lm15.TextPart("")])),
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        usage=_usage(completion.usage),
        logprobs=None if logprobs is None else tuple(_token(row, tokenizer) for row in logprobs),
    )


def _call_part(call: ToolCall) -> lm15.ToolCallPart:
    return lm15.ToolCallPart(call.id, call.name, call.parsed_arguments())


def _token(row: Sequence[Logprob], tokenizer: Any) -> lm15.TokenLogprob:
    """Make the entry of one place: the token that was sampled, and the likeliest."""
    (token_id, logprob), *others = row
    raw: bytes = tokenizer.token_bytes(token_id)
    top = [lm15.TopLogprob(_shown(tokenizer.token_bytes(i)), float(p), token_id=i) for i, p in others]
    return lm15.TokenLogprob(_shown(raw), float(logprob), bytes=tuple(raw), token_id=token_id, top=tuple(top))


def _shown(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _usage(usage: Usage) -> lm15.Usage:
    return lm15.Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        cache_read_tokens=usage.cached_tokens,
    )


class _Events:
    """Makes the events of one answer's deltas: each reasoning, text or call that follows another is a part."""

    def __init__(self) -> None:
        self._part = -1
        self._kind: type | None = None

    def of(self, deltas: Sequence[Delta]) -> Iterator[lm15.StreamDeltaEvent]:
        for delta in deltas:
            if isinstance(delta, TextDelta | ReasoningDelta):
                if type(delta) is not self._kind:
                    self._next_part(type(delta))
                kind = lm15.TextDelta if isinstance(delta, TextDelta) else lm15.ThinkingDelta
                yield lm15.StreamDeltaEvent(kind(delta.text, part_index=self._part))
            elif isinstance(delta, ToolCallStart):
                self._next_part(ToolCallStart)
                yield lm15.StreamDeltaEvent(lm15.ToolCallDelta("", self._part, delta.id, delta.name))
            elif isinstance(delta, ToolCallDelta):
                yield lm15.StreamDeltaEvent(lm15.ToolCallDelta(delta.arguments, self._part))

    def _next_part(self, kind: type) -> None:
        self._part += 1
        self._kind = kind


def _end_event(completion: Completion[Any]) -> lm15.StreamEndEvent:
    check_not_aborted(completion)
    return lm15.StreamEndEvent(_FINISH_REASONS[completion.finish_reason], _usage(completion.usage))


@contextmanager
def _lm15_errors() -> Iterator[None]:
    """Raise the engine's errors as lm15's."""
    try:
        yield
    except AEngineError as error:
        kind: Any = next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))
        retry_after = error.retry_after if isinstance(error, EngineOverloadedError) else None
        raise kind(str(error), provider=_PROVIDER, retry_after=retry_after) from error
