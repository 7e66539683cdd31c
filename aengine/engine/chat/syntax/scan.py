"""Looking for strings in a text that is still coming: where arguments end, and what may still become a marker."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...structured.parts import BLANKS

TOKENS = re.compile("[\ud800-\udfff]")
"""Control tokens, as `aengine.engine.chat.syntax.markers.Markers` writes them."""
ID_LETTER = "\udfff"
"""Stands for any letter or digit in a string that is looked for."""
_MOST_BLANKS = 32
"""Longest run of blanks beside a sign: more are no spelling of a call, and what waits for the next letter is short."""
_SIGNS = "{}()\\[\\]<>|,:;`\ud800-\udfff"
_BESIDE_SIGNS = re.compile(
    f"(?:^|(?<=[{_SIGNS}]))[{BLANKS}]{{1,{_MOST_BLANKS}}}|[{BLANKS}]{{1,{_MOST_BLANKS}}}(?=[{_SIGNS}])"
)
_OUTSIDE_STRINGS = re.compile('["{}\\[\\]<\ud800-\udfff]')
_INSIDE_STRINGS = re.compile('["\\\\\ud800-\udfff]')


class ObjectScanner:
    """Finds the end of a JSON object: the brace that closes it, outside strings."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def is_in_string(self) -> bool:
        return self._in_string

    def scan(self, text: str) -> tuple[int, bool]:
        """Read the next piece; return how much of it belongs to the object, and whether the object is whole with that.

        Less than all of it and not whole: there is a control token or the beginning of a tag, which no JSON has.
        """
        place = 0
        if self._escaped and text and not TOKENS.match(text):
            self._escaped, place = False, 1
        while True:
            found = (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, place)
            if found is None:
                return len(text), False
            place, letter = found.end(), found[0]
            if letter == "<" or TOKENS.match(letter):
                return found.start(), False
            if letter == "\\":
                if place == len(text) or TOKENS.match(text, place):
                    self._escaped = True
                    return place, False
                place += 1
            elif letter == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    return place, True


def squeezed(text: str) -> str:
    """Return the text without blanks that may be left out or added: those that stand first, last or beside a sign.

    Two spellings of the same heading of a call are one then: ``{"name":"f"`` and ``{ "name" : "f"``.
    """
    body = text.rstrip(BLANKS)
    return _BESIDE_SIGNS.sub("", body if len(text) - len(body) <= _MOST_BLANKS else text)


def length_of(text: str, size: int) -> int:
    """Return how many characters of ``text`` the first ``size`` characters of its `squeezed` form stand for."""
    num_removed = 0
    for gap in _BESIDE_SIGNS.finditer(text):
        if gap.start() - num_removed >= size:
            break
        num_removed += len(gap[0])
    return size + num_removed


def begins_with(text: str, wanted: str) -> bool | None:
    """Return whether ``text`` begins with ``wanted``, which may have `ID_LETTER`; None if more text is needed."""
    if ID_LETTER not in wanted:
        return True if text.startswith(wanted) else None if wanted.startswith(text) else False
    for letter, expected in zip(text, wanted):  # up to the end of the shorter one
        if letter != expected and not (expected == ID_LETTER and letter.isascii() and letter.isalnum()):
            return False
    return True if len(text) >= len(wanted) else None


def longest_of(wanted: Iterable[str], text: str) -> str | None:
    """Return the longest of ``wanted`` that the text begins with; "": none; None: that is not sure yet."""
    found, undecided = "", False
    for whole in wanted:
        begins = begins_with(text, whole)
        if begins and len(whole) > len(found):
            found = whole
        undecided = undecided or begins is None
    return None if undecided else found


def held_back(text: str, wanted: Iterable[str]) -> int:
    """Return how many characters at the end of ``text`` may be the first ones of a string of ``wanted``."""
    longest = 0
    for whole in wanted:
        for length in range(min(len(whole) - 1, len(text)), longest, -1):
            if text.endswith(whole[:length]):
                longest = length
                break
    return longest


def without_tokens(text: str) -> str:
    """Return the text without its control tokens."""
    return TOKENS.sub("", text)
