"""A `GrammarSpec` as llguidance reads it."""

from __future__ import annotations

import json

import llguidance

from ...errors import GrammarError
from ..spec import GrammarSpec
from .json_schema import json_options, make_readable, needs_change

__all__ = ["grammar_of"]


def grammar_of(spec: GrammarSpec) -> str:
    """Raises GrammarError or ValueError; most faults are only found by the matcher that is made of it."""
    if spec.kind == "json_schema":
        text, options = _schema_text(spec), json_options(spec.whitespace, relax=spec.relax)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        choices = " | ".join(map(_lark_string, json.loads(spec.text)))
        return llguidance.LLMatcher.grammar_from_lark(f"start: OPTION\nOPTION: {choices}\n")
    if spec.kind == "ebnf":
        return llguidance.grammar_from("ebnf", spec.text)
    return llguidance.LLMatcher.grammar_from_lark(spec.text)


def _schema_text(spec: GrammarSpec) -> str:
    """To read and to write a large one again takes milliseconds of the GIL, and most need no change."""
    if spec.text.startswith("{") and not needs_change(spec.text, relax=spec.relax):
        return spec.text
    schema = json.loads(spec.text)
    if schema is False:
        raise GrammarError("the JSON schema is false, which no value fits", kind="unsatisfiable", path="$")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, true or false", kind="invalid", path="$")
    make_readable(schema, relax=spec.relax)
    return json.dumps(schema, ensure_ascii=False)


def _lark_string(text: str) -> str:
    """A Lark literal. The library reads fewer escapes than JSON has: no \\u, but \\xHH."""
    letters = []
    for letter in text:
        if letter in '"\\':
            letters.append("\\" + letter)
        elif letter < " " or letter == "\x7f":
            letters.append(f"\\x{ord(letter):02x}")
        else:
            letters.append(letter)
    return '"' + "".join(letters) + '"'
