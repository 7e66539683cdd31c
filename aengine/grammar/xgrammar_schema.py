"""What of a JSON schema xgrammar passes over in silence (found with JSON-Schema-Test-Suite and MaskBench; 0.2.8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .contradiction import is_of

__all__ = ["ignored"]

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
