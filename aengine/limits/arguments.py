"""Arguments that travel as plain data, checked by a JSON schema of the few keywords that are known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .values import shown

_KINDS: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_KEYWORDS: dict[str, Any] = {  # and what their values are
    "type": str,
    "enum": list,
    "minimum": (int, float),
    "maximum": (int, float),
    "minItems": int,
    "maxItems": int,
    "items": Mapping,
    "properties": Mapping,
    "required": list,
}


def check_schema(schema: object) -> None:
    """Raise ValueError for a schema that `fault_in` would not follow to the letter."""
    if not isinstance(schema, Mapping) or schema.get("type") not in _KINDS:
        raise ValueError(f"{shown(schema)} is no schema with a type of {', '.join(_KINDS)}")
    for keyword, value in schema.items():
        if keyword not in _KEYWORDS:
            raise ValueError(f"the keyword {shown(keyword)} is not known here; there are {', '.join(_KEYWORDS)}")
        if not isinstance(value, _KEYWORDS[keyword]):
            raise ValueError(f"{keyword}={shown(value)} in {shown(schema)} is of another type than that keyword's")
    if schema["type"] == "array" and "items" not in schema:
        raise ValueError(f"{shown(schema)} is no schema: it does not say what its items are")
    for inner in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else ())):
        check_schema(inner)


def fault_in(value: Any, schema: Mapping[str, Any], place: str) -> str:
    """Return what is wrong with a value, which stands at ``place``; empty: it is as the schema says. An object has no
    property that the schema does not name."""
    kind = schema["type"]
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return f"{place}={shown(value)} must be of type {kind}"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # arrays of numbers have no room for it
        return f"{place}={shown(value)}: an integer must be from -2**63 to 2**63 - 1"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place}={shown(value)} must be one of {shown(schema['enum'])}"
    if kind in ("integer", "number"):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            bounds = f"from {schema.get('minimum', '-infinity')} to {schema.get('maximum', 'infinity')}"
            return f"{place}={shown(value)} must be {bounds}"
    elif kind == "array":
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            bounds = f"{schema.get('minItems', 0)} to {schema.get('maxItems', 'any number of')}"
            return f"{place} has {len(value)} items: there must be {bounds}"
        faults = (fault_in(one, schema["items"], f"{place}[{i}]") for i, one in enumerate(value))
        return next(filter(None, faults), "")
    elif kind == "object":
        properties = schema.get("properties", {})
        for name in value.keys() - properties.keys():
            return f"{place} has no {shown(name)}; there are {', '.join(properties) or 'none'}"
        for name in schema.get("required", ()):
            if name not in value:
                return f"{place} needs {name}"
        return next(filter(None, (fault_in(value[name], properties[name], f"{place}.{name}") for name in value)), "")
    return ""
