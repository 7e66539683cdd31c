"""What of a JSON schema xgrammar passes over in silence (found with JSON-Schema-Test-Suite and MaskBench; 0.2.8)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .contradiction import is_of

__all__ = ["ignored", "without_raw_patterns"]

_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "patternProperties"),
    }
)
_FORMATS = frozenset(
    {
        *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)


_NEED_TYPE = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
        *("pattern", "format", "minItems", "maxItems", "minProperties", "maxProperties"),
    }
)
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_ASSERTIONS = _NEED_TYPE | {
    *("type", "properties", "required", "additionalProperties", "patternProperties", "items", "prefixItems"),
    *_COMBINED,
}


def ignored(schema: Any) -> list[tuple[str, str]]:
    """(path, keyword) of what xgrammar passes over in silence."""
    return [(path, what) for path, node in _subschemas(schema) for what in _ignored_here(node)]


def _ignored_here(node: dict[str, Any]) -> Iterator[str]:
    for key in node:
        if key in _IGNORED:
            yield key
    if "format" in node and node["format"] not in _FORMATS:
        yield f"the format {node['format']!r}"
    if ("minLength" in node or "maxLength" in node) and ("pattern" in node or "format" in node):
        yield "minLength and maxLength next to pattern or format"
    if _has_raw_pattern(node):
        yield "a pattern by which a quote, a backslash or a control character may come, without its escape"
    if "type" not in node:
        yield from (f"{key} without type" for key in node if key in _NEED_TYPE)
    for key in _COMBINED:
        if key in node:
            yield from (f"{other} next to {key}" for other in node if other in _ASSERTIONS - {key, "type"})
            if key in ("$ref", "allOf", "anyOf", "oneOf") and "type" in node:
                yield f"type next to {key}"
            break
    if "type" in node and not all(_is_of_its_type(value, node["type"]) for value in _options(node)):
        yield "type next to enum or const, which has values of other types"
    properties = node.get("properties", {})
    if isinstance(properties, dict) and any(json.dumps(key, ensure_ascii=False)[1:-1] != key for key in properties):
        yield "properties whose names need escapes"
    required = node.get("required", [])
    if isinstance(required, list) and isinstance(properties, dict) and any(key not in properties for key in required):
        yield "required properties that are not in properties"


def without_raw_patterns(text: str) -> str:
    """The schema without the patterns that would let a text come that is no JSON."""
    schema = json.loads(text)
    found = [node for _, node in _subschemas(schema) if _has_raw_pattern(node)]
    for node in found:
        del node["pattern"]
    return json.dumps(schema) if found else text


def _has_raw_pattern(node: dict[str, Any]) -> bool:
    return isinstance(node.get("pattern"), str) and _may_write_raw(node["pattern"])


# -- patterns
#
# xgrammar has two ways to read a pattern. The first lets nothing come that JSON would have to escape: "." is any
# character but those. What that way can't read, or where it would leave nothing, takes the second, and there a "." is
# a quote, too. So what matches many characters is only allowed in patterns that are sure to take the first.

_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[A-Za-z]|.)"
_TOKEN = re.compile(rf"{_ESCAPE}|\[\^?(?:\\.|[^\]\\])*\]|\{{\d+(?:,\d*)?\}}|.", re.DOTALL)
_ITEM = re.compile(rf"({_ESCAPE}|[^\\])(?:-({_ESCAPE}|[^\\]))?", re.DOTALL)
_MOST_REPEATS = 128
"""Of more, xgrammar makes a rule of their own, which forgets that it is in a JSON string."""


def _may_write_raw(pattern: str) -> bool:
    return _worst({_kind(token) for token in _TOKEN.findall(pattern)}) == "raw"


def _worst(kinds: set[str]) -> str:
    if "raw" in kinds or {"wide", "odd"} <= kinds:
        return "raw"
    return next((kind for kind in ("wide", "odd") if kind in kinds), "plain")


def _kind(token: str) -> str:
    """What a part of a pattern matches: "plain", nothing that needs an escape; "wide", other characters, too; "raw",
    perhaps nothing else. "odd": with it, a pattern may have to take the second way."""
    if token[0] == "[" and len(token) > 1:
        return _kind_of_class(token[1:-1])
    if token[0] == "{" and len(token) > 1:
        counts = re.findall(r"\d+", token)
        return "odd" if any(len(count) > 3 or int(count) > _MOST_REPEATS for count in counts) else "plain"
    if token == ".":
        return "wide"
    if token in ("[", "]", "{", "}"):
        return "odd"
    return _kind_of_character(token)


def _kind_of_character(token: str) -> str:
    if token in (r"\d", r"\w"):
        return "plain"
    if token in (r"\D", r"\W", r"\s", r"\S"):
        return "wide"
    code = _code(token)
    if code is None:
        return "odd"
    if code < 0x20 or code in (0x22, 0x5C):
        return "raw"
    if len(token) > 2:
        return "wide"  # on the second way it is read with the hex digits after it
    return "plain" if code < 0x7F else "odd"


def _kind_of_class(body: str) -> str:
    if body.startswith("^"):
        # Of these, something must be left that needs no escape: characters beyond the basic plane always are.
        items = _TOKEN.findall(body[1:])
        is_sure = items and body.isascii() and not {r"\D", r"\W", r"\S", r"\u", r"\p", r"\P"} & set(items)
        return "wide" if is_sure and min(map(ord, body)) >= 0x20 else "raw"
    items = _ITEM.findall(body)
    kinds = {_kind_of_range(first, last) if last else _kind_of_character(first) for first, last in items}
    return _worst(kinds or {"raw"})


def _kind_of_range(first: str, last: str) -> str:
    """``\\w-z`` is none, but can't be said to be read as it is meant."""
    low, high = _code(first), _code(last)
    kinds = {_kind_of_character(first), _kind_of_character(last)}
    if low is None or high is None:
        kinds.add("odd")
    elif low <= 0x22 <= high or low <= 0x5C <= high:
        kinds.add("wide")
    return _worst(kinds)


_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27, "b": 8}


def _code(token: str) -> int | None:
    """The character that it stands for; None: a class, or it can't be said."""
    if token[0] != "\\":
        return ord(token)
    if len(token) > 2:
        return ord(token[2]) & 31 if token[1] == "c" else int(token[2:], 16)
    letter = token[1:]
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    return None if letter.isalnum() or not letter else ord(letter)


# -- values and subschemas


def _options(node: dict[str, Any]) -> list[Any]:
    options = node.get("enum", [])
    return (options if isinstance(options, list) else []) + ([node["const"]] if "const" in node else [])


def _is_of_its_type(value: object, types: Any) -> bool:
    return any(is_of(value, name) for name in (types if isinstance(types, list) else [types]))


_ONE = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and every schema in it, with its path; what enum, const and the like hold is data."""
    todo: list[tuple[str, Any]] = [("$", schema)]
    while todo:
        path, node = todo.pop()
        if not isinstance(node, dict):
            continue
        yield path, node
        todo += [(f"{path}.{key}", node[key]) for key in _ONE if isinstance(node.get(key), dict)]
        for key in _LISTS:
            if isinstance(node.get(key), list):
                todo += [(f"{path}.{key}[{i}]", part) for i, part in enumerate(node[key])]
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                todo += [(f"{path}.{key}.{name}", part) for name, part in node[key].items()]
