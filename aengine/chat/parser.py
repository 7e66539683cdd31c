"""`ChatParser`: a completion, as it streams, into text, reasoning and tool calls.

    reasoning ──> start ──> scanning <──┐   text, until a call's trigger        "<tool_call>"
                    │          │        │
                    │        heading ───┤   which tool?                         "\\n{"name": "get_time", "arguments": {"
                    │          │        │
                    ├─────> arguments   │   up to the brace that closes them    ""zone": "UTC"}"
                    │          │        │
                    │        after      │   the call is complete                "}\\n</tool_call>"
                    │          │        │
                    │       between ────┘   another call, or the group's end
                    └─────> plain           nothing but text from here on

A state looks at the buffer, takes what it understands, and waits for more only while the buffer may still become one
of the format's strings. So the buffer is short, the work is linear, and what comes out is the same however the text is
split. Whatever does not follow the format is text; nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..structured.parts import BLANKS
from .formats import ID, INDEX, INDEX_DIGITS, NAME, Markers, ReasoningFormat, TokenId, ToolFormat
from .message_builder import MessageBuilder
from .messages import ChatMessage, Delta
from .scan import ID_LETTER, TOKENS, begins_with, held_back
from .syntax import harmony
from .syntax.arguments import ArgumentReader, Progress
from .tools import Tool

__all__ = ["ChatParser"]

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
        self._markers = markers = Markers.of(tool_format, reasoning, token_id)
        self._sentinels = {known: (name, markers.encode(name)) for name, known in markers.ids}
        self._names_of_text = markers.names_of_text
        unseen = {markers.encode(mark) for marks in tool_format.text_marks for mark in marks} if tool_format else ()
        self._shown = str.maketrans({sign: name for sign, name in self._names_of_text.items() if sign not in unseen})
        self._format = tool_format if tools else None
        self._tools = {tool.name: tool for tool in tools}
        self._scans = self._format is not None and self._format.text != "instead" and not has_shape
        self._triggers: dict[str, dict[str, str]] = {}
        self._next_heads: dict[str, str] = {}
        self._forced_heads: dict[str, str] = {}  # of which a part is a call already: no text ends with that part
        self._name_ends: dict[str, int] = {}  # of each head, where the tool's name in it ends
        self._ends: list[str] = []
        self._closings: list[str] = []
        self._set_strings()
        self._begin = markers.encode(reasoning.begin) if reasoning else ""
        self._end = markers.encode(reasoning.end) if reasoning else ""
        self._has_channels = tool_format is not None and tool_format.channels
        self._preamble = self._final = ""
        if self._has_channels:
            self._scans = False
            self._begin, self._end = markers.encode(harmony.ANALYSIS), markers.encode(harmony.END)
            self._preamble, self._final = markers.encode(harmony.PREAMBLE), markers.encode(harmony.FINAL)

        self._kind = (tool_format, reasoning)
        self._builder = _new_builder(*self._kind)
        self._reader: ArgumentReader
        self._buffer = ""
        # A function, not a bound method: a parser that references itself is freed by the garbage collector alone.
        begins_in_reasoning = reasoning is not None and reasoning.begun
        self._state: State = ChatParser._reasoning if begins_in_reasoning else ChatParser._start

    def __copy__(self) -> ChatParser:
        """Of a parser that was given nothing, one of another completion: the strings, of many tools, are made once."""
        parser = ChatParser.__new__(ChatParser)
        parser.__dict__.update(self.__dict__)
        parser._builder = _new_builder(*self._kind)
        return parser

    def _set_strings(self) -> None:
        """Collect the format's strings for these tools. A head includes what all arguments begin with."""
        known = self._format
        if known is None:
            return

        def encode(text: str) -> str:
            return self._markers.encode(text).replace(ID, ID_LETTER * (known.id_length or 0))

        first = known.arguments.opening
        ways = [
            head.replace(INDEX, ID_LETTER * digits).partition(NAME)
            for head in known.heads(NAME)
            for digits in range(1, 1 + (INDEX_DIGITS if INDEX in head else 1))
        ]

        def heads_after(before: str) -> dict[str, str]:
            heads: dict[str, str] = {}
            for name in self._tools:
                for before_name, _, after_name in ways:
                    begun = encode(before + before_name + name)
                    head = begun + encode(after_name) + first
                    heads[head], self._name_ends[head] = name, len(begun)
            return heads

        for index, opening in enumerate(known.openings):
            self._triggers.setdefault(encode(known.trigger_of(index)), {}).update(heads_after(opening))
        self._next_heads = heads_after(known.separator)
        groups = () if known.names_trigger else self._triggers.values()
        self._forced_heads = {head: name for group in (*groups, self._next_heads) for head, name in group.items()}
        self._ends = [encode(end) for end in known.ends]
        self._closings = [closing for i in range(len(known.openings)) if (closing := encode(known.closing_of(i)))]

    def feed(self, text: str, token_id: int | None = None) -> list[Delta]:
        """Take the next piece. ``token_id``: the token that ended it, needed where markers are control tokens."""
        if TOKENS.search(text):  # no detokeniser makes them
            text = TOKENS.sub("\ufffd", text)
        if token_id in self._sentinels:
            name, sentinel = self._sentinels[token_id]
            text = text.removesuffix(name) + sentinel  # its name is there if it is shown
        for start in range(0, len(text), _PIECE):  # a state copies what it leaves in the buffer, so that must be short
            self._buffer += text[start : start + _PIECE]
            while self._state(self):
                pass
        return self._builder.taken()

    def finish(self) -> list[Delta]:
        """Return what was held back: the completion has ended."""
        if self._state is ChatParser._reasoning:
            self._add_reasoning(self._buffer)
        elif self._state not in (ChatParser._arguments, ChatParser._after):  # there it is a part of the call
            if (name := _named_tool(self._buffer, self._forced_heads, self._name_ends)) is not None:
                self._builder.open_call(name)
                self._builder.close_call(is_complete=False)
            elif self._state is not ChatParser._between:
                self._add_text(self._buffer)
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
            self._add_reasoning(body[: len(body) - held])
            self._buffer = body[len(body) - held :]
            return False
        self._add_reasoning(body)
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
        heads: dict[str, str] = {}
        if not self._scans:
            for group in self._triggers.values():
                heads |= group
        first = filter(None, (self._begin, self._preamble, self._final))
        found = self._expect([*first, *heads])
        if found is None:
            return False
        if found and found in (self._preamble, self._final):
            state = ChatParser._plain if found == self._final else ChatParser._before_call
            return self._go(state, self._buffer[len(found) :])
        if found and found == self._begin:
            self._builder.start_afresh()
            return self._go(ChatParser._reasoning, self._buffer[len(found) :])
        if found:
            return self._call(heads, found)
        return self._go(ChatParser._scanning if self._scans else ChatParser._plain, self._buffer)

    def _before_call(self) -> bool:
        """Take the text of a message that another follows."""
        body, end, rest = self._buffer.partition(self._end)
        if end:
            self._add_text(body)
            return self._go(ChatParser._start, rest)
        keep = len(body) - held_back(body, (self._end,))
        self._add_text(body[:keep])
        self._buffer = body[keep:]
        return False

    def _scanning(self) -> bool:
        places = {self._buffer.find(trigger): trigger for trigger in self._triggers}
        first = min((place for place in places if place >= 0), default=None)
        if first is None:
            keep = len(self._buffer) - held_back(self._buffer, self._triggers)
            self._add_text(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return False
        self._add_text(self._buffer[:first])
        return self._go(ChatParser._heading, self._buffer[first:])

    def _heading(self) -> bool:
        trigger = next(trigger for trigger in self._triggers if self._buffer.startswith(trigger))
        found = self._expect(self._triggers[trigger])
        if found is None:
            return False
        if found:
            return self._call(self._triggers[trigger], found)
        self._add_text(trigger)
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
        found = self._expect(self._ends)
        if found is None:
            return False
        if not found and "" not in self._ends:
            return self._give_up(self._buffer)
        self._builder.close_call(is_complete=True)
        self._builder.start_afresh()
        return self._go(ChatParser._between, self._buffer[len(found) :])

    def _between(self) -> bool:
        """Continue after a complete call."""
        assert self._format is not None
        goes_on = ChatParser._scanning if self._scans and self._format.text == "around" else ChatParser._plain
        if goes_on == ChatParser._scanning and not self._format.is_group:
            return self._go(goes_on, self._buffer)
        if not self._buffer:
            return False
        found = self._expect([*self._next_heads, *self._closings])
        if found is None:
            return False
        if found in self._next_heads:
            return self._call(self._next_heads, found)
        return self._go(goes_on, self._buffer[len(found) :])

    def _plain(self) -> bool:
        self._add_text(self._buffer)
        self._buffer = ""
        return False

    # What the states share.

    def _add_text(self, text: str) -> None:
        self._builder.add_text(text.translate(self._shown))

    def _add_reasoning(self, text: str) -> None:
        self._builder.add_reasoning(text.translate(self._shown))

    def _go(self, state: State, rest: str) -> bool:
        self._state, self._buffer = state, rest
        return True

    def _expect(self, wanted: Iterable[str]) -> str | None:
        """Return the longest of ``wanted`` that the buffer begins with; "": none; None: that is not sure yet."""
        found, undecided = "", False
        for text in wanted:
            begins = begins_with(self._buffer, text)
            if begins and len(text) > len(found):
                found = text
            undecided = undecided or begins is None
        return None if undecided else found

    def _call(self, heads: Mapping[str, str], head: str) -> bool:
        assert self._format is not None
        syntax = self._format.arguments
        self._builder.open_call(heads[head], _written_id(self._format, heads[head], head, self._buffer))
        self._reader = syntax.reader(self._tools[heads[head]], self._markers)
        return self._go(ChatParser._arguments, syntax.opening + self._buffer[len(head) :])

    def _give_up(self, rest: str) -> bool:
        """End a call that does not follow the format."""
        self._builder.close_call(is_complete=False)
        return self._go(ChatParser._scanning if self._scans else ChatParser._plain, rest)


def _new_builder(tool_format: ToolFormat | None, reasoning: ReasoningFormat | None) -> MessageBuilder:
    is_continued = reasoning is not None and reasoning.is_continued
    builder = MessageBuilder(tool_format.id_length if tool_format else None, is_continued=is_continued)
    if reasoning is not None and reasoning.begun:
        builder.start_afresh()
    return builder


def _named_tool(text: str, heads: Mapping[str, str], name_ends: Mapping[str, int]) -> str | None:
    """Return the tool whose head ``text`` begins, the whole name included; None: there is none, or it may be one of
    several."""
    begun = {head: name for head, name in heads.items() if begins_with(text, head) is None}
    is_named = any(len(text) >= name_ends[head] for head in begun)
    return next(iter(begun.values())) if is_named and len(set(begun.values())) == 1 else None


def _written_id(tool_format: ToolFormat, tool_name: str, head: str, text: str) -> str | None:
    """Return the id of a call that ``text`` begins with, as the model knows it; None where ids are the parser's own."""
    if not tool_format.written_id:
        return None
    number = "".join(letter for letter, wanted in zip(text, head) if wanted == ID_LETTER)
    return tool_format.written_id.replace("{name}", tool_name).replace(INDEX, number)
