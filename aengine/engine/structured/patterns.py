"""Patterns of JSON schemas, which are ECMA-262's, as the library reads them: regexes of Rust.

    [^[\\]]+   ->   [^\\[\\]]+        in a class of ECMA-262 ``[``, ``&&``, ``--`` and ``~~`` are characters
    \\d        ->   [0-9]             and not every script's digits; likewise \\w, and \\s of its own list
    \\/  \\cJ  \\u00e9  {,3}          escapes and braces that Rust has not, or takes for something else

A pattern is read once, from left to right. What Rust has no word for is `UntranslatablePattern`: lookaround, references
back, ends of words, properties of characters that the library does not know: it is asked for each. What no pattern of
ECMA-262 has, but other dialects do and Rust reads, is passed on: ``(?i)``, ``(?P<name>``, ``\\A``, ``\\z``.

A character that JSON can write as ``\\u001b`` only is left out, unless it is asked for alone: where a control character
were allowed besides others, a model that begins to write ``\\u00e9`` would be led into one.
"""

from __future__ import annotations

import functools
import re
from typing import NoReturn

_MOST_DEPTH = 200
"""Groups within each other. The library refuses 250."""
_CONTROLS = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_CONTROL_RANGES = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))
_DIGITS, _WORD = "0-9", "0-9A-Za-z_"
_BLANKS = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_SETS = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _BLANKS,
    "D": f"[^{_DIGITS}{_CONTROLS}]",
    "W": f"[^{_WORD}{_CONTROLS}]",
    "S": f"[^{_BLANKS}{_CONTROLS}]",
}
"""The class that each escape stands for."""
_ANY_BUT_LINES = rf"[^\n\r{_CONTROLS}]"
"""``.``, with U+2028 and U+2029: without them, a mask of ``^.{1,50}$`` takes twenty times as long."""
_LETTERS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_COUNT = re.compile(r"\{[0-9]++(?:,[0-9]*+)?\}")
_PROPERTY = re.compile(r"\{\^?[A-Za-z0-9_]++(?:=[A-Za-z0-9_]++)?\}")
_GROUP_NAME = re.compile(r"\?P?<[\w$]++>")
_FLAGS = re.compile(r"\?([a-z]*+)(?:-([a-z]++))?([:)])")
_LOOKING = {"?=": 2, "?!": 2, "?<=": 3, "?<!": 3}


class UntranslatablePattern(ValueError):
    """The message names what the library has no word for."""


def rust_pattern(pattern: str) -> str:
    """Return the pattern in Rust's dialect. Raises UntranslatablePattern. What is no pattern at all may come out as it
    is: the library says what is wrong with it."""
    return _Translation(pattern).written()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0

    def written(self) -> str:
        pieces: list[str] = []
        depth = 0
        while self._place < len(self._pattern):
            letter = self._next()
            if letter == "(":
                depth += 1
                if depth > _MOST_DEPTH:
                    _refuse(f"more than {_MOST_DEPTH} groups within each other")
                piece, is_closed = self._group()
                depth -= is_closed
            elif letter == "\\":
                piece = self._escape()
            elif letter == "[":
                piece = self._class()
            elif letter == "{":
                piece = self._count()
            elif letter == ".":
                piece = _ANY_BUT_LINES
            else:
                depth -= letter == ")"
                piece = letter if letter in "^$|)*+?" else _literal(ord(letter))
            pieces.append(piece)
        return self._pattern if depth else "".join(pieces)  # the library reports the unbalanced bracket

    def _next(self) -> str:
        self._place += 1
        return self._pattern[self._place - 1]

    def _takes(self, found: re.Match[str] | None) -> bool:
        if found is not None:
            self._place = found.end()
        return found is not None

    def _comes(self, text: str) -> bool:
        return self._pattern.startswith(text, self._place)

    def _count(self) -> str:
        start = self._place - 1
        return self._pattern[start : self._place] if self._takes(_COUNT.match(self._pattern, start)) else r"\{"

    def _group(self) -> tuple[str, bool]:
        """Return the beginning of a group, and whether that is all of it."""
        if not self._comes("?"):
            return "(?:", False
        if any(self._comes(sign) for sign in _LOOKING):
            _refuse("looking around")
        if self._comes("?>"):
            _refuse("an atomic group")
        if self._comes("?P="):
            _refuse("referring back")
        if self._takes(_GROUP_NAME.match(self._pattern, self._place)):
            return "(?:", False
        flags = _FLAGS.match(self._pattern, self._place)
        if flags is None:
            return "(", False
        if flags[1].strip("i") or (flags[2] or "").strip("i"):
            _refuse(f"the flags {flags[0][1:-1]!r}")
        self._takes(flags)
        return f"({flags[0]}", flags[3] == ")"

    def _escape(self) -> str:
        """Return what an escape outside of a class stands for."""
        if self._place == len(self._pattern):
            return "\\"
        letter = self._pattern[self._place]
        if letter in "bB":
            _refuse("looking for the end of a word")
        if letter in "123456789" or self._comes("k<"):
            _refuse("referring back")
        if letter in "AZzG":
            self._place += 1
            if letter == "G":
                _refuse("an escape of another dialect")
            return "^" if letter == "A" else "$"
        member = self._member()
        if isinstance(member, int):
            return _literal(member)
        return member if member.startswith("[") else f"[{member}]"

    def _class(self) -> str:
        """Return the class whose bracket was read, to its end."""
        is_negated = self._comes("^")
        self._place += is_negated
        members: list[str] = []
        while not self._comes("]"):
            if self._place >= len(self._pattern):
                return "["  # the set is not closed, which the library reports
            found: list[int | str] = [self._class_member()]
            if self._comes("-") and not self._comes("-]") and self._place + 1 < len(self._pattern):
                self._place += 1
                found += [0x2D, self._class_member()]
            match found:
                case [int(first), _, int(last)]:
                    members.append(_range(first, last, is_negated))
                case _:  # where one end is a set, such as \d, there is no range, and the dash is a character
                    members += [one if isinstance(one, str) else _range(one, one, is_negated) for one in found]
        self._place += 1
        if is_negated:
            return f"[^{''.join(members)}{_CONTROLS}]"
        if not members:
            _refuse("a class that is empty")
        return f"[{''.join(members)}]"

    def _class_member(self) -> int | str:
        if self._next() != "\\":
            return ord(self._pattern[self._place - 1])
        if self._comes("b"):
            self._place += 1
            return 0x08
        if self._comes("-"):
            self._place += 1
            return 0x2D
        return self._member() if self._place < len(self._pattern) else ord("\\")

    def _member(self) -> int | str:
        """Read an escape after its backslash: one character, or what stands for a set in a class."""
        letter = self._next()
        if letter in _SETS:
            return _SETS[letter]
        if letter in _LETTERS:
            return _LETTERS[letter]
        if letter in "pP":
            start = self._place
            if not self._takes(_PROPERTY.match(self._pattern, start)):
                return ord(letter)
            name = self._pattern[start : self._place]
            if not _is_property(name):
                _refuse(f"the Unicode property {name}")
            return f"\\p{name}" if letter == "p" else f"[^\\p{name}{_CONTROLS}]"
        if letter == "0":
            if self._pattern[self._place : self._place + 1].isdecimal():
                _refuse("an octal number")
            return 0
        if letter in "123456789":
            _refuse("an octal number")
        if letter == "c":
            control = self._pattern[self._place : self._place + 1]
            if not (control.isascii() and control.isalpha()):
                _refuse("\\c without a letter")
            self._place += 1
            return ord(control) % 32
        if letter == "x":
            return self._hex(2, ord("x"))
        return self._unicode() if letter == "u" else ord(letter)

    def _unicode(self) -> int:
        if self._comes("{"):
            digits, end, _ = self._pattern[self._place + 1 : self._place + 9].partition("}")
            if not end or not _is_hex(digits) or int(digits, 16) > 0x10FFFF:
                return ord("u")
            self._place += len(digits) + 2
            code = int(digits, 16)
        else:
            code = self._hex(4, ord("u"))
            if 0xD800 <= code < 0xDC00 and self._comes("\\u"):
                self._place += 2
                low = self._hex(4, 0)
                if 0xDC00 <= low < 0xE000:
                    return 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00
        if 0xD800 <= code < 0xE000:
            _refuse("half a surrogate pair")
        return code

    def _hex(self, count: int, otherwise: int) -> int:
        digits = self._pattern[self._place : self._place + count]
        if len(digits) < count or not _is_hex(digits):
            return otherwise
        self._place += count
        return int(digits, 16)


@functools.lru_cache(256)
def _is_property(name: str) -> bool:
    """Return whether the library knows a Unicode property, given with its braces: there are too many to list."""
    import llguidance

    return not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_regex(f"\\p{name}"))


def _is_hex(digits: str) -> bool:
    return bool(digits) and all(digit in "0123456789abcdefABCDEF" for digit in digits)


def _range(first: int, last: int, is_negated: bool) -> str:
    """Return a range of a class; without control characters, unless it has no others, or they are excluded anyway."""
    ranges = [(first, last)]
    if not is_negated:
        for low, high in _CONTROL_RANGES:
            ranges = [
                part
                for one, other in ranges
                for part in ((one, min(other, low - 1)), (max(one, high + 1), other))
                if part[0] <= part[1]
            ]
    return "".join(
        _literal(low) if low == high else f"{_literal(low)}-{_literal(high)}" for low, high in ranges or [(first, last)]
    )


def _literal(code: int) -> str:
    """Return one character, in a class or outside of one."""
    letter = chr(code)
    if letter.isascii() and letter.isprintable():
        return letter if letter.isalnum() or letter in " _'\",:;<=>@`%!/" else f"\\{letter}"
    return f"\\x{{{code:x}}}"


def _refuse(what: str) -> NoReturn:
    raise UntranslatablePattern(what)
