"""What llguidance is told of a JSON schema, by itself or inside a Lark grammar. Needs no library."""

from __future__ import annotations

from typing import Any, Literal

from .schema_walk import json_path, walk

__all__ = ["json_options", "leave_out_counts"]


def json_options(whitespace: Literal["compact", "any"], *, relax: bool) -> dict[str, Any]:
    """How JSON is written and what is enforced: the meaning of "x-guidance" in a schema."""
    compact = whitespace == "compact"
    return {
        "whitespace_flexible": not compact,
        "item_separator": ", " if compact else ",",
        "key_separator": ": " if compact else ":",
        "lenient": relax,
        "coerce_one_of": relax,
    }


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
