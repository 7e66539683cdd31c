"""A `GrammarSpec` as llguidance reads it."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from ..errors import GrammarError
from .schema_walk import json_path, walk
from .spec import GrammarSpec

__all__ = ["grammar_of", "json_options", "leave_out_counts"]


def grammar_of(spec: GrammarSpec) -> str:
    """Raises GrammarError or ValueError; most faults are only found by the matcher that is made of it."""
    if spec.kind == "json_schema":
        text = _schema_text(spec)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=json_options(spec))  # type: ignore[arg-type]
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        options = " | ".join(map(_lark_string, json.loads(spec.text)))
        return llguidance.LLMatcher.grammar_from_lark(f"start: OPTION\nOPTION: {options}\n")
    if spec.kind == "ebnf":
        return llguidance.grammar_from("ebnf", spec.text)
    return llguidance.LLMatcher.grammar_from_lark(spec.text)


def _schema_text(spec: GrammarSpec) -> str:
    """To read and to write a large one again takes milliseconds of the GIL, and most need no change."""
    if spec.text.startswith("{") and not spec.relax and '"x-guidance"' not in spec.text:
        return spec.text
    schema = json.loads(spec.text)
    if schema is False:
        raise GrammarError("the JSON schema is false, which no value fits", kind="unsatisfiable", path="$")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, true or false", kind="invalid", path="$")
    schema.pop("x-guidance", None)
    if spec.relax:
        leave_out_counts(schema)
    return json.dumps(schema, ensure_ascii=False)


def leave_out_counts(schema: dict[str, Any]) -> tuple[str, ...]:
    """Remove counts of properties where some of those that are named are optional, and say where that was.

    The library, relaxed, would count the properties only that are not named, so that ``{"a": 1}`` would not do.
    """
    left_out: list[str] = []
    for path, part in walk(schema):
        if not isinstance(part, dict) or not isinstance(part.get("properties"), dict):
            continue
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            continue  # no others can come, and those that are named are counted
        required = part.get("required")
        if set(part["properties"]) <= set(required if isinstance(required, list) else ()):
            continue
        gone = [key for key in ("minProperties", "maxProperties") if part.pop(key, None) is not None]
        left_out += (f"{json_path((*path, key))} is not enforced: some of the properties are optional" for key in gone)
    return tuple(left_out)


def json_options(spec: GrammarSpec) -> dict[str, Any]:
    """How JSON is written and what is enforced; the meaning of a schema's "x-guidance" inside a Lark grammar too."""
    compact = spec.whitespace == "compact"
    return {
        "whitespace_flexible": not compact,
        "item_separator": ", " if compact else ",",
        "key_separator": ": " if compact else ":",
        "lenient": spec.relax,
        "coerce_one_of": spec.relax,
    }


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
