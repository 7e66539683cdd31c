"""`PartialJson`: the value that an unfinished JSON text says so far, fed piece by piece.

A snapshot is a prefix of the value that the whole text will have:

    text so far                     snapshot
    {"name": "Ad                    {"name": "Ad"}                  a string: its letters so far
    {"name": "Ada", "ag             {"name": "Ada"}                 a key: once its value has begun
    {"name": "Ada", "age": 3        {"name": "Ada"}                 a number: once it is known to end (36 may come)
    {"name": "Ada", "age": 36, "l   {"name": "Ada", "age": 36}
    ... "likes": ["tea", "co        {..., "likes": ["tea", "co"]}   a list: its members so far

So between two snapshots nothing is taken back: strings, lists and objects only grow at their end, and everything
but the last member at each level is final. (Except for a key given twice: the later value wins, as in ``json.loads``.)

Each character is looked at once. The members of a list or object that is still open are held in it, the open one
outside of it, so a snapshot copies the open levels only:  stack [ {"name": "Ada"}, ["tea"] ]  open string "co".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["PartialJson"]

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = re.compile(r"[0-9a-fA-F]*")
_NUMBER_LETTERS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS: dict[str, tuple[str, bool | None]] = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

_Step = Callable[["PartialJson", str, int], int]  # reads a text from a place on, returns where the next goes on


class PartialJson:
    """A JSON text that arrives in pieces. Not for several threads at once."""

    __slots__ = ("_cached", "_error", "_high", "_is_key", "_keys", "_letters", "_literal", "_read", "_stack", "_step",
                 "_top")  # fmt: skip

    def __init__(self) -> None:
        self._stack: list[list[Any] | dict[str, Any]] = []  # the open levels, each with its finished members
        self._keys: list[str] = []  # for each open level the key of its open member; "" in a list
        self._step: _Step = PartialJson._value
        self._letters: list[str] = []  # of the open string or number
        self._is_key = False
        self._high = 0  # the first half of a surrogate pair, until the second comes
        self._literal: tuple[str, bool | None] = ("", None)
        self._top: Any = None
        self._read = 0  # characters of earlier pieces
        self._error = ""
        self._cached: tuple[bool, Any] | None = None

    def feed(self, text: str) -> None:
        """Go on with ``text``.

        Raises ValueError when it is not JSON, and says where. The snapshot stays as it was there.
        """
        if self._error:
            raise ValueError(self._error)
        self._cached = None
        at = 0
        while at < len(text):
            at = self._step(self, text, at)
        self._read += len(text)

    def finish(self) -> None:
        """Say that the text ends here, which a number at top level can't tell by itself.

        Raises ValueError when the text is unfinished or was not JSON.
        """
        if self._error:
            raise ValueError(self._error)
        if self._step is PartialJson._number:
            self._cached = None
            self._end_number("", 0)
        if not self.is_complete:
            self._fail(0, "it ends too early")

    @property
    def is_complete(self) -> bool:
        """The value is whole, and only blanks may follow."""
        return self._step is PartialJson._end

    @property
    def has_value(self) -> bool:
        """Whether any value has begun; tells a ``value`` of None from null."""
        return self._snapshot()[0]

    @property
    def value(self) -> Any:
        """The snapshot; None when nothing has begun.

        It does not change later, but shares its finished parts with other snapshots: take a copy before changing one.
        """
        return self._snapshot()[1]

    def _snapshot(self) -> tuple[bool, Any]:
        if self._cached is None:
            begun, value = self.is_complete, self._top
            if self._step in _IN_STRING and not self._is_key:
                self._letters = ["".join(self._letters)]
                begun, value = True, self._letters[0]
            for level, key in zip(reversed(self._stack), reversed(self._keys)):
                copy = level.copy()
                if begun and isinstance(copy, list):
                    copy.append(value)
                elif begun and isinstance(copy, dict):
                    copy[key] = value
                begun, value = True, copy
            self._cached = begun, value
        return self._cached

    # ---- steps between values

    def _value(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at == len(text):
            return at
        first = text[at]
        if first == '"':
            self._open_string(is_key=False)
        elif first in "{[":
            self._stack.append({} if first == "{" else [])
            self._keys.append("")
            self._step = PartialJson._first
        elif first in "-0123456789":
            self._letters, self._step = [], PartialJson._number
            return at
        elif first in _LITERALS:
            self._literal, self._letters, self._step = _LITERALS[first], [], PartialJson._word
            return at
        else:
            self._fail(at, f"a value can't begin with {first!r}")
        return at + 1

    def _first(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at < len(text):
            in_list = isinstance(self._stack[-1], list)
            if text[at] == ("]" if in_list else "}"):
                return self._close(at)
            self._step = PartialJson._value if in_list else PartialJson._key
        return at

    def _key(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            self._fail(at, f"a key must be a string, not {text[at]!r}")
        self._open_string(is_key=True)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            self._fail(at, f"a key must be followed by ':', not {text[at]!r}")
        self._step = PartialJson._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at == len(text):
            return at
        in_list = isinstance(self._stack[-1], list)
        if text[at] == ",":
            self._step = PartialJson._value if in_list else PartialJson._key
            return at + 1
        if text[at] != ("]" if in_list else "}"):
            self._fail(at, f"a member must be followed by ',' or {']' if in_list else '}'!r}, not {text[at]!r}")
        return self._close(at)

    def _end(self, text: str, at: int) -> int:
        at = _end_of(_SPACE, text, at)
        if at < len(text):
            self._fail(at, f"{text[at]!r} follows the value")
        return at

    def _close(self, at: int) -> int:
        self._keys.pop()
        self._finished(self._stack.pop())
        return at + 1

    def _finished(self, value: Any) -> None:
        self._step = PartialJson._after
        if not self._stack:
            self._top, self._step = value, PartialJson._end
            return
        level = self._stack[-1]
        if isinstance(level, list):
            level.append(value)
        else:
            level[self._keys[-1]] = value

    # ---- steps inside numbers, words and strings

    def _number(self, text: str, at: int) -> int:
        end = _end_of(_NUMBER_LETTERS, text, at)
        self._letters.append(text[at:end])
        if end < len(text):
            self._end_number(text, end)
        return end

    def _end_number(self, text: str, at: int) -> None:
        letters = "".join(self._letters)
        match = _NUMBER.fullmatch(letters)
        if match is None:
            self._fail(at, f"{letters[:40]!r} is not a number")
        try:
            self._finished(float(letters) if match[1] or match[2] else int(letters))
        except ValueError:
            self._fail(at, "an integer has too many digits")

    def _word(self, text: str, at: int) -> int:
        word, value = self._literal
        rest = word[sum(map(len, self._letters)) :]
        piece = text[at : at + len(rest)]
        if not rest.startswith(piece):
            self._fail(at, f"only {word} can be meant here")
        self._letters.append(piece)
        if piece == rest:
            self._finished(value)
        return at + len(piece)

    def _open_string(self, is_key: bool) -> None:
        self._letters, self._is_key, self._high, self._step = [], is_key, 0, PartialJson._string

    def _string(self, text: str, at: int) -> int:
        end = _end_of(_PLAIN, text, at)
        if end > at:
            self._add(text[at:end])
        if end == len(text):
            return end
        if text[end] == '"':
            self._add("")
            string = "".join(self._letters)
            if self._is_key:
                self._keys[-1], self._step = string, PartialJson._colon
            else:
                self._finished(string)
        elif text[end] == "\\":
            self._step = PartialJson._escape
        else:
            self._fail(end, f"{text[end]!r} must be escaped in a string")
        return end + 1

    def _add(self, letters: str) -> None:
        if self._high:  # it has no second half: kept as it is, as json.loads does
            self._letters.append(chr(self._high))
            self._high = 0
        self._letters.append(letters)

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._literal, self._step = ("", None), PartialJson._code
        elif text[at] in _ESCAPES:
            self._add(_ESCAPES[text[at]])
            self._step = PartialJson._string
        else:
            self._fail(at, f"there is no escape \\{text[at]}")
        return at + 1

    def _code(self, text: str, at: int) -> int:
        """The four digits of ``\\uXXXX``; two of them may be one character above U+FFFF."""
        digits = self._literal[0]
        end = min(at + 4 - len(digits), len(text))
        if _end_of(_HEX, text, at) < end:
            self._fail(at, "\\u must be followed by four hexadecimal digits")
        digits += text[at:end]
        self._literal = (digits, None)
        if len(digits) == 4:
            code = int(digits, 16)
            if self._high and 0xDC00 <= code < 0xE000:
                self._letters.append(chr(0x10000 + ((self._high - 0xD800) << 10) + code - 0xDC00))
                self._high = 0
            elif 0xD800 <= code < 0xDC00:
                self._add("")
                self._high = code
            else:
                self._add(chr(code))
            self._step = PartialJson._string
        return end

    def _fail(self, at: int, fault: str) -> NoReturn:
        self._error = f"not JSON at character {self._read + at}: {fault}"
        raise ValueError(self._error)


_IN_STRING = (PartialJson._string, PartialJson._escape, PartialJson._code)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    return pattern.match(text, at).end()  # type: ignore[union-attr]  # each matches the empty text
