"""`Items`: the output of a response as it grows, and the events that tell of it.

A delta goes into the item that is open, or closes it and opens another. Reasoning, then a message, then function calls,
as a rule.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from ....chat import Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from ....outputs import Token
from ...http import as_utf8
from ..answers import EntryWriter, TokenRow, dumps

FieldsOfCall = Callable[[str], dict[str, str]]

_LONG = 1 << 20
"""Bytes of a piece that is sent by itself."""


class Events:
    """Writes server-sent events, numbered. What is long, and in several of them, is not copied.

    Args:
        most: after so many the caller should take them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[bytes] = []
        self._number = self._num_taken = 0

    def add(self, kind: str, **fields: Any) -> None:
        self.add_written(kind, as_utf8(dumps(fields)[1:-1]))

    def add_written(self, kind: str, *fields: bytes) -> None:
        """Add an event whose fields are written already, without braces, in one piece or several."""
        head = f'event: {kind}\ndata: {{"type":"{kind}",'.encode()
        self._pieces += [head, *fields, f',"sequence_number":{self._number}}}\n\n'.encode()]
        self._number += 1

    @property
    def is_full(self) -> bool:
        """Whether what was written should be taken first."""
        return self._number - self._num_taken >= self._most

    def take(self) -> list[bytes]:
        """Return what was written since the last time, each long piece by itself."""
        pieces, self._pieces, self._num_taken = self._pieces, [], self._number
        return [b"".join(group) for _, group in groupby(pieces, lambda piece: len(piece) > _LONG)]


class Items:
    """Output items, made of deltas.

    Args:
        events: where each change is told; None: nowhere.
        entries: writes the tokens' log-probabilities; None: none are wanted.
        fields_of_call: the fields of a call that say which function it calls, by the name the model wrote.
    """

    def __init__(self, events: Events | None, entries: EntryWriter | None, fields_of_call: FieldsOfCall) -> None:
        self.output: list[dict[str, Any]] = []
        """Without log-probabilities."""
        self._written: list[bytes] = []  # JSON of the items that have ended, and the separators between
        self._events = events
        self._entries = entries
        self._fields_of_call = fields_of_call
        self._texts: list[str] = []  # pieces of the open item's text or arguments
        self._logprobs: list[bytes] = []  # JSON of the open message's log-probabilities, an entry a token
        self._open: str | None = None  # type of the open item
        self._place = ""  # fields that place a delta in the open item
        self._blank = ""  # white space before a message that has not begun; before a call no message is begun for it

    @property
    def written(self) -> list[bytes]:
        """The output as JSON, in pieces. Only what has ended is there."""
        return [b"[", *self._written, b"]"]

    def add(self, delta: Delta) -> None:
        """Add a delta of the answer."""
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
        entries = [] if self._entries is None else [as_utf8(self._entries.entry(_row_of(token))) for token in tokens]
        if self._open != "message":
            self._blank += text
            if not self._blank.strip():
                if not self._open:  # log-probabilities of reasoning and calls are left out
                    self._logprobs += entries
                return
            self._begin_message(entries)
        else:
            self._logprobs += entries
            self._grow("response.output_text.delta", text, b',"logprobs":' + _list_of(entries))

    def _begin_message(self, entries: Iterable[bytes] = ()) -> None:
        held = self._logprobs if self._open is None else []
        text, self._blank = self._blank, ""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._begin_part("message", {"role": "assistant", "content": []}, part)
        self._logprobs = [*held, *entries]
        self._grow("response.output_text.delta", text, b',"logprobs":' + _list_of(self._logprobs))

    def _begin_part(self, kind: str, item: dict[str, Any], part: dict[str, Any]) -> None:
        self._begin(kind, item)
        self._place += ',"content_index":0'
        self._tell("response.content_part.added", as_utf8(f'"part":{dumps(part)}'))

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

    def _grow(self, kind: str, text: str, more: bytes = b"") -> None:
        self._texts.append(text)
        self._tell(kind, as_utf8(f'"delta":{dumps(text)}') + more)

    def _end(self, status: str) -> None:
        """Close the open item, if there is one."""
        if self._open is None:
            return
        kind, self._open = self._open, None
        item, text = self.output[-1], "".join(self._texts)
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            told = f'"name":{dumps(item["name"])},"arguments":{dumps(text)}'
            self._tell("response.function_call_arguments.done", as_utf8(told))
            written = [as_utf8(dumps(item))]
        elif kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            self._tell("response.reasoning_text.done", as_utf8(f'"text":{dumps(text)}'))
            self._tell("response.content_part.done", as_utf8(f'"part":{dumps(part)}'))
            written = [as_utf8(dumps(item))]
        else:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            item["content"] = [part]
            logprobs = _list_of(self._logprobs)
            self._tell("response.output_text.done", as_utf8(f'"text":{dumps(text)},"logprobs":'), logprobs)
            self._tell("response.content_part.done", b'"part":', *_filled(part, "}", logprobs))
            written = _filled(item, "}]}", logprobs)
        self._logprobs = []
        self._written += [b",", *written] if self._written else written
        if self._events is not None:
            head = f'"output_index":{len(self.output) - 1},"item":'.encode()
            self._events.add_written("response.output_item.done", head, *written)

    def _tell(self, kind: str, *fields: bytes) -> None:
        if self._events is not None:
            self._events.add_written(kind, f"{self._place},".encode(), *fields)


def _row_of(token: Token) -> TokenRow:
    return token.token_id, token.logprob, token.top_logprobs


def _list_of(entries: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(entries)


def _filled(value: dict[str, Any], end: str, logprobs: bytes) -> list[bytes]:
    """Write a value whose JSON ends with an empty list of log-probabilities, before ``end``, and put them there."""
    written = dumps(value).removesuffix(f"[]{end}")
    return [as_utf8(written), logprobs, end.encode()]
