"""Messages of a chat completion, as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..http import HTTPError


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages; OpenAI's role "developer", which chat templates don't know, becomes "system".

    Raises HTTPError 400 for a tool's message that answers no call. All else the engine checks.
    """
    call_ids: set[str] = set()
    taken: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if message.get("role") == "developer":
            message = {**message, "role": "system"}
        elif message.get("role") == "assistant":
            call_ids |= set(_call_ids(message))
        elif message.get("role") == "tool" and _id_of(message) not in call_ids:
            param = f"messages[{i}].tool_call_id"
            raise HTTPError(
                400, f"{param} is wrong: no message of the assistant before it calls a tool with this id", param=param
            )
        taken.append(message)
    return taken


def _id_of(message: Mapping[str, Any]) -> str | None:
    call_id = message.get("tool_call_id")
    return call_id if isinstance(call_id, str) else None


def _call_ids(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [call["id"] for call in calls if isinstance(call, Mapping) and isinstance(call.get("id"), str)]
