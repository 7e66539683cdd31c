"""Input items of a response as chat messages.

reasoning, message (assistant), function_call, ...  ──>  one assistant message
function_call_output                                ──>  a message of a tool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ....limits.checks import check_num_items
from ...http import HTTPError
from .tools import name_in_prompt

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def messages_of(items: str | Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a response's input, which follow those ``before``.

    Raises HTTPError 400, which names the item, and InvalidRequestError for more items or parts than are read.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    keys = ("content", "summary", "output")
    check_num_items("input", items, (item.get(key) for item in items for key in keys))
    reader = _Reader(call["id"] for message in before for call in message.get("tool_calls", ()))
    for i, item in enumerate(items):
        reader.read(item, f"input[{i}]")
    reader.end_answer()
    return reader.messages


def with_instructions(messages: Sequence[Mapping[str, Any]], instructions: str | None) -> list[Mapping[str, Any]]:
    """Put the instructions first, and make one message of them and of the system messages that follow: templates take
    one, as a rule."""
    texts = [instructions] if instructions else []
    systems = list(takewhile(lambda message: message["role"] == "system", messages))
    rest = messages[len(systems) :]
    contents = (message["content"] for message in systems)
    texts += [one if isinstance(one, str) else "\n".join(part["text"] for part in one) for one in contents]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else list(rest)


class _Reader:
    """Reads items one after the other. An assistant's message is complete when something else follows."""

    def __init__(self, call_ids: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None  # the assistant's message being collected; None: there is none
        self._reasoning: list[str] = []  # pieces of reasoning that belong to that message
        self._call_ids = set(call_ids)

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._read_message(item, where)
        elif kind == "function_call":
            self._read_call(item, where)
        elif kind == "function_call_output":
            self._read_output(item, where)
        elif kind == "reasoning":
            texts = item.get("content") or item.get("summary") or []
            text = _text_of(texts, f"{where}.content")
            if text:  # empty for encrypted reasoning, which can't be read
                self._add_reasoning(text)
        else:
            raise _wrong(f"{where}.type", f"an item of type {str(kind)[:80]!r} is not supported")

    def end_answer(self) -> None:
        if self._answer is not None:
            if "tool_calls" not in self._answer and self._answer["content"] is None:
                self._answer["content"] = ""  # templates expect a text where there are no calls
            if self._reasoning:
                self._answer["reasoning_content"] = "".join(self._reasoning)
                self._reasoning = []
            self.messages.append(self._answer)
            self._answer = None

    def _read_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        known = _ROLES.get(role) if isinstance(role, str) else None
        if known is None:
            raise _wrong(f"{where}.role", "the role must be user, assistant, system or developer")
        content = _text_of(item.get("content"), f"{where}.content")
        if known == "assistant":
            answer = self._answer
            if answer is None or answer["content"] is not None or "tool_calls" in answer:
                answer = self._begin_answer()
            answer["content"] = content
        else:
            self.end_answer()
            self.messages.append({"role": known, "content": content})

    def _read_call(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        name = name_in_prompt(_string(item, "name", where), item.get("namespace"))
        function = {"name": name, "arguments": _string(item, "arguments", where)}
        answer = self._answer or self._begin_answer()
        calls = answer.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._call_ids.add(call_id)

    def _read_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._call_ids:
            raise _wrong(f"{where}.call_id", f"there is no function_call with the call_id {call_id[:80]!r} before it")
        self.end_answer()
        content = _text_of(item.get("output"), f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_reasoning(self, text: str) -> None:
        answer = self._answer
        if answer is None or answer["content"] is not None or "tool_calls" in answer:
            self._begin_answer()
        self._reasoning.append(text)

    def _begin_answer(self) -> dict[str, Any]:
        """End the assistant's message, and begin another."""
        self.end_answer()
        self._answer = {"role": "assistant", "content": None}
        return self._answer


def _text_of(content: object, where: str) -> str:
    """Return the text of a content, whole or in parts: a line each, as a chat's."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "it must be a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise _wrong(f"{where}[{i}]", f"a part of type {str(kind)[:80]!r} can't be read: only texts can")
        texts.append(text)
    return "\n".join(texts)


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{key}", "it must be a string")
    return value


def _wrong(param: str, message: str) -> HTTPError:
    return HTTPError(400, f"{param} is wrong: {message}", code="invalid_value", param=param)
