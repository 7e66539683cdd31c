"""The events of a message that streams.

message_start, ping
for each block: content_block_start, content_block_delta..., content_block_stop
message_delta (why it ended, usage), message_stop           or, whenever something fails: error
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ...chat import Delta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from ...errors import AEngineError
from ...outputs import FinishReason
from ..errors import aborted, http_error
from ..http import as_utf8, event
from ..openai.answers import dumps
from .answers import SIGNATURE, ending_of, usage_of
from .errors import error_body
from .requests import MessagesBody

if TYPE_CHECKING:
    from ...engine.streams.chat_stream import ChatStream


async def event_chunks(
    request: Request, body: MessagesBody, stream: ChatStream, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events, those that are there at once together.

    What fails before the first event is raised; what fails later is an event.
    """
    writer = _EventWriter(shows_thinking=body.shows_thinking)
    has_sent = False
    async with aclosing(stream):
        try:
            deltas = await stream.read()
            writer.begin(head | {"usage": usage_of(stream.usage, body.keep)})
            while deltas:
                for delta in deltas:
                    writer.write(delta)
                if writer.has_events:
                    yield writer.take()
                    has_sent = True
                deltas = await stream.read()
        except AEngineError as error:
            if not writer.has_begun:
                raise
            yield error_event(request, body, error)
            return
        completion = stream.completion
    if completion.finish_reason is FinishReason.ABORT:
        if not has_sent:
            raise aborted()
        yield writer.take() + error_event(request, body, aborted())
        return
    writer.end(ending_of(completion, body), usage_of(completion.usage, body.keep))
    yield writer.take()


def error_event(request: Request, body: MessagesBody, error: Exception) -> bytes:
    """Return the last event of a stream that fails."""
    return event(dumps(error_body(request, http_error(error, body))), "error")


class _EventWriter:
    """Writes the events of one message. What all deltas of a block share is written once."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self.has_begun = False
        self._shows_thinking = shows_thinking
        self._events: list[str] = []
        self._texts: list[str] = []  # texts of the open block that are not written yet
        self._open: type[Delta] | None = None  # type of the delta that has begun the open block
        self._index = -1  # index of the open block
        self._head = ""  # begin of each delta event of the open block
        self._blanks = ""  # white space before a text block that has not begun

    @property
    def has_events(self) -> bool:
        return bool(self._events or self._texts)

    def take(self) -> bytes:
        """Return what was written since the last time."""
        self._flush()
        text = "".join(self._events)
        self._events.clear()
        return as_utf8(text)

    def begin(self, message: dict[str, Any]) -> None:
        self.has_begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        self._add("message_start", {"message": message | empty})
        self._add("ping", {})

    def write(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text=text):
                if self._open is TextDelta:
                    self._texts.append(text)
                else:
                    self._begin_text(text)
            case ReasoningDelta(text=text):
                if self._open is not ReasoningDelta:
                    self._begin(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""}, "thinking")
                if self._shows_thinking:
                    self._texts.append(text)
            case ToolCallStart():
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                self._begin(ToolCallStart, block, "input_json", "partial_json")
            case ToolCallDelta(arguments=arguments):
                self._texts.append(arguments)
            case ToolCallEnd():
                self._stop()

    def end(self, ending: dict[str, Any], usage: dict[str, Any]) -> None:
        self._stop()
        self._add("message_delta", {"delta": ending, "usage": usage})
        self._add("message_stop", {})

    def _begin_text(self, text: str) -> None:
        """Begin a block of text, unless there is nothing but white space yet."""
        self._blanks += text
        if self._blanks and not self._blanks.isspace():
            blanks = self._blanks
            self._begin(TextDelta, {"type": "text", "text": "", "citations": None}, "text")
            self._texts.append(blanks)

    def _begin(self, kind: type[Delta], block: dict[str, Any], delta: str, key: str | None = None) -> None:
        self._stop()
        self._open = kind
        self._index += 1
        self._blanks = ""
        self._add("content_block_start", {"index": self._index, "content_block": block})
        self._head = (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{self._index},"delta":{{"type":"{delta}_delta","{key or delta}":'
        )

    def _stop(self) -> None:
        """End the block that is open, if one is."""
        self._flush()
        if self._open is ReasoningDelta:
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            self._add("content_block_delta", {"index": self._index, "delta": signature})
        if self._open is not None:
            self._add("content_block_stop", {"index": self._index})
            self._open = None

    def _flush(self) -> None:
        """Write the texts that have gathered, as one delta."""
        if text := "".join(self._texts):
            self._events.append(f"{self._head}{dumps(text)}}}}}\n\n")
        self._texts.clear()

    def _add(self, kind: str, fields: dict[str, Any]) -> None:
        self._events.append(f"event: {kind}\ndata: {dumps({'type': kind} | fields)}\n\n")
