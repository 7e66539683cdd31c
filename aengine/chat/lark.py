"""Writing Lark as llguidance reads it: literals, regexes and schemas that can't be misread, whatever is in them.

Its lexer takes the longest lexeme, and never goes back. So two lexemes that may begin at one place must differ before
either of them ends; that is why free text *excludes* what begins a call (`text_lexeme`) instead of standing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import BLANKS, Markers

__all__ = ["BLANK_CLASS", "inline_schema", "literal", "literal_regex", "symbols", "text_lexeme"]

ANY = "(?s:.*)"
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
    blanks = BLANK_CLASS + "*" if after_blanks else ""
    excluded = [f" & ~/{ANY}{literal_regex(text)}{ANY}/" for text in without]
    excluded += [f" & ~/{blanks}{literal_regex(text)}{ANY}/" for text in not_first]
    return "/(?s:.+)/" + "".join(excluded)


def inline_schema(schema: Mapping[str, Any], *, relax: bool) -> str:
    """A JSON schema in place of a rule. The options of the library are ours alone."""
    options = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": relax,
        "coerce_one_of": relax,
    }
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    return "%json " + json.dumps({"x-guidance": options, **own})
