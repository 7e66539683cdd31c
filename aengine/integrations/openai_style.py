"""Settings of frameworks that speak as OpenAI's chat completions do; the engine's async and its blocking interface.

{"max_completion_tokens": 5, "response_format": {...}, "tools": [...]} ──> SamplingParams, options of `stream_chat`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..async_llm import AsyncLLM
from ..engine.handles.sync_llm import SyncLLM
from ..errors import InvalidRequestError, RequestError
from ..limits.retention import SECONDS, SHORT
from ..limits.values import not_valid
from ..llm import LLM
from ..outputs import Completion, FinishReason, Logprob
from ..params import SamplingParams, StructuredOutput
from .settings import engine_settings, reasoning_variables

_WITHOUT_EFFECT = {
    "metadata",
    "model",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "user",
    "verbosity",
}
"""Parameters of OpenAI's that change nothing in an answer of this engine."""


def async_side(engine: AsyncLLM | LLM) -> AsyncLLM:
    """Return the engine's async interface. Raises InvalidRequestError for anything but an engine, as a model's name."""
    if not isinstance(engine, AsyncLLM | LLM):
        raise InvalidRequestError(f"engine must be an AsyncLLM or an LLM, not {engine!r:.80}", param="engine")
    return engine.as_async() if isinstance(engine, LLM) else engine


def blocking_side(engine: AsyncLLM | LLM) -> SyncLLM:
    """Return the engine's blocking interface.

    Raises InvalidRequestError for an `AsyncLLM` on an event loop: it must be made with ``own_thread=True``.
    """
    return engine if isinstance(engine, LLM) else engine.sync


def check_not_aborted(completion: Completion[Any]) -> None:
    """Raise RequestError if somebody else ended the request: what there is must not pass for the whole answer."""
    if completion.finish_reason is FinishReason.ABORT:
        raise RequestError(f"the request {completion.request_id} was aborted")


def openai_settings(given: Mapping[str, Any]) -> tuple[SamplingParams, Any]:
    """Split a chat completion's parameters into `SamplingParams` and the options of `AsyncLLM.stream_chat`.

    Args:
        given: OpenAI's names, and the engine's own, also in ``extra_body``. ``timeout``, a number of seconds, is the
            request's deadline. None: not given. What a grammar can't hold of a schema is relaxed, unless its tool or
            its ``response_format`` is strict.

    Raises:
        InvalidRequestError: a name that neither has, or a wrong value.
    """
    values = {name: value for name, value in given.items() if value is not None and name not in _WITHOUT_EFFECT}
    more = values.pop("extra_body", {})
    tools = values.get("tools") or ()
    response_format = values.pop("response_format", None)
    is_strict = _is_strict(response_format) or any(_is_strict(tool) for tool in tools)
    values.setdefault("on_unsupported", "error" if is_strict else "relax")
    if response_format is not None:
        values["structured_output"] = _shape(response_format, values["on_unsupported"])
    if "max_completion_tokens" in values:
        values["max_tokens"] = values.pop("max_completion_tokens")
    if "timeout" in values:
        values["deadline"] = _seconds(values.pop("timeout"))
    if isinstance(values.get("logprobs"), bool):  # chat completions have a bool here, and top_logprobs beside it
        most = values.pop("top_logprobs", 0)
        values["logprobs"] = most if values["logprobs"] else None
    key, retention = values.pop("prompt_cache_key", None), values.pop("prompt_cache_retention", None)
    if key is not None or retention is not None:
        values |= {"session_id": key, "keep": _seconds_kept(retention)}
    variables = reasoning_variables(values.pop("reasoning_effort", None))
    if variables:
        values["chat_template_kwargs"] = {**variables, **values.get("chat_template_kwargs", {})}
    if not tools:
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            values.pop(name, None)
    return engine_settings(values, more)


def _is_strict(thing: Any) -> bool:
    if not isinstance(thing, Mapping):
        return False
    inner = thing.get("function") or thing.get("json_schema") or thing
    return isinstance(inner, Mapping) and inner.get("strict") is True


def _shape(response_format: Any, on_unsupported: Any) -> StructuredOutput | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is not None:
            return StructuredOutput(json_schema=schema, on_unsupported=on_unsupported)
    raise InvalidRequestError(
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': "
        "{'schema': {...}}}",
        param="response_format",
    )


def _seconds_kept(retention: Any) -> float:
    if retention is not None and retention not in SECONDS:
        raise not_valid("prompt_cache_retention", retention, f"one of {', '.join(SECONDS)}")
    return SHORT if retention is None else SECONDS[retention]


def _seconds(timeout: Any) -> float:
    """Return a timeout as seconds; of httpx's kind the time for reading."""
    timeout = getattr(timeout, "read", timeout)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise InvalidRequestError("timeout must be a number of seconds: it is the request's deadline", param="timeout")
    return timeout


def text_of(content: Any) -> str | None:
    """Return the text of a message's content, whose parts are as OpenAI's.

    Raises InvalidRequestError for a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(f"the engine reads text only, and no part of type {kind!r}", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


def openai_logprobs(rows: Iterable[Sequence[Logprob]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the entries of tokens as chat completions have them in ``logprobs["content"]``.

    Args:
        rows: one for each token: itself, and the likeliest at its place. Empty ones are left out.
    """
    entries = [[_logprob_entry(one, tokenizer) for one in row] for row in rows if row]
    return [{**first, "top_logprobs": others} for first, *others in entries]


def _logprob_entry(one: Logprob, tokenizer: Any) -> dict[str, Any]:
    raw: bytes = tokenizer.token_bytes(one.token_id)
    # JSON has no infinity: -9999.0 stands for what is impossible.
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(one.logprob, -9999.0)}
