"""JSON schemas, checked before a library sees them: is it one, do its ``$ref``s lead anywhere, can a value fit it.

The libraries answer late and in their own words, or not at all: a misspelt type may mean "anything" and a remote
``$ref`` as well. Whatever keyword is not named here is left to them, and `explain` finds the place of what they refuse.
Patterns are not compiled: JSON schema's are ECMAScript's, which Python's ``re`` knows only half of (``\\p{L}``,
``(?<name>...)``), warns about and may recurse over. Only what is cut off, "(" or a last backslash, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urldefrag, urljoin

from ..errors import GrammarError
from .contradiction import contradiction
from .schema_faults import explain
from .schema_walk import Path, json_path, pointed_at, walk

__all__ = ["COUNTS", "MAX_OPTIONS", "check_schema", "explain", "json_path"]

MAX_OPTIONS: Final = 100_000
"""Of an enum, or of choice. llguidance takes 0.25 s for 90,000 and refuses its largest automaton near there."""

MAX_LEADING_OPTIONS: Final = 1_250
"""Properties of the outermost object that may be left out, before the first that may not. llguidance refuses more, but
only after up to 12 s."""

COUNTS: Final = tuple(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Contains", "Properties")
)
"""Keywords whose value is an integer; 2.0 is one."""

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# A class that is not closed is one match to the end: were it none, the next "[" would be followed as far again.
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*+(?:\]|(?P<open>\\?\Z))|[()\\]", re.DOTALL)


def check_schema(schema: Any) -> None:
    """Raise GrammarError if ``schema``, as `plain_json` gives it, can't be used whatever the library.

    Its kind is "invalid", "unsupported" (a remote ``$ref``), "unsatisfiable" or "too_complex" (an enum too long);
    its path leads to the keyword at fault.
    """
    todo: list[tuple[Path, Any]] = [((), schema)]
    names = _Names(schema)
    seen: set[int] = set()
    while todo:
        at, start = todo.pop()
        for path, part in walk(start, at):
            _check_is_schema(path, part)
            if isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                _check_keywords(path, part)
                target = names.check_ref(path, part["$ref"]) if "$ref" in part else None
                if target is not None and id(target[1]) not in seen and not _on_the_way(target[0]):
                    todo.append(target)  # under a keyword nobody knows, such as OpenAPI's components
    _check_width(schema)
    found = contradiction(schema)
    if found is not None:
        at, reason = found
        where = json_path(at)
        raise GrammarError(f"no value can fit the JSON schema: {where} {reason}", kind="unsatisfiable", path=where)


def _check_width(root: Any) -> None:
    """Only of the outermost object, and only what is sure to be refused later: `compile_risk` sees the rest."""
    if not isinstance(root, dict) or "object" not in root.get("type", ("object",)):
        return
    if any(keyword in root for keyword in ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")):
        return
    properties = root.get("properties", {})
    if len(properties) <= MAX_LEADING_OPTIONS:
        return
    required, count = set(root.get("required", ())), 0
    for name, part in properties.items():
        if name in required:
            return
        count += part is not False
        if count > MAX_LEADING_OPTIONS:
            raise GrammarError(
                f"$.properties has more than {MAX_LEADING_OPTIONS} properties that are not required; "
                "no more can be used: make some required, or put them into objects of their own",
                kind="too_complex",
                path="$.properties",
            )


def _on_the_way(path: Path) -> bool:
    """Whether `walk` comes to where a usual reference leads."""
    return not path or (len(path) == 2 and path[0] in ("$defs", "definitions"))


def _invalid(path: Path, fault: str) -> GrammarError:
    where = json_path(path)
    return GrammarError(f"the JSON schema is not valid: {where} {fault}", kind="invalid", path=where)


def _check_is_schema(path: Path, part: object) -> None:
    if not isinstance(part, dict | bool):
        raise _invalid(path, f"must be a schema: an object, true or false, but is {part!r:.60}")


def _check_keywords(path: Path, schema: dict[str, Any]) -> None:
    for keyword, value in schema.items():
        if keyword not in _RULES:
            continue
        fits, wanted = _RULES[keyword]
        if not fits(value):
            raise _invalid((*path, keyword), f"must be {wanted}, but is {value!r:.60}")
        if keyword == "enum" and len(value) > MAX_OPTIONS:
            where = json_path((*path, keyword))
            raise GrammarError(
                f"{where} has {len(value)} values; at most {MAX_OPTIONS} can be used", kind="too_complex", path=where
            )
        if keyword == "patternProperties":
            for pattern in value:
                if not _is_pattern(pattern):
                    raise _invalid((*path, keyword, pattern), f"must be {_RULES['pattern'][1]}")


class _Names:
    """What a ``$ref`` may say besides a pointer: the anchors and ids that a schema gives its parts."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.anchors: set[str] = set()
        self.urls: dict[Path, str] = {}  # of each part that has an id; what is under it is relative to it
        for path, part in walk(root):
            if not isinstance(part, dict):
                continue
            self.anchors.update(part[k] for k in ("$anchor", "$dynamicAnchor") if isinstance(part.get(k), str))
            for keyword in ("$id", "id"):
                name = part.get(keyword)
                if isinstance(name, str) and name.startswith("#"):
                    self.anchors.add(name[1:])
                elif isinstance(name, str):
                    self.urls[path] = self._url((*path, keyword), name)
        self.documents = set(self.urls.values())
        self.has_inner_ids = any(self.urls)

    def _url(self, at: Path, name: str) -> str:
        """``name`` made absolute by the nearest id above, without its fragment."""
        base = next((self.urls[at[:n]] for n in range(len(at) - 1, -1, -1) if at[:n] in self.urls), "")
        try:
            return urldefrag(urljoin(base, name)).url
        except ValueError:
            raise _invalid(at, f"is {name!r:.80}, which is no URL") from None

    def check_ref(self, path: Path, ref: object) -> tuple[Path, Any] | None:
        """The part of the schema that ``ref`` points at, if that can be said without reading ids."""
        at = (*path, "$ref")
        if not isinstance(ref, str):
            raise _invalid(at, f"must be a string, but is {ref!r:.60}")
        if not ref.startswith("#"):
            self._check_remote(at, ref)
            return None
        target = pointed_at(self.root, ref) if ref == "#" or ref.startswith("#/") else None
        if target is not None and isinstance(target[1], dict | bool):
            return target
        if target is not None and not self.has_inner_ids:
            raise _invalid(at, f"is {ref!r:.80}, but what is there is no schema")
        if ref[1:] not in self.anchors and not self.has_inner_ids:  # a pointer may start at an inner $id
            raise _invalid(at, f"is {ref!r:.80}, but there is nothing there")
        return None

    def _check_remote(self, at: Path, ref: str) -> None:
        url = self._url(at, ref)
        if url not in self.documents and "//json-schema.org/" not in url:
            where = json_path(at)
            raise GrammarError(
                f"{where} is {ref!r:.80}, which is not in the schema, and nothing is fetched: "
                "put it under $defs and refer to it by '#/$defs/...'",
                kind="unsupported",
                path=where,
            )


def _is_pattern(value: object) -> bool:
    """Whether it is a string in which nothing is cut off: see the top of the file."""
    if not isinstance(value, str):
        return False
    depth = 0
    for match in _ESCAPE_OR_CLASS.finditer(value):
        token = match[0]
        depth += (token == "(") - (token == ")")
        if depth < 0 or token == "\\" or match["open"] is not None:
            return False
    return depth == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (whole or (isinstance(value, float) and value.is_integer())) and value >= 0  # type: ignore[operator]


def _is_type(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, str) and v in _TYPES for v in value)
    return isinstance(value, str) and value in _TYPES


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


_Rule = tuple[Callable[[Any], bool], str]
_COUNT: _Rule = (_is_count, "an integer >= 0")
_NUMBER: _Rule = (_is_number, "a number")
_BOUND: _Rule = (lambda v: isinstance(v, bool) or _is_number(v), "a number")  # true or false in draft 4
_STRING: _Rule = (_is_string, "a string")
_OBJECT: _Rule = (lambda v: isinstance(v, dict), "an object of schemas")
_SCHEMAS: _Rule = (lambda v: isinstance(v, list) and bool(v), "a list of at least one schema")

_RULES: dict[str, _Rule] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}, or a list of them"),
    "enum": (lambda v: isinstance(v, list) and bool(v), "a list of at least one value"),
    "required": (_is_strings, "a list of strings"),
    "pattern": (_is_pattern, "a regular expression whose brackets are closed"),
    "multipleOf": (lambda v: _is_number(v) and v > 0, "a number > 0"),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
    "dependentRequired": (
        lambda v: isinstance(v, dict) and all(map(_is_strings, v.values())),
        "an object of lists of strings",
    ),
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    **dict.fromkeys(("$schema", "$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "format"), _STRING),
    **dict.fromkeys(("$defs", "definitions", "dependencies", "dependentSchemas"), _OBJECT),
    **dict.fromkeys(("properties", "patternProperties"), _OBJECT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SCHEMAS),
    "prefixItems": (lambda v: isinstance(v, list), "a list of schemas"),
}
