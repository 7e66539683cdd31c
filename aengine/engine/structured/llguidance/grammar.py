"""A `GrammarSpec` as llguidance reads it."""

from __future__ import annotations

import json
import re

import llguidance

from ....errors import GrammarError
from ..spec import GrammarSpec
from .json_schema import json_options, readable_text
from .lark import choice_lark, lark_of

NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Ends a caller's own grammar. Before each mask the library writes out what must follow. For `/b+/ "b"`, whose first
terminal takes every b, that never ends, and takes all memory. Schemas have no such terminals."""


_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\[(?:[^\]\\\n]|\\.)*+\]|#[^\n]*+|(?<=[*+?})])\s*\)(?=\s*[*+?{])')
"""Texts, classes, comments; and the bracket that ends a repeated group whose last item is repeated."""

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))")


def grammar_of(spec: GrammarSpec) -> str:
    """Return the library's form. Raises GrammarError or ValueError; most faults are only found by its matcher."""
    if spec.kind == "json_schema":
        text, options = readable_text(spec.text, relax=spec.relax), json_options(spec.whitespace, relax=spec.relax)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return llguidance.LLMatcher.grammar_from_lark(choice_lark(json.loads(spec.text)))
    if spec.kind == "ebnf":
        return llguidance.grammar_from("ebnf", _for_converter(spec.text)) + NO_FORCING
    if spec.root is not None:
        return llguidance.LLMatcher.grammar_from_lark(lark_of(spec.root))
    return llguidance.LLMatcher.grammar_from_lark(spec.text + NO_FORCING)


def _for_converter(grammar: str) -> str:
    """Return a GBNF grammar for the library's converter: characters stand for those escapes that it does not know, and
    such a group ends with an empty text. Of `("a"+)*` it would drop the brackets, and leave two signs behind "a"."""
    return _PIECE.sub(_piece_for_converter, grammar)


def _piece_for_converter(piece: re.Match[str]) -> str:
    text = piece[0]
    if text[0] == "#":
        return text
    return _ESCAPE.sub(_character, text) if text[0] in '"[' else f'{text[:-1]} "")'


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[4] if escape[4] in "[]" and escape.string[0] == '"' else escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarError(f"the grammar has the escape {escape[0]}, which is no character", kind="invalid")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
