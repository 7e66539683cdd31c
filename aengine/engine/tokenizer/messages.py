"""`checked_messages`: validates a caller's chat messages and puts results in order, once for all later steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequestError
from ...limits.bounds import MAX_MESSAGES
from ...limits.checks import num_parts_of
from ...limits.values import shown

Messages = list[dict[str, Any]]
"""At least one message, each with a role and a content: a text, a list of text parts, or None for an assistant's."""

WRITTEN_BY_MODEL = ("content", "reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's message under which chat templates look for what the model wrote."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Names of the types of text parts, in chat completions and in responses."""


def checked_messages(messages: object) -> Messages:
    """Copy and validate the messages; results of tools come into the order of the calls that they answer, as many
    templates show neither's id. Raises InvalidRequestError, which names the place."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _invalid("messages must be a list of messages such as {'role': 'user', 'content': '...'}")
    if len(messages) > MAX_MESSAGES:
        raise _invalid(f"messages has {len(messages)} items: there may be {MAX_MESSAGES}")
    checked = [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not checked:
        raise _invalid("messages must be a list of at least one message")
    if (num_parts := num_parts_of(checked)) > MAX_MESSAGES:
        raise _invalid(f"all messages have {num_parts} parts and calls: there may be {MAX_MESSAGES}")
    return _in_order_of_calls(checked)


def call_id_of(given: Mapping[str, Any], key: str = "id") -> str | int | None:
    """Return the id of a call, or with another ``key`` the one that a result names. What is no id must not be looked
    up: None."""
    call_id = given.get(key)
    return call_id if isinstance(call_id, str | int) else None


def _in_order_of_calls(messages: Messages) -> Messages:
    """Return the messages, with the results of each group of calls in the order of the calls.

    The results change places among themselves, and all else stays where it is: also a result without an id, or with
    one that is of none of the latest calls.
    """
    ordered = list(messages)
    calls: dict[str | int, deque[tuple[int, int]]] = {}  # places of the latest group's, by id: one may come twice
    results: list[tuple[tuple[int, int], int]] = []  # (place of the call, place of its result)
    has_results = False  # whether the latest group has any
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            given = message.get("tool_calls")  # the caller may have put any value there
            known = given if isinstance(given, Sequence) else ()
            ids = [call_id_of(call) for call in known if isinstance(call, Mapping)]
            if ids and has_results:
                calls.clear()
                has_results = False
            for number, call_id in enumerate(ids):
                if call_id is not None:
                    calls.setdefault(call_id, deque()).append((place, number))
        elif message["role"] == "tool":
            call_id = call_id_of(message, "tool_call_id")
            if call_id is not None and (answered := calls.get(call_id)):
                results.append((answered.popleft() if len(answered) > 1 else answered[0], place))
                has_results = True
    # Those of one group stand before the next one's, as their calls do.
    for (_, place), (_, wanted) in zip(results, sorted(results), strict=True):
        ordered[place] = messages[wanted]
    return ordered


def _checked(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} must be a mapping with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _invalid(f"{where} has no role ('user', 'assistant', 'system', ...)")
    role = str.__str__(role)  # templates write the str() of a value, which is the name of an Enum's member
    if content is None and role == "tool":  # a tool that returns nothing; templates take texts
        content = ""
    if content is None:
        if role != "assistant":
            raise _invalid(f"{where} has no 'content'")
        return {**message, "role": role}
    checked = str.__str__(content) if isinstance(content, str) else _checked_parts(content, f"{where}.content")
    return {**message, "role": role, "content": checked}


def _checked_parts(content: object, where: str) -> list[Any]:
    if isinstance(content, Mapping | bytes | bytearray) or not isinstance(content, Sequence):
        raise _invalid(f"{where} must be a text, a list of text parts, or None, not {type(content).__name__}")
    if len(content) > MAX_MESSAGES:
        raise _invalid(f"{where} has {len(content)} parts: there may be {MAX_MESSAGES}")
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
