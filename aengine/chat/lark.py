"""Writing Lark as llguidance reads it: literals, regexes and schemas that can't be misread, whatever is in them.

Its lexer takes the longest lexeme, and never goes back. So two lexemes that may begin at one place must differ before
either of them ends; that is why free text *excludes* what begins a call (`text_lexeme`) instead of standing beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..errors import GrammarError
from ..structured.llguidance.json_schema import json_options, make_readable, needs_change
from .formats import BLANKS, Markers

__all__ = [
    "BLANK_CLASS",
    "choice_lexeme",
    "inline_schema",
    "literal",
    "literal_regex",
    "regex_lexeme",
    "symbols",
    "text_lexeme",
]

ANY = "(?s:.*)"
_REGEX_ATOM = re.compile(r"\\?.|\\\Z", re.DOTALL)
_BLANK_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
BLANK_CLASS = "[" + "".join(f"\\x{ord(letter):02x}" for letter in BLANKS) + "]"


def literal(text: str) -> str:
    """A string. Lark's escapes are few; \\xHH works for all of ASCII, and the rest stands for itself."""
    return '"' + "".join(_plain_or_hex(letter, " _-.,:;<>|/=") for letter in text) + '"'


def literal_regex(text: str) -> str:
    """The same within a regex."""
    return "".join(_plain_or_hex(letter, "_") for letter in text)


def _plain_or_hex(letter: str, plain: str) -> str:
    if letter.isascii() and not letter.isalnum() and letter not in plain:
        return f"\\x{ord(letter):02x}"
    return letter


def symbols(encoded: str, markers: Markers) -> str:
    """A format's string (see `Markers.encode`): literals and control tokens, in order."""
    parts: list[str] = []
    run = ""
    for letter in encoded:
        token_id = markers.id_of(letter)
        if token_id is None:
            run += letter
            continue
        parts += [literal(run)] if run else []
        parts.append(f"<[{token_id}]>")
        run = ""
    return " ".join(parts + ([literal(run)] if run else []))


def text_lexeme(without: Sequence[str], not_first: Sequence[str] = (), *, after_blanks: bool = False) -> str:
    """Any text, but no empty one, that contains none of ``without`` and begins with none of ``not_first``.

    ``after_blanks``: nor do blanks and then one of ``not_first``.
    """
    excluded = "".join(f" & ~/{ANY}{literal_regex(text)}{ANY}/" for text in without)
    return "/(?s:.+)/" + excluded + _without_first(not_first, BLANK_CLASS + "*" if after_blanks else "")


def regex_lexeme(pattern: str, not_first: Sequence[str] = ()) -> str:
    """A text that the whole ``pattern`` matches, and that begins with none of ``not_first``.

    Raises GrammarError if the pattern ends in the midst of an escape: it would take what comes after it for its own.
    """
    written = []
    for match in _REGEX_ATOM.finditer(pattern):
        atom = match[0]
        if atom == "\\":
            raise GrammarError("the regex can't be used: it ends with a lone backslash", kind="invalid")
        if atom[-1] in _BLANK_ESCAPES:  # a backslash before it means nothing
            atom = _BLANK_ESCAPES[atom[-1]]
        written.append("\\/" if atom == "/" else atom)
    return f"/{''.join(written) or '(?:)'}/" + _without_first(not_first)


def choice_lexeme(options: Sequence[str], not_first: Sequence[str] = ()) -> str:
    """One of the texts, if it begins with none of ``not_first``."""
    return f"({' | '.join(map(literal, options))})" + _without_first(not_first)


def _without_first(texts: Sequence[str], blanks: str = "") -> str:
    return "".join(f" & ~/{blanks}{literal_regex(text)}{ANY}/" for text in texts)


def inline_schema(schema: Mapping[str, Any], *, relax: bool, whitespace: Literal["compact", "any"] = "compact") -> str:
    """A JSON schema in place of a rule. The options of the library are ours alone."""
    text = json.dumps(schema)
    if needs_change(text, relax=relax):
        readable = json.loads(text)
        make_readable(readable, relax=relax)
        text = json.dumps(readable)
    options = json.dumps({"x-guidance": json_options(whitespace, relax=relax)})
    return f"%json {options[:-1]}, {text[1:]}" if len(text) > 2 else f"%json {options}"
