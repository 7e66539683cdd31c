"""Earlier messages for a chat template without tools: calls and results as texts, tools in the system prompt.

assistant, tool_calls          ──> assistant   the calls as the model wrote them
tool, tool                     ──> user        {"tool_results": [{"name": ..., "content": ...}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequestError
from ..tokenizer.messages import Messages, call_id_of
from .formats import ToolFormat
from .syntax.arguments import JSON_OBJECT


def with_calls_in_text(messages: Messages, tool_format: ToolFormat) -> Messages:
    """Return the messages with calls as texts; results stay. Raises InvalidRequestError as `written_out`."""
    return [
        _with_calls_as_text(index, message, tool_format) if message.get("tool_calls") else message
        for index, message in enumerate(messages)
    ]


def written_out(messages: Messages, tool_format: ToolFormat) -> Messages:
    """Return the messages with calls and results as texts. Raises InvalidRequestError if calls are not as OpenAI's."""
    written: Messages = []
    names: dict[Any, str] = {}  # names of the called tools, by call id
    results: list[dict[str, Any]] = []  # results of the calls in the message written last
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            if results:
                written.pop()
            name = names.get(call_id_of(message, "tool_call_id"), message.get("name"))
            results.append(({"name": name} if name else {}) | {"content": message.get("content")})
            written.append({"role": "user", "content": _json_of(index, {"tool_results": results})})
            continue
        results = []
        if message.get("tool_calls"):
            names |= {call_id_of(call): name for call, name, _ in _calls_of(index, message)}
            message = _with_calls_as_text(index, message, tool_format)
        written.append(message)
    return written


def _with_calls_as_text(index: int, message: dict[str, Any], known: ToolFormat) -> dict[str, Any]:
    calls = _calls_of(index, message)
    texts = [
        known.head(name) + _as_written(index, arguments, known) + known.after_arguments for _, name, arguments in calls
    ]
    written = known.openings[0] + known.separator.join(texts) + known.closing_of(0)
    content = message.get("content") or ""
    content = [*content, {"type": "text", "text": written}] if isinstance(content, list) else content + written
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _as_written(index: int, arguments: Any, known: ToolFormat) -> str:
    text = _as_json(index, arguments)
    if known.arguments is JSON_OBJECT:
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return known.arguments.write(found) if isinstance(found, dict) else text


def _as_json(index: int, arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return _json_of(index, arguments)


def _json_of(index: int, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages[{index}] has what JSON can't say: {error}", param="messages") from None


def _calls_of(index: int, message: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Return each call with its name and its arguments."""
    try:
        functions = [(call, call.get("function", call)) for call in message["tool_calls"]]
        return [(call, function["name"], function["arguments"]) for call, function in functions]
    except (AttributeError, KeyError, TypeError):
        raise InvalidRequestError(
            f"tool_calls of messages[{index}] must be as OpenAI's: {{'id': ..., 'type': 'function', 'function': "
            "{'name': ..., 'arguments': '...'}}",
            param="messages",
        ) from None


def with_instructions(messages: Messages, instructions: str, *, takes_system: bool) -> Messages:
    """Put the tools' description first: into the system message, or else the first user message."""
    if takes_system:
        at = 0 if messages[0].get("role") == "system" else None
    else:
        at = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None or not isinstance(messages[at].get("content"), str):
        return [{"role": "system" if takes_system else "user", "content": instructions}, *messages]
    content = messages[at]["content"]
    texts = (content, instructions) if takes_system else (instructions, content)
    return [*messages[:at], {**messages[at], "content": "\n\n".join(texts)}, *messages[at + 1 :]]


def with_tools(messages: Messages, key: str, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Put the tools (`Tool.for_template`) into the system message, where the chat template reads them as JSON."""
    described = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if messages[0].get("role") != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], key: described}, *messages[1:]]
