"""Writes composed grammars in Lark as llguidance reads it; whatever is in them can't be misread."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count

from ....errors import GrammarError
from ..parts import (
    BLANKS,
    AnyOf,
    Choice,
    FreeText,
    Json,
    Part,
    Regex,
    Repeat,
    Seq,
    SpecialToken,
    Text,
    TextUpTo,
    alternatives,
)
from .json_schema import json_options, readable_text

_ANY = "(?s:.*)"
_BLANKS = "[" + "".join(f"\\x{ord(letter):02x}" for letter in BLANKS) + "]*"
_REGEX_ATOM = re.compile(r"\\?.|\\\Z", re.DOTALL)
_BLANK_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def lark_of(root: Part) -> str:
    """Return the grammar as Lark text. Raises GrammarError for a regex or a schema that can't be written."""
    writer = _Writer()
    for part in alternatives(root):  # inner alternatives first: a long chain would be written by recursion otherwise
        writer.symbol(part)
    start = writer.alternatives(root)
    return "".join(f"{name}: {body}\n" for name, body in [("start", start), *writer.rules.items()])


def choice_lark(options: Sequence[str]) -> str:
    """Return the grammar of one of the texts."""
    return f"start: OPTION\nOPTION: {_options(options)}\n"


class _Writer:
    """Writes a rule for each part that needs one; equal parts share theirs."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._names: dict[Part, str] = {}
        self._numbers = count()

    def alternatives(self, part: Part) -> str:
        """Return the body of a rule for ``part``."""
        return " | ".join(map(self.symbol, part.parts)) if isinstance(part, AnyOf) else self.symbol(part)

    def symbol(self, part: Part) -> str:
        """Return the Lark symbol for ``part`` within a sequence."""
        if isinstance(part, Text):
            return f"/{_BLANKS}{_in_regex(part.text)}/" if part.after_blanks else _literal(part.text)
        if isinstance(part, SpecialToken):
            return f"<[{part.token_id}]>"
        if isinstance(part, Seq):
            return " ".join(map(self.symbol, part.parts))
        if isinstance(part, Repeat):
            return f"({self.symbol(part.part)}){_quantifier(part)}"
        if part not in self._names:
            self._names[part] = self._define(part, next(self._numbers))
        return self._names[part]

    def _define(self, part: Json | Regex | Choice | FreeText | TextUpTo | AnyOf, number: int) -> str:
        if isinstance(part, AnyOf):
            return self._rule(f"any_of_{number}", self.alternatives(part))
        if isinstance(part, Json):
            return self._rule(f"json_{number}", _inline_schema(part))
        if isinstance(part, Regex):
            return self._rule(f"REGEX_{number}", _regex(part) + _not_first(part.not_first))
        if isinstance(part, Choice):
            return self._rule(f"CHOICE_{number}", f"({_options(part.options)})" + _not_first(part.not_first))
        if isinstance(part, FreeText):
            letters = "".join(_in_regex(text) for text in part.without if len(text) == 1)  # cheaper than ~
            excluded = "".join(f" & ~/{_ANY}{_in_regex(text)}{_ANY}/" for text in part.without if len(text) > 1)
            blanks = _BLANKS if part.after_blanks else ""
            matching = "".join(f" & {_pattern(pattern)}" for pattern in part.matching)
            # If all of the patterns can match the empty text, the library lets the text be left out.
            some = f"/{f'[^{letters}]' if letters else '(?s:.)'}{'*' if matching else '+'}/"
            return self._rule(f"TEXT_{number}", f"{some}{excluded}{_not_first(part.not_first, blanks)}{matching}")
        last = _in_regex(part.end)
        bodies = [f"/(?:{pattern[1:-1]}){last}/" for pattern in map(_pattern, part.matching)]
        first_end = [f"~/{_ANY}{last}(?s:.+)/"] if bodies else []  # no end lies within a body
        body = " & ".join([f"/{_ANY}{last}/", *bodies, *first_end])
        end = self._rule(f"UP_TO_{number}", body + _not_first(part.not_first))
        self._rule(f"up_to_{number}[lazy]", end)
        return f"up_to_{number}"

    def _rule(self, name: str, body: str) -> str:
        self.rules[name] = body
        return name


def _quantifier(part: Repeat) -> str:
    if part.most is None and part.least < 2:
        return "*+"[part.least]
    if (part.least, part.most) == (0, 1):
        return "?"
    return f"{{{part.least},{'' if part.most is None else part.most}}}"


def _literal(text: str) -> str:
    """Return a string. Lark's escapes are few; \\xHH works for all of ASCII, and the rest stands for itself."""
    return '"' + "".join(_plain_or_hex(letter, " _-.,:;<>|/=") for letter in text) + '"'


def _in_regex(text: str) -> str:
    return "".join(_plain_or_hex(letter, "_") for letter in text)


def _plain_or_hex(letter: str, plain: str) -> str:
    if letter.isascii() and not letter.isalnum() and letter not in plain:
        return f"\\x{ord(letter):02x}"
    return letter


def _options(options: Sequence[str]) -> str:
    return " | ".join(map(_literal, options))


def _regex(part: Regex) -> str:
    return _pattern(part.pattern, part.origin or "the regex")


def _pattern(pattern: str, about: str = "the pattern of a text") -> str:
    """Return the pattern as a regex literal of Lark. Raises GrammarError if it ends in the midst of an escape, which
    would take what comes after it."""
    written = []
    for match in _REGEX_ATOM.finditer(pattern):
        atom = match[0]
        if atom == "\\":
            raise GrammarError(f"{about}: it can't be used, as it ends with a lone backslash", kind="invalid")
        if atom[-1] in _BLANK_ESCAPES:  # a backslash before it means nothing
            atom = _BLANK_ESCAPES[atom[-1]]
        written.append("\\/" if atom == "/" else atom)
    return f"/{''.join(written) or '(?:)'}/"


def _not_first(texts: Sequence[str], blanks: str = "") -> str:
    return "".join(f" & ~/{blanks}{_in_regex(text)}{_ANY}/" for text in texts)


def _inline_schema(part: Json) -> str:
    """Return a JSON schema in place of a rule. The options of the library are ours alone."""
    text = readable_text(part.schema, relax=part.relax)
    options = json.dumps({"x-guidance": json_options(part.whitespace, relax=part.relax)})
    return f"%json {options[:-1]}, {text[1:]}" if len(text) > 2 else f"%json {options}"
