"""`Items`: the output of a response as it grows, and the events that tell of it.

A delta goes into the item that is open, or closes it and opens another. Reasoning, then a message, then function calls,
as a rule.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from ....chat import Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from ....outputs import Token
from ..answers import MOST_EVENTS, dumps

__all__ = ["Events", "Items"]

TokenEntry = Callable[[Token], dict[str, Any]]
FieldsOfCall = Callable[[str], dict[str, str]]


class Events:
    """Writes server-sent events, numbered."""

    def __init__(self) -> None:
        self._written: list[str] = []
        self._number = 0

    def add(self, kind: str, **fields: Any) -> None:
        self.add_written(kind, dumps(fields)[1:-1])

    def add_written(self, kind: str, fields: str) -> None:
        """Add an event whose fields are written already, without braces."""
        self._written.append(f'event: {kind}\ndata: {{"type":"{kind}",{fields},"sequence_number":{self._number}}}\n\n')
        self._number += 1

    @property
    def is_full(self) -> bool:
        """Whether what was written should be taken first."""
        return len(self._written) >= MOST_EVENTS

    def take(self) -> str:
        """Return what was written since the last time."""
        text = "".join(self._written)
        self._written.clear()
        return text


class Items:
    """Output items, made of deltas.

    Args:
        events: where each change is told; None: nowhere.
        token_entry: what a token's logprob looks like; None: none are wanted.
        fields_of_call: the fields of a call that say which function it calls, by the name the model wrote.
    """

    def __init__(self, events: Events | None, token_entry: TokenEntry | None, fields_of_call: FieldsOfCall) -> None:
        self.output: list[dict[str, Any]] = []
        self._events = events
        self._token_entry = token_entry
        self._fields_of_call = fields_of_call
        self._texts: list[str] = []  # of the open item: its text or its arguments
        self._logprobs: list[dict[str, Any]] = []  # of the open message
        self._open: str | None = None  # type of the open item
        self._place = ""  # of the open item, as its deltas have it
        self._blank = ""  # white space that a message begins with; before a call there is no message then

    @property
    def reasoning(self) -> str:
        """All reasoning so far, which has ended."""
        texts = [part["text"] for item in self.output if item["type"] == "reasoning" for part in item["content"]]
        return "".join(texts)

    def add(self, delta: Delta) -> None:
        """Put in a delta."""
        match delta:
            case TextDelta(text=text, tokens=tokens):
                self._add_text(text, tokens)
            case ReasoningDelta(text=text):
                if self._open != "reasoning":
                    self._begin_part(
                        "reasoning", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}
                    )
                self._grow("response.reasoning_text.delta", text)
            case ToolCallStart(id=call_id, name=name):
                self._blank = ""
                self._logprobs.clear()
                self._begin("function_call", {"call_id": call_id, **self._fields_of_call(name), "arguments": ""})
            case ToolCallDelta(arguments=arguments):
                self._grow("response.function_call_arguments.delta", arguments)
            case ToolCallEnd():
                self._end("completed")

    def finish(self, is_complete: bool) -> None:
        """Close what is open. A call that was cut off is incomplete, whatever else is."""
        if self._blank and not any(item["type"] != "reasoning" for item in self.output):
            self._begin_message()
        self._end("completed" if is_complete and self._open != "function_call" else "incomplete")

    def _add_text(self, text: str, tokens: Iterable[Token]) -> None:
        entries = [self._token_entry(token) for token in tokens] if self._token_entry is not None else []
        if self._open != "message":
            self._blank += text
            if not self._blank.strip():
                if not self._open:  # those of reasoning and of calls have no place
                    self._logprobs += entries
                return
            self._begin_message(entries)
        else:
            self._logprobs += entries
            self._grow("response.output_text.delta", text, f',"logprobs":{dumps(entries)}')

    def _begin_message(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        held = self._logprobs if self._open is None else []
        text, self._blank = self._blank, ""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._begin_part("message", {"role": "assistant", "content": []}, part)
        self._logprobs = [*held, *entries]
        self._grow("response.output_text.delta", text, f',"logprobs":{dumps(self._logprobs)}')

    def _begin_part(self, kind: str, item: dict[str, Any], part: dict[str, Any]) -> None:
        self._begin(kind, item)
        self._place += ',"content_index":0'
        self._tell("response.content_part.added", f'"part":{dumps(part)}')

    def _begin(self, kind: str, fields: dict[str, Any]) -> None:
        self._end("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        self.output.append(item)
        self._open = kind
        self._texts, self._logprobs = [], []
        index = len(self.output) - 1
        self._place = f'"item_id":"{item["id"]}","output_index":{index}'
        if self._events is not None:
            self._events.add("response.output_item.added", output_index=index, item=item)

    def _grow(self, kind: str, text: str, more: str = "") -> None:
        self._texts.append(text)
        self._tell(kind, f'"delta":{dumps(text)}{more}')

    def _end(self, status: str) -> None:
        """Close the open item, if there is one."""
        if self._open is None:
            return
        kind, self._open = self._open, None
        item, text = self.output[-1], "".join(self._texts)
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            self._tell(
                "response.function_call_arguments.done", f'"name":{dumps(item["name"])},"arguments":{dumps(text)}'
            )
        else:
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            if kind == "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
                self._tell("response.output_text.done", f'"text":{dumps(text)},"logprobs":{dumps(self._logprobs)}')
            else:
                self._tell("response.reasoning_text.done", f'"text":{dumps(text)}')
            item["content"] = [part]
            self._tell("response.content_part.done", f'"part":{dumps(part)}')
        self._logprobs = []
        if self._events is not None:
            self._events.add("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _tell(self, kind: str, fields: str) -> None:
        if self._events is not None:
            self._events.add_written(kind, f"{self._place},{fields}")
