"""Finds the schemas inside a JSON schema: every part that is one, in the order of the text, without recursion.

    {"properties": {"not": {...}},  "enum": [{"not": 1}],  "items": {...}}
                     ^name  ^schema          ^data                   ^schema

Names under ``properties`` and data under ``enum``, ``const``, ``default`` and ``examples`` look like keywords and are
none; so do the members of an unknown keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from ..threads.yield_gil import yield_gil

Path = tuple[str | int, ...]

_ONE = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
_LIST = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_NAMED = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
_YIELD_EVERY = 32
_NAME = re.compile(r"[A-Za-z_$][\w$-]*")


def json_path(keys: Iterable[str | int]) -> str:
    """Return ``$.properties.age.enum[3]``; a key that is no plain name is quoted: ``$.properties["my age"]``."""
    parts = ["$"]
    for key in keys:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif _NAME.fullmatch(key):
            parts.append(f".{key}")
        else:  # this shows a lone surrogate, which is not printable, as an escape
            parts.append(f"[{json.dumps(key, ensure_ascii=not key.isprintable())}]")
    return "".join(parts)


def subschemas(schema: object) -> Iterator[tuple[Path, Any]]:
    """Return the schemas right under ``schema`` by key, and values in places of schemas that are none."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _LIST and isinstance(value, list):
            for index, member in enumerate(value):
                yield (keyword, index), member
        elif keyword in _ONE:
            yield (keyword,), value
        elif keyword in _NAMED and isinstance(value, dict):
            for name, member in value.items():
                if keyword != "dependencies" or not isinstance(member, list):
                    yield (keyword, name), member


def walk(root: object, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield ``root`` and every schema under it with its path, parents first. ``root`` may not refer to itself."""
    stack = [(at, root)]
    num_walked = 0
    while stack:
        path, schema = stack.pop()
        yield path, schema
        num_walked += 1
        if num_walked % _YIELD_EVERY == 0:
            yield_gil()
        stack.extend(reversed([(path + keys, member) for keys, member in subschemas(schema)]))


def is_pointer(ref: object) -> bool:
    """Return whether a reference leads to a place of the schema itself by its path there."""
    return isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))


def pointer_to(path: Path) -> str:
    """Return the JSON pointer of a place, "/..."; not quoted for a URI."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


def pointed_at(root: object, ref: str) -> tuple[Path, Any] | None:
    """Return the target of the JSON pointer ``ref``, "#" or "#/...", with its path; None if there is nothing."""
    value: Any = root
    path: list[str | int] = []
    for part in unquote(ref[1:]).split("/")[1:]:
        key: str | int = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isascii() and part.isdecimal() and len(part) < 10:
            key = int(part)
            if key >= len(value):
                return None
        elif not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
        path.append(key)
    return tuple(path), value


_DATA = frozenset(("const", "default", "enum", "examples"))


def relocated(schema: Any, to: str) -> Any:
    """Return a copy of ``schema`` whose references to itself are right once it lies at the pointer ``to``.

    A name of its own (``$id``, or ``id`` of draft 4) would give them another meaning, so it loses that.
    """
    if not isinstance(schema, dict):
        return schema
    names = {key: schema[key] for key in ("$id", "id") if isinstance(schema.get(key), str)}
    own = next(iter(names.values()), "").rstrip("#")
    return _with_references({k: v for k, v in schema.items() if k not in names}, to, own)


def _with_references(part: Any, to: str, name: str, *, is_schema: bool = True) -> Any:
    """Rename the references of a schema. The recursion is bounded, as the depth of `plain_json` is. Parts under unknown
    keywords may be referred to, so they are renamed too."""
    if isinstance(part, list):
        return [_with_references(member, to, name, is_schema=is_schema) for member in part]
    if not isinstance(part, dict):
        return part
    copy: dict[str, Any] = {}
    for key, value in part.items():
        if is_schema and key in _DATA:
            copy[key] = value
        elif is_schema and key == "$ref" and isinstance(value, str):
            rest = value.removeprefix(name)
            copy[key] = to + rest[1:] if rest[:2] in ("", "#", "#/") else value
        else:
            copy[key] = _with_references(value, to, name, is_schema=not (is_schema and key in _NAMED))
    return copy
