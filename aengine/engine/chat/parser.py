"""`ChatParser`: a completion, as it streams, into text, reasoning and tool calls.

    reasoning ──> start ──> scanning <──┐   text, until a call's trigger        "<tool_call>"
                    │          │        │
                    │        heading ───┤   which tool?                         "\\n{"name": "get_time", "arguments": {"
                    │          │        │
                    ├─────> arguments ──┼─> broken: up to its end, the rest is text without marks
                    │          │        │   up to the brace that closes them    ""zone": "UTC"}"
                    │        after      │   the call is complete                "}\\n</tool_call>"
                    │          │        │
                    │       between ────┘   another call, or the group's end
                    └─────> plain           nothing but text from here on

A state looks at the buffer, takes what it understands, and waits for more only while the buffer may still become one
of the format's strings. So the buffer is short, the work is linear, and what comes out is the same however the text is
split. Whatever does not follow the format is text; nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..structured.parts import BLANKS
from .formats import INDEX, JSON, ReasoningFormat, TokenId, ToolFormat, in_vocabulary
from .message_builder import MessageBuilder
from .messages import ChatMessage, Delta
from .spellings import LOOSE, Head, Spellings
from .syntax import harmony
from .syntax.arguments import ArgumentReader, Progress
from .syntax.scan import TOKENS, held_back, length_of, longest_of, squeezed
from .tools import Tool

_PIECE = 1024

State = Callable[["ChatParser"], bool]
"""Takes from the buffer, and says whether the next state should go on at once."""


class ChatParser:
    """Parses one completion. Give it the tools that the completion may call: none for ``tool_choice="none"``."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Sequence[Tool],
        has_shape: bool,
        token_id: TokenId,
    ) -> None:
        """``token_id`` as for `compose`; ``has_shape``: an answer without calls has one, so calls only stand first."""
        known, reasoning = in_vocabulary(tool_format or JSON, reasoning, token_id)
        markers = known.tokens
        self._sentinels = {token_id: (name, markers.encode(name)) for name, token_id in markers.ids}
        self._names_of_text = markers.names_of_text
        unseen = {mark for marks in known.text_marks for mark in marks}
        shown = str.maketrans({sign: name for sign, name in self._names_of_text.items() if sign not in unseen})
        self._format = known if tools and tool_format else None
        self._tools = {tool.name: tool for tool in tools}
        self._scans = self._format is not None and self._format.text != "instead" and not has_shape
        self._spellings = Spellings(self._format, [*self._tools], has_shape=has_shape) if self._format else None
        self._triggers = self._spellings.triggers if self._spellings is not None else {}
        is_around = self._scans and self._format is not None and self._format.text == "around"
        self._after_group: State = ChatParser._scanning if is_around else ChatParser._plain
        self._begin, self._end = (reasoning.begin, reasoning.end) if reasoning else ("", "")
        self._has_channels = known.channels
        self._preamble = self._final = ""
        if self._has_channels:
            self._scans = False
            self._begin, self._end = markers.encode(harmony.ANALYSIS), markers.encode(harmony.END)
            self._preamble, self._final = markers.encode(harmony.PREAMBLE), markers.encode(harmony.FINAL)

        self._kind = (known, reasoning, shown)
        self._builder = _new_builder(*self._kind)
        self._reader: ArgumentReader
        self._buffer = ""
        self._leftover: list[str] = []  # pieces of a call that can't be read
        # A function, not a bound method: a parser that references itself is freed by the garbage collector alone.
        begins_in_reasoning = reasoning is not None and reasoning.begun
        self._state: State = ChatParser._reasoning if begins_in_reasoning else ChatParser._start

    def __copy__(self) -> ChatParser:
        """Return a new parser, which has read nothing, with the strings of all tools shared with this one."""
        parser = ChatParser.__new__(ChatParser)
        parser.__dict__.update(self.__dict__)
        parser._builder, parser._leftover = _new_builder(*self._kind), []
        return parser

    def feed(self, text: str, token_id: int | None = None) -> list[Delta]:
        """Take the next piece. ``token_id``: the token that ended it, needed where markers are control tokens."""
        if TOKENS.search(text):  # no detokeniser makes them
            text = TOKENS.sub("\ufffd", text)
        if token_id in self._sentinels:
            name, sentinel = self._sentinels[token_id]
            text = text.removesuffix(name) + sentinel  # the name is in the text if special tokens are shown
        for start in range(0, len(text), _PIECE):  # a state copies what it leaves in the buffer, so that must be short
            self._buffer += text[start : start + _PIECE]
            while self._state(self):
                pass
        return self._builder.taken()

    def finish(self) -> list[Delta]:
        """End the parsing, as the completion has ended, and return the deltas held back until now."""
        if self._state is ChatParser._reasoning:
            self._builder.add_reasoning(self._buffer)
        elif self._state is ChatParser._broken:
            self._leftover.append(self._buffer)
            self._add_leftover()
        elif self._state not in (ChatParser._arguments, ChatParser._after):  # there the buffer is part of the call
            is_first = self._state not in (ChatParser._between, ChatParser._rejoining)
            name = self._spellings.named(self._buffer, is_first) if self._spellings is not None else None
            if name is not None:
                self._builder.open_call(name)
                self._builder.close_call(is_complete=False)
            elif is_first:
                self._builder.add_text(self._buffer)
        self._buffer = ""
        self._builder.finish()
        self._state = ChatParser._plain
        return self._builder.taken()

    @property
    def message(self) -> ChatMessage:
        """The message so far."""
        return self._builder.message

    # States.

    def _reasoning(self) -> bool:
        body, end, rest = self._buffer.partition(self._end)
        if not end:
            held = held_back(body, (self._end,))
            self._builder.add_reasoning(body[: len(body) - held])
            self._buffer = body[len(body) - held :]
            return False
        self._builder.add_reasoning(body)
        self._builder.start_afresh()
        return self._go(ChatParser._after_reasoning, rest)

    def _after_reasoning(self) -> bool:
        if self._has_channels:
            return self._go(ChatParser._start, self._buffer)
        self._begin = ""
        self._buffer = self._buffer.lstrip(BLANKS)
        return bool(self._buffer) and self._go(ChatParser._start, self._buffer)

    def _start(self) -> bool:
        """Begin the answer: with reasoning, a call where no text may precede it, or text."""
        first = longest_of(filter(None, (self._begin, self._preamble, self._final)), self._buffer)
        head, is_sure = None, True
        if self._spellings is not None and not self._scans:
            head, is_sure = self._spellings.first_head(self._buffer)
        if first is None or not is_sure:
            return False
        if first and first in (self._preamble, self._final):
            state = ChatParser._plain if first == self._final else ChatParser._before_call
            return self._go(state, self._buffer[len(first) :])
        if first:
            self._builder.start_afresh()
            return self._go(ChatParser._reasoning, self._buffer[len(first) :])
        if head is not None:
            return self._call(head)
        return self._go(ChatParser._scanning if self._scans else ChatParser._plain, self._buffer)

    def _before_call(self) -> bool:
        """Take the text of a message after which another message follows."""
        body, end, rest = self._buffer.partition(self._end)
        if end:
            self._builder.add_text(body)
            return self._go(ChatParser._start, rest)
        keep = len(body) - held_back(body, (self._end,))
        self._builder.add_text(body[:keep])
        self._buffer = body[keep:]
        return False

    def _scanning(self) -> bool:
        places = {self._buffer.find(trigger): trigger for trigger in self._triggers}
        first = min((place for place in places if place >= 0), default=None)
        if first is None:
            keep = len(self._buffer) - held_back(self._buffer, self._triggers)
            self._builder.add_text(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return False
        self._builder.add_text(self._buffer[:first])
        return self._go(ChatParser._heading, self._buffer[first:])

    def _heading(self) -> bool:
        trigger = next(trigger for trigger in self._triggers if self._buffer.startswith(trigger))
        head, is_sure = self._triggers[trigger].find(self._buffer)
        if not is_sure:
            return False
        if head is not None:
            return self._call(head)
        self._builder.add_text(trigger)
        return self._go(ChatParser._scanning, self._buffer[len(trigger) :])

    def _arguments(self) -> bool:
        end, written, progress = self._reader.read(self._buffer)
        rest = self._buffer[end:]
        self._builder.add_arguments(written)
        if progress is Progress.WHOLE:
            return self._go(ChatParser._after, rest)
        if progress is Progress.BROKEN:
            if rest and self._reader.is_in_string and rest[0] in self._names_of_text:
                return self._go(ChatParser._arguments, self._names_of_text[rest[0]] + rest[1:])
            return self._give_up(rest)
        self._buffer = rest
        return False

    def _after(self) -> bool:
        assert self._spellings is not None
        found = longest_of(self._spellings.ends, squeezed(self._buffer))
        if found is None:
            return False
        if not found and "" not in self._spellings.ends:
            return self._give_up(self._buffer)
        self._builder.close_call(is_complete=True)
        self._builder.start_afresh()
        return self._go(ChatParser._between, self._buffer[length_of(self._buffer, len(found)) if found else 0 :])

    def _between(self) -> bool:
        """Continue after a complete call."""
        assert self._format is not None
        if not self._format.is_group and self._after_group == ChatParser._scanning:
            return self._go(ChatParser._scanning, self._buffer)
        if not self._buffer:
            return False
        return self._rejoining()

    def _rejoining(self) -> bool:
        """Continue at what stopped the reading of a call: its end, another call of its group, or the group's end."""
        assert self._format is not None and self._spellings is not None
        spelt = squeezed(self._buffer)
        is_after_call = self._state is ChatParser._between
        end = "" if is_after_call else longest_of(filter(None, self._spellings.ends), spelt)
        closing = longest_of(self._spellings.closings, spelt)
        head, is_sure = self._spellings.next_heads.find(self._buffer)
        if end is None or closing is None or not is_sure:
            return False
        if not (end or closing or head is not None):
            if is_after_call and not self._format.is_group:
                return self._go(self._after_group, self._buffer)
            if self._spellings.again and self._buffer.startswith(self._spellings.again):  # a call of an unknown tool
                self._leftover.append(self._buffer[0])
                self._buffer = self._buffer[1:]
            return self._go(ChatParser._broken, self._buffer)
        self._add_leftover()
        if head is not None:
            return self._call(head)
        state = ChatParser._between if end else self._after_group
        return self._go(state, self._buffer[length_of(self._buffer, len(end or closing)) :])

    def _broken(self) -> bool:
        """Collect text that no format explains, up to the mark that ends it."""
        assert self._spellings is not None
        stops, triggers = self._spellings.stops, self._triggers if self._scans else ()
        if not stops:
            self._buffer = self._buffer.lstrip(LOOSE)
            return bool(self._buffer) and self._go(
                ChatParser._scanning if self._scans else ChatParser._plain, self._buffer
            )
        marks = [*stops, *triggers, *filter(None, [self._spellings.again])]
        place, mark = min(
            ((place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0),
            default=(len(self._buffer) - held_back(self._buffer, marks), ""),
        )
        self._leftover.append(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if mark == self._spellings.again or not mark:
            return bool(mark) and self._go(ChatParser._rejoining, self._buffer)
        self._add_leftover()
        if mark in triggers:
            return self._go(ChatParser._scanning, self._buffer)
        self._builder.start_afresh()
        return self._go(self._after_group, self._buffer[len(mark) :])

    def _plain(self) -> bool:
        self._builder.add_text(self._buffer)
        self._buffer = ""
        return False

    # Functions that several states use.

    def _add_leftover(self) -> None:
        if self._leftover and self._spellings is not None:
            self._builder.add_text(self._spellings.leftover("".join(self._leftover)))
        self._leftover = []

    def _go(self, state: State, rest: str) -> bool:
        self._state, self._buffer = state, rest
        return True

    def _call(self, head: Head) -> bool:
        assert self._format is not None
        call_id = self._format.written_id.replace("{name}", head.tool).replace(INDEX, head.digits)
        self._builder.open_call(head.tool, call_id or None)
        self._reader = self._format.arguments.reader(self._tools[head.tool])
        return self._go(ChatParser._arguments, self._buffer[head.length :])

    def _give_up(self, rest: str) -> bool:
        """End a call that does not follow the format."""
        self._builder.close_call(is_complete=False)
        self._builder.start_afresh()
        return self._go(ChatParser._rejoining, rest)


def _new_builder(tool_format: ToolFormat, reasoning: ReasoningFormat | None, shown: dict[int, str]) -> MessageBuilder:
    is_continued = reasoning is not None and reasoning.is_continued
    return MessageBuilder(tool_format.id_length, shown, is_continued=is_continued)
