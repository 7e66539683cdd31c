"""`MessageBuilder`: what a completion has said so far, as deltas to hand out and as the whole message."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from dataclasses import replace

from ..structured.parts import BLANKS
from .messages import ChatMessage, Delta, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, ToolCallEnd, ToolCallStart
from .syntax.scan import without_tokens

_ALPHANUMERIC = string.ascii_letters + string.digits


class MessageBuilder:
    """Collects the parts of an answer, without blanks that belong to none: at the ends of reasoning, and beside calls.

    Blanks are held back until something follows.
    """

    def __init__(self, id_length: int | None, shown: Mapping[int, str], *, is_continued: bool = False) -> None:
        """``id_length``: of the calls' ids, if they must have a certain one; ``shown``: the texts of tokens that have
        one, by letter; ``is_continued``: the prompt has the beginning of the reasoning, so that blanks that come first
        belong to it."""
        self._id_length = id_length
        self._shown = shown
        self._deltas: list[Delta] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[str] = []  # pieces of the last call's arguments
        self._is_open = False  # the last call may have more arguments to come
        self._blanks: list[str] | None = []  # blanks held back; None: text has begun, so that all blanks count
        self._blanks_are_text = True
        self._is_continued = is_continued
        self._reasoning_blanks: list[str] = []  # blanks held back that may be the end of the reasoning

    @property
    def message(self) -> ChatMessage:
        calls = list(self._calls)
        if self._is_open:
            calls[-1] = replace(calls[-1], arguments="".join(self._arguments))
        return ChatMessage("".join(self._text) or None, "".join(self._reasoning) or None, tuple(calls))

    def taken(self) -> list[Delta]:
        """Return the deltas made since the last call."""
        taken, self._deltas = self._deltas, []
        return taken

    def add(self, delta: Delta) -> None:
        """Add a delta that another builder has made, as it is."""
        if isinstance(delta, TextDelta):
            self._text.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            self._reasoning.append(delta.text)
        elif isinstance(delta, ToolCallDelta):
            self._arguments.append(delta.arguments)
        elif isinstance(delta, ToolCallStart):
            if self._is_open:  # the call before was cut off
                self.close_call(is_complete=False)
            self.open_call(delta.name, delta.id)
        else:
            self.close_call(is_complete=True)

    def add_text(self, text: str) -> None:
        text = without_tokens(text.translate(self._shown))
        if self._blanks is not None and text:
            self._blanks.append(text)
            if not text.strip(BLANKS):
                return
            text = "".join(self._blanks)
            self._blanks = None
        if text:
            self._text.append(text)
            self._deltas.append(TextDelta(text))

    def add_reasoning(self, text: str) -> None:
        text = without_tokens(text.translate(self._shown))
        if not self._reasoning and not self._is_continued:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        if body:
            piece = "".join(self._reasoning_blanks) + body
            self._reasoning_blanks.clear()
            self._reasoning.append(piece)
            self._deltas.append(ReasoningDelta(piece))
        self._reasoning_blanks.append(text[len(body) :])

    def start_afresh(self) -> None:
        """Begin a part after reasoning or a call: blanks that come next, and nothing after them, are no text."""
        self._blanks, self._blanks_are_text = [], False

    def finish(self) -> None:
        """End the message: blanks that are all the answer are its text."""
        if self._blanks and self._blanks_are_text:
            text = "".join(self._blanks)
            self._text.append(text)
            self._deltas.append(TextDelta(text))
        self._blanks = None

    def open_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. ``call_id``: the model's own; None: a new one."""
        call = ToolCall(call_id or self._new_id(), name, "", is_complete=False)
        self._deltas.append(ToolCallStart(len(self._calls), call.id, name))
        self._calls.append(call)
        self._arguments, self._is_open = [], True
        self._blanks = None

    def add_arguments(self, piece: str) -> None:
        if piece:
            self._arguments.append(piece)
            self._deltas.append(ToolCallDelta(len(self._calls) - 1, piece))

    def close_call(self, *, is_complete: bool) -> None:
        """End the last call; complete only if its arguments are JSON: an unconstrained model may write anything."""
        text = "".join(self._arguments)
        is_complete = is_complete and _is_object(text)
        self._calls[-1] = replace(self._calls[-1], arguments=text, is_complete=is_complete)
        self._is_open = False
        if is_complete:
            self._deltas.append(ToolCallEnd(len(self._calls) - 1))

    def _new_id(self) -> str:
        if self._id_length is None:
            return "call_" + secrets.token_hex(12)
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self._id_length))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
