"""`Spellings`: a format's strings as the parser looks for them, in every spelling that counts as the same.

A model that no grammar holds to the format leaves out blanks or adds some, and takes ``"arguments"`` for
``"parameters"``. Blanks beside signs make no difference (`squeezed`) from where no grammar allows anything but a call:
behind the trigger of a group, and within the group. Triggers are exact, as are all headings where an answer could be
written like a call: where it has a shape, and in a format whose trigger is the whole heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..structured.parts import BLANKS
from .formats import ID, INDEX, INDEX_DIGITS, NAME, ToolFormat
from .syntax.scan import ID_LETTER, begins_with, length_of, longest_of, squeezed

_KEYS = ('"arguments": ', '"parameters": ')
_NAME = "\0"
"""Stands for a tool's name, whose letters are no signs and no blanks either."""
_TAG = re.compile("<[^<>\n]+>|[\ud800-\udfff]")
_BEGUN = re.compile("<[^<>\n]+$")
"""A tag whose end comes later."""
_AGAIN = re.compile("<[^<>]+|[\ud800-\udfff]")
_OPENING = {")": "(", "]": "[", "}": "{"}
LOOSE = " \t\r\n,;)]}"
"""What may be left of a call that could not be read, without anything that it says."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a call begins with, as it stands in a text."""

    tool: str
    length: int
    """How much of the text comes before the arguments."""
    digits: str
    """The letters that the model chose: a call's number or id."""


class Heads:
    """The headings of calls of some tools, in one place of a format."""

    def __init__(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._tools: dict[str, str] = {}
        self._name_ends: dict[str, int] = {}  # end of the tool's name within each head
        self._num_ahead: dict[str, int] = {}  # letters at the end of each head that belong to the arguments

    def add(self, tools: Sequence[str], begun: str, rest: str, ahead: str) -> None:
        """Add the tools' headings: up to their names, behind them, and what the arguments begin with."""
        before, _, after = self._spelt(f"{begun}{_NAME}{rest}{ahead}").partition(_NAME)
        for tool in tools:
            head = before + tool + after
            self._tools[head], self._name_ends[head] = tool, len(before) + len(tool)
            self._num_ahead[head] = len(ahead)

    def find(self, text: str) -> tuple[Head | None, bool]:
        """Return the heading that ``text`` begins with, and whether that is sure: else more text is needed."""
        spelt = self._spelt(text)
        found = longest_of(self._tools, spelt)
        if not found:
            return None, found is not None
        length = len(found) if self._is_exact else length_of(text, len(found))
        digits = "".join(letter for letter, wanted in zip(spelt, found) if wanted == ID_LETTER)
        return Head(self._tools[found], length - self._num_ahead[found], digits), True

    def named(self, text: str) -> str | None:
        """Return the tool whose heading ``text`` begins, the whole name included; None: there is none, or it may be
        one of several."""
        spelt = self._spelt(text)
        begun = {head: tool for head, tool in self._tools.items() if begins_with(spelt, head) is None}
        named = {head: tool for head, tool in begun.items() if len(spelt) >= self._name_ends[head]}
        begun = named if text.endswith(tuple(BLANKS)) else begun  # no name goes on behind a blank
        return next(iter(named.values())) if named and len(set(begun.values())) == 1 else None

    def _spelt(self, text: str) -> str:
        return text if self._is_exact else squeezed(text)


class Spellings:
    """The strings of one format, as `in_vocabulary` makes it, for some tools."""

    def __init__(self, known: ToolFormat, tools: Sequence[str], *, has_shape: bool) -> None:
        self._known = known
        self.triggers: dict[str, Heads] = {}
        """The headings of a group's first call, by what they begin with for sure."""
        self.next_heads = Heads(is_exact=False)
        """Those of other calls of the group, from the end of the one before."""
        is_exact = known.names_trigger or has_shape
        for index, opening in enumerate(known.openings):
            trigger = "" if known.channels else known.trigger_of(index)
            heads = self.triggers.setdefault(trigger, Heads(is_exact=is_exact))
            self._add(heads, opening, tools, is_exact=is_exact)
        self._add(self.next_heads, known.separator, tools, is_exact=False)
        self.ends = [squeezed(self._with_ids(end)) for end in known.ends]
        """What may follow a call's arguments, `squeezed`."""
        closings = [known.closing_of(i) for i in range(len(known.openings))]
        self.closings = [squeezed(closing) for closing in closings if closing]
        """What may end a group, `squeezed`."""
        texts = closings if known.is_group else known.ends
        self.stops = tuple(dict.fromkeys(tags[-1] for text in texts if (tags := _TAG.findall(text))))
        """Marks behind which no call goes on."""
        again = _AGAIN.match(known.before_name) if known.is_group else None
        self.again = again[0] if again else ""
        """The mark that begins each call of a group; "": they have none."""
        markers = [*map(known.tokens.encode, known.markers)]
        strings = [*known.ends, *closings, *known.arguments.marks, *markers]
        separators = {tag for string in strings for tag in (string, *_TAG.findall(string)) if _TAG.search(string)}
        self._marks = sorted({*separators, *markers}, key=len, reverse=True)
        self._begun_tags = [tag for text in (known.before_name, *known.arguments.marks) for tag in _BEGUN.findall(text)]

    def _with_ids(self, text: str) -> str:
        return text.replace(ID, ID_LETTER * (self._known.id_length or 0))

    def _add(self, heads: Heads, before: str, tools: Sequence[str], *, is_exact: bool) -> None:
        firsts = self._firsts()
        for begun, rest in self._ways(is_exact):
            # A name that ends the heading is whole when what follows it has come: "get" is not "get_time".
            ends_with_name = squeezed(_NAME + rest) == _NAME
            for ahead in firsts if ends_with_name else {self._known.arguments.opening}:
                heads.add(tools, self._with_ids(before + begun), rest, ahead)

    def _firsts(self) -> set[str]:
        """Return the letters, or marks, that may stand first behind a heading."""
        known = self._known
        written = [known.arguments.write(arguments) + known.after_arguments for arguments in ({}, {"x": 1})]
        return {text[:1] for text in written}

    def _ways(self, is_exact: bool) -> Iterator[tuple[str, str]]:
        heads = dict.fromkeys(self._known.heads(NAME))
        if not is_exact:
            heads |= dict.fromkeys(head.replace(a, b) for head in [*heads] for a, b in (_KEYS, _KEYS[::-1]))
        for head in heads:
            for digits in range(1, 1 + (INDEX_DIGITS if INDEX in head else 1)):
                begun, _, rest = head.replace(INDEX, ID_LETTER * digits).partition(NAME)
                yield begun, self._with_ids(rest)

    def first_head(self, text: str) -> tuple[Head | None, bool]:
        """Return the heading of a group's first call that ``text`` begins with, and whether that is sure."""
        are_sure = True
        for trigger, heads in self.triggers.items():
            begins = begins_with(text, trigger)
            head, is_sure = heads.find(text) if begins else (None, begins is not None)
            if head is not None and is_sure:
                return head, True
            are_sure = are_sure and is_sure
        return None, are_sure

    def named(self, text: str, is_first: bool) -> str | None:
        """Return the tool of the call that ``text`` begins; None: not even its name has come.

        ``is_first``: of its group. Where the whole heading is the trigger, a text may end with a part of it.
        """
        if not is_first:
            return self.next_heads.named(text)
        groups = () if self._known.names_trigger else self.triggers.items()
        names = (heads.named(text) for trigger, heads in groups if text.startswith(trigger))
        return next(filter(None, names), None)

    def leftover(self, text: str) -> str:
        """Return what a call that can't be read has left, as text: without marks, and without brackets of the call."""
        for begun in self._begun_tags:
            text = re.sub(f"{re.escape(begun)}[^<>]{{0,80}}>", "", text)
        for mark in self._marks:
            text = text.replace(mark, "")
        text = text.lstrip(LOOSE).rstrip(BLANKS)
        while text and (opening := _OPENING.get(text[-1])) and text.count(text[-1]) > text.count(opening):
            text = text[:-1].rstrip(BLANKS)
        return text
