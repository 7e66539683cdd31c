"""JSON schemas as llguidance reads them, by themselves or inside a Lark grammar. Needs no library.

Some of what a schema may say the library reads wrongly, or refuses for nothing:

- Of ``{"exclusiveMinimum": 0, "maximum": 0.5}`` it would take 0, as wherever a whole number is the bound that is left
  out and the other bound is less than 1 away. Such a bound is moved by a trillionth.
- 2.0 is no integer to it.
- It knows neither ``uniqueItems`` nor ``propertyNames``: they are taken out where they say nothing.
- Relaxed, it would count the properties only that are not named, so that ``{"a": 1}`` would not do. Such counts are
  left out, and so are patterns that it can't read, of which it would refuse the whole schema.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

from ...errors import GrammarError
from ..schema_walk import Path, json_path, walk

__all__ = ["json_options", "left_out_of", "make_readable", "needs_change", "readable_text", "unreadable"]

_TELLING = re.compile(
    r'"(?:x-guidance|exclusiveM(?:in|ax)imum|uniqueItems|propertyNames)"|"m(?:in|ax)[LICP][a-z]+": ?[0-9]+[.eE]'
)
_COUNTS = [f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Contains", "Properties")]
_TELLING_RELAXED = re.compile(r'"(?:m(?:in|ax)Properties|pattern)"')
_NO_LIMIT: tuple[Any, ...] = ({}, True, {"type": "string"})
_TRILLIONTH = 1e-12
_ESCAPE_OR_GROUP = re.compile(r"\\.|\(\?(?:<?[=!]|>|P=)", re.DOTALL)
_UNREADABLE = {
    **dict.fromkeys(("(?=", "(?!", "(?<=", "(?<!"), "looking around"),
    **dict.fromkeys(("\\b", "\\B"), "looking for the end of a word"),
    **dict.fromkeys((f"\\{digit}" for digit in "123456789"), "referring back"),
    "(?P=": "referring back",
    "(?>": "an atomic group",
    **dict.fromkeys(("\\Z", "\\G", "\\c"), "an escape of another dialect"),
}


def json_options(whitespace: Literal["compact", "any"], *, relax: bool) -> dict[str, Any]:
    """Return the "x-guidance" of a schema: how JSON is written, and what is enforced."""
    compact = whitespace == "compact"
    return {
        "whitespace_flexible": not compact,
        "item_separator": ", " if compact else ",",
        "key_separator": ": " if compact else ":",
        "lenient": relax,
        "coerce_one_of": relax,
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
    """Change ``schema`` as the top of the file says. Returns what is not enforced any more, and where."""
    left_out: list[str] = []
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
        _move_bounds(part)
        if relax:
            left_out += _leave_out_counts(path, part)
            left_out += _leave_out_pattern(path, part)
    return tuple(left_out)


def left_out_of(text: str) -> tuple[str, ...]:
    """Return what `make_readable` leaves out of a schema that is relaxed."""
    return make_readable(json.loads(text), relax=True) if _TELLING_RELAXED.search(text) else ()


def unreadable(pattern: str) -> str:
    """Return the part of a regex that the library can't read; "" if none is known."""
    return next((_UNREADABLE[found[0]] for found in _ESCAPE_OR_GROUP.finditer(pattern) if found[0] in _UNREADABLE), "")


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
    """NaN for what is none, which no comparison holds of."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _is_whole(value: float) -> bool:
    return abs(value) < 1e15 and value == int(value)


def _leave_out_counts(path: Path, part: dict[str, Any]) -> list[str]:
    """Leave out counts of properties, where some of those that are named are optional."""
    if not isinstance(part.get("properties"), dict):
        return []
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        return []  # no others can come, and those that are named are counted
    required = part.get("required")
    if set(part["properties"]) <= set(required if isinstance(required, list) else ()):
        return []
    gone = [key for key in ("minProperties", "maxProperties") if part.pop(key, None) is not None]
    return [f"{json_path((*path, key))} is not enforced: some of the properties are optional" for key in gone]


def _leave_out_pattern(path: Path, part: dict[str, Any]) -> list[str]:
    pattern = part.get("pattern")
    fault = unreadable(pattern) if isinstance(pattern, str) else ""
    if not fault:
        return []
    del part["pattern"]
    return [f"{json_path((*path, 'pattern'))} is not enforced: {fault} is not supported"]
