"""`conversation_of`: Anthropic's system prompt and messages as messages of the engine's chats."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ...limits.checks import check_num_items
from ..http import HTTPError
from .requests import CountBody, Message, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock

Messages = list[dict[str, Any]]


def conversation_of(body: CountBody) -> tuple[Messages, dict[str, Any]]:
    """Return the messages, and the options that say how they become a prompt.

    A conversation that ends with an assistant's message is continued. Raises HTTPError 400 where results don't match
    the calls before them, and InvalidRequestError for more messages or blocks than are read.
    """
    check_num_items("messages", body.messages, (message.content for message in body.messages))
    messages: Messages = []
    if body.system:
        messages.append({"role": "system", "content": _text_of(body.system)})
    calls: dict[str, None] = {}  # ids of the last assistant's message that no result has come for
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if message.role == "assistant":
            _check_answered(calls, where)
            messages.append(_assistant(message, where))
            calls = dict.fromkeys(call["id"] for call in messages[-1].get("tool_calls", ()))
        else:
            messages += _results(message, calls, where)
            _check_answered(calls, where)
            if (said := _said(message, where)) is not None:
                messages.append(said)
    _check_answered(calls, "the end")
    is_continued = bool(body.messages) and body.messages[-1].role == "assistant"
    return messages, {"continue_final_message": True} if is_continued else {}


def _assistant(message: Message, where: str) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            raise _error(f"{where} has a tool_result: those are a user's", where)
    written: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if any(thoughts):
        written["reasoning_content"] = "\n".join(thoughts)
    if calls:
        written["tool_calls"] = calls
        if len({call["id"] for call in calls}) < len(calls):
            raise _error(f"{where} has two tool_use blocks of one id", where)
    return written


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _results(message: Message, calls: dict[str, None], where: str) -> Messages:
    """Return the results as messages of tools, and take their calls out of ``calls``."""
    results = []
    for block in _blocks_of(message):
        if isinstance(block, ToolResultBlock):
            if message.role != "user":
                raise _error(f"{where} has a tool_result: those are a user's", where)
            if block.tool_use_id not in calls:
                raise _error(
                    f"{where} has a tool_result for {block.tool_use_id[:100]!r}: the assistant's message before it "
                    "must have the tool_use, and each gets one result",
                    where,
                )
            del calls[block.tool_use_id]
            text = _text_of(block.content or [])
            shown = f"Error: {text}" if block.is_error else text
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": shown})
    return results


def _check_answered(calls: Collection[str], where: str) -> None:
    for call_id in calls:
        raise _error(f"there is no tool_result for {call_id[:100]!r} before {where}: the next message must have it")


def _said(message: Message, where: str) -> dict[str, Any] | None:
    """Return what a user, or the system, has said besides results; None: nothing."""
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    for block in message.content:
        if not isinstance(block, TextBlock | ToolResultBlock):
            raise _error(f"{where} has a block of type {block.type!r}: those are an assistant's", where)
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if message.content and not texts:
        return None
    return {"role": message.role, "content": _text_of(texts)}


def _blocks_of(message: Message) -> list[Any]:
    return [] if isinstance(message.content, str) else message.content


def _text_of(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = [block.text for block in content]
    return "\n".join(texts)


def _error(message: str, where: str = "messages") -> HTTPError:
    return HTTPError(400, message, param=where)
