"""JSON schemas as llguidance reads them, by themselves or inside a Lark grammar. Needs no library.

Some of what a schema may say the library reads wrongly, or refuses for nothing:

- Of ``{"exclusiveMinimum": 0, "maximum": 0.5}`` it would take 0, as wherever a whole number is the bound that is left
  out and the other bound is less than 1 away. Such a bound is moved by a trillionth.
- 2.0 is no integer to it.
- It knows neither ``uniqueItems`` nor ``propertyNames``: they are taken out where they say nothing.
- Patterns are translated into its dialect (`patterns`); of numbers it has doubles (`numbers`).

What can't be held to then is refused, or left out of a schema that is relaxed, with a warning. Relaxed, the library
would count the properties only that are not named, so that ``{"a": 1}`` would not do: such counts are left out, too.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from typing import Any, Literal
from urllib.parse import unquote

from ....errors import GrammarError
from ..patterns import UntranslatablePattern, rust_pattern
from ..schema_walk import Path, is_pointer, json_path, pointer_to, walk
from .numbers import inexact_value, says_nothing, unusable_bound

_TELLING = re.compile(
    r'"(?:x-guidance|exclusiveM(?:in|ax)imum|uniqueItems|propertyNames|pattern(?:Properties)?|multipleOf)"'
    r'|"m(?:in|ax)[LICP][a-z]+": ?[0-9]+[.eE]|[0-9][eE][+-]?[0-9]|[0-9][0-9.]{15}'
)
_COUNTS = [f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Contains", "Properties")]
_TELLING_RELAXED = re.compile(r'"m(?:in|ax)Properties"')
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NO_LIMIT: tuple[Any, ...] = ({}, True, {"type": "string"})
_TRILLIONTH = 1e-12

_LeftOut = list[tuple[Path, str]]
"""Places that can't be enforced, and why."""


def json_options(whitespace: Literal["compact", "any"], *, relax: bool) -> dict[str, Any]:
    """Return the "x-guidance" of a schema: how JSON is written, and what is enforced."""
    compact = whitespace == "compact"
    return {
        "whitespace_flexible": not compact,
        "item_separator": ", " if compact else ",",
        "key_separator": ": " if compact else ":",
        "lenient": relax,
        "coerce_one_of": relax,
        "json_allow_general_unicode_escapes": True,
    }


def needs_change(text: str, *, relax: bool) -> bool:
    """Return whether `make_readable` may find something in a schema, told by its text."""
    return relax or _TELLING.search(text) is not None


def readable_text(text: str, *, relax: bool) -> str:
    """Return the schema ``text`` as the library is given it: an object, changed as the top of the file says.

    To read and to write a large one again takes milliseconds of the GIL, and most need no change. Raises GrammarError.
    """
    if text.startswith("{") and not needs_change(text, relax=relax):
        return text
    schema = json.loads(text)
    if schema is False:
        raise GrammarError("the JSON schema is false, which no value fits", kind="unsatisfiable", path="$")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, true or false", kind="invalid", path="$")
    make_readable(schema, relax=relax)
    return json.dumps(schema, ensure_ascii=False)


def make_readable(schema: Any, *, relax: bool) -> tuple[str, ...]:
    """Change ``schema`` as the top of the file says. Returns what is not enforced any more, and where.

    Raises GrammarError for what can't be enforced, unless ``relax``.
    """
    left_out: _LeftOut = []
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)
    for path, part in walk(schema):
        if not isinstance(part, dict):
            continue
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if "propertyNames" in part and part["propertyNames"] in _NO_LIMIT:
            del part["propertyNames"]
        part.update({key: int(part[key]) for key in _COUNTS if _is_whole_float(part.get(key))})
        _change_numbers(path, part, left_out)
        _move_bounds(part)
        _translate_patterns(path, part, left_out)
        if relax:
            _leave_out_counts(path, part, left_out)
    refs = sorted(unquote(part["$ref"]) for _, part in walk(schema) if _refers(part)) if left_out else []
    has_names = not all(map(is_pointer, refs))  # references by name may lead to any definition
    faults = [(json_path(path), fault) for path, fault in left_out if has_names or _is_used(path, refs)]
    if faults and not relax:
        at, fault = faults[0]
        message = f"the JSON schema can't be used at {at}: {fault}"
        cure = 'on_unsupported="relax" leaves out what can\'t be enforced'
        raise GrammarError(f"{message}; {cure}", kind="unsupported", path=at)
    return tuple(f"{at} is not enforced: {fault}" for at, fault in faults)


def _is_used(path: Path, refs: list[str]) -> bool:
    """Return whether a place of a schema is in no definition, or in one that something refers to; ``refs``: sorted."""
    for depth, key in enumerate(path[:-1]):
        if key in ("$defs", "definitions"):
            pointer = "#" + pointer_to(path[: depth + 2])
            at = bisect_left(refs, pointer)
            return at < len(refs) and refs[at].startswith(pointer)
    return True


def _refers(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("$ref"), str)


def left_out_of(text: str) -> tuple[str, ...]:
    """Return what `make_readable` leaves out of a schema that is relaxed."""
    is_needed = _TELLING_RELAXED.search(text) or _TELLING.search(text)
    return make_readable(json.loads(text), relax=True) if is_needed else ()


def _change_numbers(path: Path, part: dict[str, Any], left_out: _LeftOut) -> None:
    for keyword in _NUMERIC:
        if keyword in part:
            if says_nothing(keyword, part[keyword]):
                del part[keyword]
            elif fault := unusable_bound(part, keyword):
                left_out.append(((*path, keyword), fault))
                del part[keyword]
    if (number := inexact_value(part.get("const"))) is not None:
        left_out.append(((*path, "const"), _too_exact(number)))
        _widen(part, "const", [], [part["const"]])
    options = part.get("enum")
    if isinstance(options, list):
        inexact = [inexact_value(option) for option in options]
        for index, number in enumerate(inexact):
            if number is not None:
                left_out.append(((*path, "enum", index), _too_exact(number)))
        if any(number is not None for number in inexact):
            exact = [option for option, number in zip(options, inexact, strict=True) if number is None]
            _widen(part, "enum", exact, [o for o, number in zip(options, inexact, strict=True) if number is not None])


def _too_exact(number: object) -> str:
    return f"the library can't hold to all digits of {number!r:.40}"


def _widen(part: dict[str, Any], keyword: str, exact: list[Any], others: list[Any]) -> None:
    """Let a value be one of ``exact``, or any of a type of ``others``."""
    del part[keyword]
    types = list(dict.fromkeys(map(_type_of, others)))
    members: list[Any] = [{"enum": exact}] * bool(exact) + [{"type": name} for name in types]
    part["allOf"] = [*part.get("allOf", ()), {"anyOf": members} if len(members) > 1 else members[0]]


def _type_of(value: Any) -> str:
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "number"


def _translate_patterns(path: Path, part: dict[str, Any], left_out: _LeftOut) -> None:
    if isinstance(part.get("pattern"), str):
        try:
            part["pattern"] = rust_pattern(part["pattern"])
        except UntranslatablePattern as fault:
            left_out.append(((*path, "pattern"), f"{fault} is not supported"))
            del part["pattern"]
    named = part.get("patternProperties")
    if not isinstance(named, dict):
        return
    translated: dict[str, Any] = {}
    for pattern, member in named.items():
        try:
            rust = rust_pattern(pattern)
            if rust in translated:
                raise UntranslatablePattern("another pattern for the same names")
            translated[rust] = member
        except UntranslatablePattern as fault:
            left_out.append(((*path, "patternProperties", pattern), f"{fault} is not supported"))
            part["additionalProperties"] = True  # other names may come, too
    part["patternProperties"] = translated


def _move_bounds(part: dict[str, Any]) -> None:
    if part.get("type") == "integer":
        return
    low, high = _number(part.get("exclusiveMinimum")), _number(part.get("exclusiveMaximum"))
    lows, highs = [_number(part.get("minimum")), low], [_number(part.get("maximum")), high]
    if _is_whole(low) and low >= 0 and any(low < other < low + 1 for other in highs):
        part["exclusiveMinimum"] = low + max(1, low) * _TRILLIONTH
    if _is_whole(high) and high <= 0 and any(high - 1 < other < high for other in lows):
        part["exclusiveMaximum"] = high - max(1, -high) * _TRILLIONTH


def _number(value: object) -> float:
    """Return the value as a number; NaN for what is none, with which every comparison is false."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _is_whole(value: float) -> bool:
    return abs(value) < 1e15 and value == int(value)


def _leave_out_counts(path: Path, part: dict[str, Any], left_out: _LeftOut) -> None:
    """Leave out counts of properties, where some of those that are named are optional."""
    if not isinstance(part.get("properties"), dict):
        return
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        return  # no other names can come, and the named ones are counted
    required = part.get("required")
    if set(part["properties"]) <= set(required if isinstance(required, list) else ()):
        return
    for keyword in ("minProperties", "maxProperties"):
        if part.pop(keyword, None) is not None:
            left_out.append(((*path, keyword), "some of the properties are optional"))
