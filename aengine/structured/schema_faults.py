"""`explain`: what llguidance's refusal of a JSON schema means, and where the keyword at fault is.

The library says "Unimplemented keys: ["not"]" and no place. Each rule below is a message, its kind, and what to look
for in the schema; the first keyword in the order of the text that fits is named. When the message names nothing that
can be found, the path is "".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .llguidance.json_schema import unreadable
from .schema_walk import Path, json_path, walk

__all__ = ["explain"]

ErrorKind = Literal["invalid", "unsupported", "unsatisfiable", "too_complex"]
_Seen = tuple[Path, str, Any, dict[str, Any]]
"""A keyword's path, its name, its value, and the schema that it is in."""
_Test = Callable[[str, Any, dict[str, Any]], bool]
_OF_A_REGEX = re.compile(r"look-?around|look-ahead|backreference|unrecognized", re.IGNORECASE)


def explain(schema_text: str, message: str) -> tuple[ErrorKind, str]:
    """The kind of the error ``message`` of llguidance about the schema, and the JSON path of the keyword at fault."""
    schema = json.loads(schema_text)
    kind, path = _by_rule(schema, message)
    if not path and _OF_A_REGEX.search(message):  # not each message shows the pattern that it is about
        path = _unreadable_pattern(schema)
    return kind, path


def _by_rule(schema: object, message: str) -> tuple[ErrorKind, str]:
    for pattern, kind, test_of in _RULES:
        match = pattern.search(message)
        if match is not None:
            test = test_of(match)
            return kind, next((json_path(path) for path, *seen in _keywords(schema) if test(*seen)), "")
    return "unsupported", ""


def _unreadable_pattern(schema: object) -> str:
    for path, keyword, value, _ in _keywords(schema):
        if keyword == "pattern" and isinstance(value, str) and unreadable(value):
            return json_path(path)
    return ""


def _keywords(root: object) -> Iterator[_Seen]:
    for path, schema in walk(root):
        if not isinstance(schema, dict):
            continue
        for keyword, value in schema.items():
            yield (*path, keyword), keyword, value, schema
            if keyword == "patternProperties" and isinstance(value, dict):
                for name in value:
                    yield (*path, keyword, name), "pattern", name, schema


def _nothing(match: re.Match[str]) -> _Test:
    return lambda keyword, value, schema: False


def _named(*names: str) -> Callable[[re.Match[str]], _Test]:
    return lambda match: lambda keyword, value, schema: keyword in names


def _quoted(match: re.Match[str]) -> _Test:
    """The keywords of a JSON list."""
    names = re.findall(r'"([^"]+)"', match[1])
    return lambda keyword, value, schema: keyword in names


def _of_another_type(match: re.Match[str]) -> _Test:
    wanted = {"array": list, "object": dict, "string": str}[match[2]]
    return lambda keyword, value, schema: keyword == match[1] and not isinstance(value, wanted)


def _not_a(match: re.Match[str]) -> _Test:
    """A keyword with the value that the message shows as JSON, which may be cut off."""
    return lambda keyword, value, schema: keyword == match[1] and _json(value).startswith(match[2].strip())


def _overlapping(match: re.Match[str]) -> _Test:
    """A oneOf whose members are not told apart by their types alone."""

    def test(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
        if keyword != "oneOf" or not isinstance(value, list):
            return False
        types = [m.get("type") if isinstance(m, dict) else None for m in value]
        known = [t for t in types if isinstance(t, str)]
        return len(known) < len(types) or len(set(known)) < len(known) or {"number", "integer"} <= set(known)

    return test


def _pattern(match: re.Match[str]) -> _Test:
    """The first pattern that the message shows; a longer one shown elsewhere can hold a shorter one."""
    shown = {line.strip() for line in match.string.splitlines()}

    def test(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
        return keyword == "pattern" and isinstance(value, str) and value.strip() in shown

    return test


def _pattern_inside(match: re.Match[str]) -> _Test:
    message = match.string[:10_000]  # it is searched for each pattern of the schema

    def test(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
        return keyword == "pattern" and isinstance(value, str) and f"/{value}/" in message

    return test


def _format(match: re.Match[str]) -> _Test:
    return lambda keyword, value, schema: keyword == "format" and value == match[1].strip()


def _type(match: re.Match[str]) -> _Test:
    return lambda keyword, value, schema: (
        keyword == "type" and match[1] in (value if isinstance(value, list) else [value])
    )


def _pointer(match: re.Match[str]) -> _Test:
    return lambda keyword, value, schema: keyword == "$ref" and isinstance(value, str) and value.endswith(match[1])


def _resource(match: re.Match[str]) -> _Test:
    name = match[1].removeprefix("json-schema:///")

    def test(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
        return keyword in ("$ref", "$schema", "$dynamicRef") and isinstance(value, str) and value.startswith(name)

    return test


def _crossed(match: re.Match[str]) -> _Test:
    """A keyword of which the other one, with the value in the message, is in the same schema."""

    def test(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
        return keyword == match[1] and _json(value) == match[2] and _json(schema.get(match[3])) == match[4]

    return test


def _requiring(match: re.Match[str]) -> _Test:
    return lambda keyword, value, schema: keyword == "required" and isinstance(value, list) and match[1] in value


def _repeated(match: re.Match[str]) -> _Test:
    """A length that llguidance wrote into a regex of its own."""

    def test(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
        return keyword in ("minLength", "maxLength") and str(value) in match.groups()

    return test


def _empty_choice(match: re.Match[str]) -> _Test:
    return lambda keyword, value, schema: keyword in ("enum", "type", "anyOf", "oneOf") and value == []


def _interval(match: re.Match[str]) -> _Test:
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return lambda keyword, value, schema: keyword in names and _json(value) in (match[1], match[2])


def _not_a_schema(match: re.Match[str]) -> _Test:
    names = ("additionalProperties", "items", "not", "contains", "propertyNames", "additionalItems")
    return lambda keyword, value, schema: (
        (keyword in names and not isinstance(value, dict | bool | list))
        or (keyword in ("allOf", "anyOf", "oneOf", "prefixItems") and not _all_schemas(value))
        or (keyword in ("properties", "patternProperties", "$defs") and not _all_schemas(_members(value)))
    )


def _all_schemas(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(v, dict | bool) for v in values)


def _members(value: object) -> object:
    return list(value.values()) if isinstance(value, dict) else value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _rule(
    pattern: str, kind: ErrorKind, test_of: Callable[[re.Match[str]], _Test]
) -> tuple[re.Pattern[str], ErrorKind, Callable[[re.Match[str]], _Test]]:
    return re.compile(pattern, re.DOTALL), kind, test_of


# Messages show what the caller wrote. What takes any text up to some words starts with "(?>.*?...)", the first place
# only: from each place, the way to the end would be gone again.
_RULES = (
    _rule(r"^(?:.{0,200}?)Unimplemented keys: (\[.*?\])", "unsupported", _quoted),
    _rule(r"oneOf constraints are not supported", "unsupported", _overlapping),
    _rule(r"Unknown format: ([^\n]+)", "unsupported", _format),
    _rule(r"min/maxProperties only supported", "unsupported", _named("minProperties", "maxProperties")),
    _rule(r"\A(?>.*?\(\?s:\.\{(\d++),?(\d*+)\}\)).*(?:decimal literal|size|repetition)", "too_complex", _repeated),
    _rule(r"\A(?>.*?regex parse error).*(?:not supported|lookaround)", "unsupported", _pattern),
    _rule(r"\A(?>.*?regex parse error).*(?:size limit|exceed)", "too_complex", _pattern),
    _rule(r"regex parse error", "invalid", _pattern),
    _rule(r"\A(?>.*?Pointer ')(.*?)' does not exist", "invalid", _pointer),
    _rule(r"\A(?>.*?[Rr]esource ')(.*?)' is not present", "unsupported", _resource),
    _rule(r"Unsatisfiable schema: (\w+) \((\S+)\) is greater than (\w+) \((\S+)\)", "unsatisfiable", _crossed),
    _rule(r"\A(?>.*?Unsatisfiable schema: required property ')(.*?)' is", "unsatisfiable", _requiring),
    _rule(r"integer interval [\[(](\S+), (\S+)[\])] contains no", "unsatisfiable", _interval),
    _rule(r"Unsatisfiable schema: Regex is empty", "unsatisfiable", _pattern_inside),
    _rule(r"Unsatisfiable schema: anyOf is empty", "unsatisfiable", _empty_choice),
    _rule(r"Unsatisfiable schema: required item|is unsatisfiable but minItems", "unsatisfiable", _named("minItems")),
    _rule(r"Unsatisfiable schema: incompatible types", "unsatisfiable", _named("allOf", "enum", "const")),
    _rule(r"[Uu]nsatisfiable|NoExtension", "unsatisfiable", _nothing),
    _rule(r"Invalid type: ([^\n]*)", "invalid", _type),
    _rule(r"Expected [\w ]{1,40} for '([^']+)'(?: item)?, got ([^\n]*)", "invalid", _not_a),
    _rule(r"schema must be an object or boolean", "invalid", _not_a_schema),
    _rule(r"^(\$?\w+) must be an? (array|object|string)", "invalid", _of_another_type),
    _rule(r"Value for 'multipleOf' has too many digits", "too_complex", _named("multipleOf")),
    _rule(r"invalid multiple ?of", "invalid", _named("multipleOf")),
    _rule(r"too (?:many|complex|large|big|deep)|\bmax is\b|[Ee]xceed|limit|fuel", "too_complex", _nothing),
    _rule(r"Expecting object schema", "invalid", _nothing),
)
