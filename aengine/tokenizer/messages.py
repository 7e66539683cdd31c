"""`checked_messages`: validates a caller's chat messages, once for all later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError
from ..params import shown

__all__ = ["WRITTEN_BY_MODEL", "Messages", "checked_messages"]

Messages = list[dict[str, Any]]
"""At least one message, each with a role and a content: a text, a list of text parts, or None for an assistant's."""

WRITTEN_BY_MODEL = ("content", "reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's message under which chat templates look for what the model wrote."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Names of the types of text parts, in chat completions and in responses."""


def checked_messages(messages: object) -> Messages:
    """Copy and validate the messages. Raises InvalidRequestError, which names the place."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _invalid("messages must be a list of messages such as {'role': 'user', 'content': '...'}")
    checked = [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not checked:
        raise _invalid("messages must be a list of at least one message")
    return checked


def _checked(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} must be a mapping with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _invalid(f"{where} has no role ('user', 'assistant', 'system', ...)")
    if content is None and role != "assistant":
        raise _invalid(f"{where} has no 'content'")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": _checked_parts(content, f"{where}.content")}


def _checked_parts(content: object, where: str) -> list[Any]:
    if isinstance(content, Mapping | bytes | bytearray) or not isinstance(content, Sequence):
        raise _invalid(f"{where} must be a text, a list of text parts, or None, not {type(content).__name__}")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise _invalid(
                f"{where}[{i}] must be {{'type': 'text', 'text': '...'}}, not of type {shown(kind)}: "
                "the engine reads text only"
            )
    return list(content)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
