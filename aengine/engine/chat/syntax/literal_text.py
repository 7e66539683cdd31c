"""`literal_of`: the value of a literal as models write them, Python's and JSON's mixed, or quoted by a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

_BLANKS = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,:()\[\]{}]+")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_KNOWN = "\\'\"/"
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_CLOSING = {"[": "]", "(": ")"}


def literal_of(text: str, quotes: Sequence[str]) -> Any:
    """Return the value. Raises ValueError if the text is no literal, RecursionError for one that is nested too deeply.

    ``quotes``: of strings; a quote of one letter may be escaped within, as anything may.
    """
    reader = _Literal(text, quotes)
    value = reader.value()
    reader.skip_blanks()
    if reader.place != len(text):
        raise ValueError(f"{text[reader.place :]!r} is left over")
    return value


class _Literal:
    def __init__(self, text: str, quotes: Sequence[str]) -> None:
        self.text, self.quotes, self.place = text, quotes, 0

    def skip_blanks(self) -> None:
        found = _BLANKS.match(self.text, self.place)
        assert found is not None
        self.place = found.end()

    def takes(self, sign: str) -> bool:
        """Skip ``sign``, with blanks before it, if it comes next. Returns whether it did."""
        self.skip_blanks()
        if not self.text.startswith(sign, self.place):
            return False
        self.place += len(sign)
        return True

    def value(self) -> Any:
        if (quote := self.quote()) is not None:
            return self.string(quote)
        for opening, closing in _CLOSING.items():
            if self.takes(opening):
                return [self.value() for _ in self.items(closing)]
        if self.takes("{"):
            return dict(self.pair() for _ in self.items("}"))
        word = self.word()
        return _WORDS[word] if word in _WORDS else json.loads(word, parse_constant=no_constant)

    def quote(self) -> str | None:
        """Skip the quote that a string begins with, if one comes next, and return it."""
        return next((quote for quote in self.quotes if self.takes(quote)), None)

    def word(self) -> str:
        found = _WORD.match(self.text, self.place)
        if found is None:
            raise ValueError(f"no literal begins with {self.text[self.place : self.place + 20]!r}")
        self.place = found.end()
        return found[0]

    def string(self, quote: str) -> str:
        if len(quote) > 1 or not quote.isascii():  # inside a marker nothing is escaped
            end = self.text.find(quote, self.place)
            if end < 0:
                raise ValueError("a string does not end")
            body, self.place = self.text[self.place : end], end + len(quote)
            return body
        found = re.compile(rf"(?s:[^{re.escape(quote)}\\]|\\.)*").match(self.text, self.place)
        assert found is not None
        self.place = found.end()
        if not self.takes(quote):
            raise ValueError("a string does not end")
        return _unescaped(found[0])

    def items(self, closing: str) -> Iterator[None]:
        """Yield before each item, up to the closing bracket."""
        is_first = True
        while not self.takes(closing):
            if not is_first and not self.takes(","):
                raise ValueError(f"{closing!r} or a comma is missing")
            if not is_first and self.takes(closing):  # a comma may stand after the last
                return
            is_first = False
            yield

    def pair(self) -> tuple[str, Any]:
        key = self.string(quote) if (quote := self.quote()) is not None else self.word()
        if not self.takes(":"):
            raise ValueError("a colon is missing")
        return key, self.value()


def _unescaped(body: str) -> str:
    text = _ESCAPE.sub(_character, body)
    # A pair of \\uD83D\\uDE00, as JSON writes what lies beyond 16 bits, is one character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2] or escape[3]
    if number is not None:
        code = int(number, 16)
        return chr(code) if code < 0x110000 else escape[0]
    letter = escape[4]
    return letter if letter in _KNOWN else _LETTERS.get(letter, escape[0])


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, as ``parse_constant`` of the json module."""
    raise ValueError(f"{name} is no JSON")
