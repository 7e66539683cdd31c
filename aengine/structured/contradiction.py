"""Whether any finite value can fit a JSON schema, as far as its plain keywords tell.

A model held to a schema that nothing fits writes until its tokens are spent, so what is plainly impossible is refused
beforehand, with its place: a minimum above the maximum, a required property whose schema is false, an object that must
hold an object that must hold an object ... But a dead end that nothing has to enter is none: an optional property,
one branch of an anyOf, one of several types.

`contradiction` starts with no schema known to have a value, and adds those that have one by what is known already,
until nothing changes. Keywords that can only forbid (not, if, contains, ...) are taken as met, so that a schema is
never refused wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .schema_walk import Path, pointed_at, walk
from .yield_gil import breathe

__all__ = ["contradiction", "is_of"]

_BREATH = 32
_MAX_PASSES = 16
"""A pass follows a chain of references at least one link; longer ones, which nobody writes, are given up."""


class _Fault(NamedTuple):
    keys: Path
    """Of the keyword at fault, from its schema."""
    reason: str
    culprit: object = None
    """The schema without a value that is the cause, if it is another one."""


class _Known:
    """Which parts of ``root`` are known to have a value."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.paths = {id(part): path for path, part in walk(root) if isinstance(part, dict)}
        self.fitting: set[int] = set()

    def fits(self, schema: object) -> bool:
        if isinstance(schema, bool):
            return schema
        return id(schema) in self.fitting or id(schema) not in self.paths


def contradiction(root: Any) -> tuple[Path, str] | None:
    """The path and the nature of what makes ``root`` impossible; None if nothing plainly does."""
    if not isinstance(root, dict):
        return ((), "is false, which no value fits") if root is False else None
    known = _Known(root)
    open_ = [part for _, part in walk(root) if isinstance(part, dict)]
    open_.reverse()  # members before what holds them
    for _ in range(_MAX_PASSES):
        left = []
        for i, part in enumerate(open_, 1):
            if i % _BREATH == 0:
                breathe()
            if _fault(part, known) is None:
                known.fitting.add(id(part))
            else:
                left.append(part)
        if known.fits(root):
            return None
        if len(left) == len(open_):
            return _place(root, known)
        open_ = left
    return None


def _place(root: Any, known: _Known) -> tuple[Path, str]:
    """Down from the root to the first cause that has no cause itself."""
    schema, seen = root, set[int]()
    while True:
        seen.add(id(schema))
        path = known.paths[id(schema)]
        fault = _fault(schema, known)
        assert fault is not None, "a schema that has no value has a reason"
        if fault.culprit is None:
            return path + fault.keys, fault.reason
        if fault.culprit is False:
            return path + fault.keys, "is false, but must be met"
        if id(fault.culprit) in seen:
            return path + fault.keys, "needs itself again without end: make it optional, or give it an alternative"
        schema = fault.culprit


def _fault(schema: dict[str, Any], known: _Known) -> _Fault | None:
    """Why ``schema`` has no value by what is known so far."""
    ref = schema.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        target = pointed_at(known.root, ref)
        if target is not None and not known.fits(target[1]):
            return _Fault(("$ref",), "can't be met", target[1])
    for index, member in enumerate(schema.get("allOf", ())):
        if not known.fits(member):
            return _Fault(("allOf", index), "can't be met", member)
    for keyword in ("anyOf", "oneOf"):
        members = schema.get(keyword)
        if members and not any(map(known.fits, members)):
            if len(members) == 1:
                return _Fault((keyword, 0), "can't be met", members[0])
            inner = [m for m in members if m is not False]
            return _Fault((keyword,), "has no member that can be met", inner[0] if len(inner) == 1 else None)
    return _fault_of_types(schema, known)


def _fault_of_types(schema: dict[str, Any], known: _Known) -> _Fault | None:
    if "type" not in schema:
        return None
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if options is not None and not any(is_of(option, t) for option in options for t in types):
        keyword = "const" if "const" in schema else "enum"
        return _Fault((keyword,), f"has no value of type {' or '.join(types)}")
    first: _Fault | None = None
    for name in types:
        fault = next(_BY_TYPE[name](schema, known), None) if name in _BY_TYPE else None
        if fault is None:
            return None
        first = first or fault
    return first


def is_of(value: object, name: str) -> bool:
    """Whether a JSON value is of the type that a schema calls ``name``."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    python_type: dict[str, Any] = {
        "array": list,
        "null": type(None),
        "number": int | float,
        "object": dict,
        "string": str,
    }
    return name in python_type and isinstance(value, python_type[name])


def _crossed(schema: dict[str, Any], low: str, high: str) -> Iterator[_Fault]:
    if low in schema and high in schema and schema[low] > schema[high]:
        yield _Fault((low,), f"is {schema[low]}, more than {high}, which is {schema[high]}")


def _string(schema: dict[str, Any], known: _Known) -> Iterator[_Fault]:
    yield from _crossed(schema, "minLength", "maxLength")


def _bounds(schema: dict[str, Any]) -> tuple[float, bool, str, float, bool, str]:
    """The lower and the upper bound, each with whether it is itself outside, and its keyword."""
    low, low_open, low_name = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum") is True, "minimum"
    high, high_open, high_name = schema.get("maximum", math.inf), schema.get("exclusiveMaximum") is True, "maximum"
    other = schema.get("exclusiveMinimum")
    if other is not None and not isinstance(other, bool) and other >= low:
        low, low_open, low_name = other, True, "exclusiveMinimum"
    other = schema.get("exclusiveMaximum")
    if other is not None and not isinstance(other, bool) and other <= high:
        high, high_open, high_name = other, True, "exclusiveMaximum"
    return low, low_open, low_name, high, high_open, high_name


def _number(schema: dict[str, Any], known: _Known) -> Iterator[_Fault]:
    low, low_open, low_name, high, high_open, high_name = _bounds(schema)
    if low > high or (low == high and (low_open or high_open)):
        yield _Fault((low_name,), f"is {low}, which leaves nothing below {high_name}, which is {high}")


def _integer(schema: dict[str, Any], known: _Known) -> Iterator[_Fault]:
    yield from _number(schema, known)
    low, low_open, low_name, high, high_open, high_name = _bounds(schema)
    if abs(low) != math.inf and abs(high) != math.inf:  # math.isfinite can't take integers beyond a float's range
        first = math.floor(low) + 1 if low_open else math.ceil(low)
        last = math.ceil(high) - 1 if high_open else math.floor(high)
        if first > last:
            yield _Fault((low_name,), f"is {low}, and there is no integer up to {high_name}, which is {high}")


def _array(schema: dict[str, Any], known: _Known) -> Iterator[_Fault]:
    yield from _crossed(schema, "minItems", "maxItems")
    least = schema.get("minItems", 0)
    items = schema.get("items", True)
    first, rest = ("items", "additionalItems") if isinstance(items, list) else ("prefixItems", "items")
    listed = schema.get(first, ())
    for index, member in enumerate(listed[:least]):
        if not known.fits(member):
            yield _Fault((first, index), "can't be met", member)
    if least > len(listed) and rest in schema and not known.fits(schema[rest]):
        yield _Fault((rest,), f"can't be met, but minItems is {least}", schema[rest])


def _object(schema: dict[str, Any], known: _Known) -> Iterator[_Fault]:
    yield from _crossed(schema, "minProperties", "maxProperties")
    required = schema.get("required", ())
    if not isinstance(required, list):
        return
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for index, name in enumerate(required):
        if name in properties:
            if not known.fits(properties[name]):
                yield _Fault(("properties", name), "can't be met", properties[name])
        elif not known.fits(others) and not schema.get("patternProperties"):
            yield _Fault(("required", index), f"is {name!r:.80}, which additionalProperties does not allow")
    if len(set(required)) > schema.get("maxProperties", math.inf):
        yield _Fault(("maxProperties",), "is less than the properties that are required")


_BY_TYPE: dict[str, Callable[[dict[str, Any], _Known], Iterator[_Fault]]] = {
    "string": _string,
    "number": _number,
    "integer": _integer,
    "array": _array,
    "object": _object,
}
