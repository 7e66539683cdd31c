"""What the frameworks' models have in common: settings by name, tools and messages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..engine.structured.pydantic_schema import adapt
from ..params import ChatOptions, SamplingParams


def engine_settings(given: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> tuple[SamplingParams, Any]:
    """Split settings by name into `SamplingParams` and the keyword arguments of `AsyncLLM.stream_chat`.

    Args:
        given: settings of the framework, by the engine's names. None: not given.
        more: what the user gives beyond the framework's settings, by the same names; it goes before those of ``given``.

    Raises:
        InvalidRequestError: a name that neither has, or a wrong value.
    """
    values = {name: value for name, value in {**given, **(more or {})}.items() if value is not None}
    variables = {**(given.get("chat_template_kwargs") or {}), **((more or {}).get("chat_template_kwargs") or {})}
    if variables:
        values["chat_template_kwargs"] = variables
    options = {name: values.pop(name) for name in ChatOptions.__annotations__ if name in values}
    return SamplingParams.from_dict(values), options


def reasoning_variables(effort: bool | str | None) -> dict[str, Any]:
    """Return the variables by which chat templates are told whether, or how much, to reason. None: as they do by
    themselves."""
    if effort is None:
        return {}
    if isinstance(effort, bool):
        return {"enable_thinking": effort}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def as_of_type(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that a framework has made of a Python type as the engine makes it: without other keys than those
    that the type names, which pydantic ignores and small models like to invent, and without what no grammar holds."""
    adapted = copy.deepcopy(dict(schema))
    adapt(adapted)
    return adapted


def function_tool(name: str, description: str | None, schema: Mapping[str, Any], strict: bool | None) -> dict[str, Any]:
    """Return a framework's function as the engine takes it, also one in another process: plain data.

    ``strict``: the schema is held as it is. Otherwise it is one of Python types.
    """
    parameters = schema if strict else as_of_type(schema)
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def allowed_tools(mode: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the choice among some of the tools: ``mode`` "auto" or "required"."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_message(content: str | None, thoughts: Sequence[str], calls: Sequence[Any], joint: str) -> dict[str, Any]:
    """Return an earlier answer; ``thoughts``, which ``joint`` joins, and ``calls`` where there are any."""
    written: dict[str, Any] = {"role": "assistant", "content": content}
    if any(thoughts):
        written["reasoning_content"] = joint.join(thoughts)
    return written | ({"tool_calls": calls} if calls else {})


def with_one_system_message(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages that begin a chat: many chat templates take no more than one."""
    written = [dict(message) for message in messages]
    num_leading = next((i for i, message in enumerate(written) if message.get("role") != "system"), len(written))
    if num_leading < 2:
        return written
    texts = [_text_of(message["content"]) for message in written[:num_leading]]
    return [{"role": "system", "content": "\n\n".join(texts)}, *written[num_leading:]]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
