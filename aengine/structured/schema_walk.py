"""Where the schemas are inside a JSON schema: every part that is one, in the order of the text, without recursion.

    {"properties": {"not": {...}},  "enum": [{"not": 1}],  "items": {...}}
                     ^name  ^schema          ^data                   ^schema

Names under ``properties`` and data under ``enum``, ``const``, ``default`` and ``examples`` look like keywords and are
none; so are the members of a keyword that nobody knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from .yield_gil import breathe

__all__ = ["Path", "json_path", "pointed_at", "subschemas", "walk"]

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
_BREATH = 32
_NAME = re.compile(r"[A-Za-z_$][\w$-]*")


def json_path(keys: Iterable[str | int]) -> str:
    """As ``$.properties.age.enum[3]``; a key that is no plain name is quoted: ``$.properties["my age"]``."""
    parts = ["$"]
    for key in keys:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif _NAME.fullmatch(key):
            parts.append(f".{key}")
        else:  # a lone surrogate, which could not be shown, is not printable
            parts.append(f"[{json.dumps(key, ensure_ascii=not key.isprintable())}]")
    return "".join(parts)


def subschemas(schema: object) -> Iterator[tuple[Path, Any]]:
    """The schemas right under ``schema``, with their keys from there; what should be a schema and is none included."""
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
    """``root`` and every schema under it, each with its path, parents first. ``root`` may not refer to itself."""
    stack = [(at, root)]
    num_walked = 0
    while stack:
        path, schema = stack.pop()
        yield path, schema
        num_walked += 1
        if num_walked % _BREATH == 0:
            breathe()
        stack.extend(reversed([(path + keys, member) for keys, member in subschemas(schema)]))


def pointed_at(root: object, ref: str) -> tuple[Path, Any] | None:
    """What the JSON pointer of ``ref``, "#" or "#/...", points at, with its path; None if there is nothing."""
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
