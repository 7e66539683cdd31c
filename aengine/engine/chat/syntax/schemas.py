"""What a JSON schema says of a tool's arguments, for syntaxes that write them one by one, and not as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import GrammarError
from ...structured.patterns import UntranslatablePattern, rust_pattern
from ...structured.schema_walk import pointed_at
from .arguments import ToolSchema

ANY_TYPE = frozenset(("string", "number", "boolean", "null", "array", "object"))
_TYPES = {name: frozenset((name,)) for name in ANY_TYPE} | {"integer": frozenset(("number",))}
_ALTERNATIVES = ("anyOf", "oneOf")
_NOT_ONE_BY_ONE = (
    "anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "minProperties", "maxProperties",
)  # fmt: skip
"""Keywords of an object that say something of several members, or of members that have no name."""
_DEPTH = 16
_MAX_LETTERS = 1 << 22
_FORMATS = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class Root:
    """The schema of all arguments, to which references lead, and what was found of its parts: many may refer to one."""

    __slots__ = ("num_letters", "options", "schema", "types")

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self.num_letters = 0
        # Keyed by the id of a part; the part in the value is kept alive, so that no other gets its id.
        self.types: dict[int, tuple[object, frozenset[str]]] = {}
        self.options: dict[int, tuple[object, list[Any] | None]] = {}

    def spend(self, num_letters: int) -> None:
        """Count what is written of a part, which may be written for each argument that refers to it."""
        self.num_letters += num_letters
        if self.num_letters > _MAX_LETTERS:
            raise GrammarError(
                f"the parameters of a tool refer to so much, so often, that their grammar has over {_MAX_LETTERS} "
                "letters: make what they refer to smaller",
                kind="too_complex",
            )


@dataclass(frozen=True, slots=True)
class Value:
    """An argument's schema, with the schema of all arguments, which has the definitions."""

    name: str
    schema: Any
    root: Root
    is_required: bool = False

    def resolved(self) -> Any:
        """Return the schema that a reference leads to; one that leads nowhere stays."""
        schema = self.schema
        for _ in range(_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            found = pointed_at(self.root.schema, schema["$ref"]) if schema["$ref"].startswith("#") else None
            if found is None:
                return schema
            schema = found[1]
        return schema

    def within(self, schema: Any) -> Value:
        """Return the value for a part of the schema."""
        return Value(self.name, schema, self.root)

    def unions(self, schema: Mapping[str, Any]) -> Iterator[list[Value]]:
        """Yield the members of each keyword of ``schema``, a part of it, that says what it may be one of."""
        for keyword in _ALTERNATIVES:
            if isinstance(schema.get(keyword), list):
                yield [self.within(member) for member in schema[keyword]]

    def alternatives(self) -> list[Value]:
        """Return what it may be, each by itself; only itself if it is one thing."""
        schema = self.resolved()
        whole = [self.within(schema)]
        return next(self.unions(schema), whole) if isinstance(schema, dict) else whole

    def types(self, depth: int = 0) -> frozenset[str]:
        """Return the JSON types that it may have: those of `ANY_TYPE`; integers are numbers."""
        schema = self.resolved()
        if not isinstance(schema, dict) or depth > _DEPTH:
            return ANY_TYPE
        if id(schema) not in self.root.types:
            self.root.types[id(schema)] = schema, ANY_TYPE  # should it refer to itself
            self.root.types[id(schema)] = schema, self._types_of(schema, depth)
        return self.root.types[id(schema)][1]

    def _types_of(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        if "const" in schema or isinstance(schema.get("enum"), list):
            return frozenset(map(type_of, schema["enum"] if "enum" in schema else [schema["const"]]))
        given = schema.get("type")
        found = ANY_TYPE
        if isinstance(given, str | list):
            names = [given] if isinstance(given, str) else given
            found = frozenset(name for one in names for name in _TYPES.get(str(one), ANY_TYPE))
        for members in self.unions(schema):
            found &= frozenset().union(*(member.types(depth + 1) for member in members))
        joined = schema.get("allOf")
        for member in joined if isinstance(joined, list) else ():
            found &= self.within(member).types(depth + 1)
        return found or ANY_TYPE

    def options(self, depth: int = 0) -> list[Any] | None:
        """Return all that it may be, if the schema lists it; else None."""
        schema = self.resolved()
        if not isinstance(schema, dict) or depth > _DEPTH:
            return None
        if id(schema) not in self.root.options:
            self.root.options[id(schema)] = schema, None  # should it refer to itself
            self.root.options[id(schema)] = schema, self._options_of(schema, depth)
        return self.root.options[id(schema)][1]

    def _options_of(self, schema: Mapping[str, Any], depth: int) -> list[Any] | None:
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"])
        if "const" in schema:
            return [schema["const"]]
        if schema.get("type") == "null":
            return [None]
        if schema.get("type") == "boolean":
            return [True, False]
        for members in self.unions(schema):
            found = [member.options(depth + 1) for member in members]
            if all(options is not None for options in found):
                each = {json.dumps(value): value for options in found for value in options or ()}
                return [*each.values()]
        return None

    def text(self) -> str:
        """Return the schema as JSON that stands for itself: with the definitions that it may refer to."""
        if not isinstance(self.schema, dict):
            return json.dumps(self.schema if isinstance(self.schema, bool) else {})
        text = _compact(self.schema)
        if '"$ref"' in text:
            root = self.root.schema
            own = {key: root[key] for key in ("$defs", "definitions") if key in root and key not in self.schema}
            text = _compact({**self.schema, **own})
        self.root.spend(len(text))
        return text


def _compact(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def values_of(schema: Mapping[str, Any], tool: ToolSchema, relax: bool) -> tuple[list[Value], bool]:
    """Return the arguments that the schema names, in its order, and whether others may come: where it names none.

    Raises GrammarError where it says what holds for several arguments, unless ``relax``.
    """
    known = Root(schema)
    root = Value("", schema, known).resolved()
    wrong = [keyword for keyword in _NOT_ONE_BY_ONE if keyword in root] if isinstance(root, dict) else ["$ref"]
    if wrong and not relax:
        raise GrammarError(
            f"the parameters of the tool {tool.name!r}: {wrong[0]!r} can't be enforced where a model writes arguments "
            "one by one; use on_unsupported='relax', or strict=False for this tool",
            kind="unsupported",
            tool=tool.name,
            path=f"$.{wrong[0]}",
        )
    properties = root.get("properties") if isinstance(root, dict) else None
    if not isinstance(properties, dict) or not properties:
        return [], not (isinstance(root, dict) and root.get("additionalProperties") is False)
    required = required_of(root)
    return [Value(name, member, known, name in required) for name, member in properties.items()], False


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the members that must be there."""
    names = schema.get("required")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def count_of(schema: Mapping[str, Any], keyword: str) -> int | None:
    """Return a length or a number of items; None if none is given. Raises GrammarError for what can't be one."""
    number = schema.get(keyword)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if number is None or (isinstance(number, int) and not isinstance(number, bool) and number >= 0):
        return number
    raise GrammarError(f"{keyword!r} must be a whole number of at least 0, not {number!r:.80}", kind="invalid")


def text_patterns(value: Value, relax: bool) -> tuple[str, ...]:
    """Return regexes that a text of this value must match, each as a whole; empty: it may be any.

    Raises GrammarError for a pattern that can't be enforced, unless ``relax``."""
    members = [member for member in value.alternatives() if "string" in member.types()]
    if len(members) != 1 or not isinstance(members[0].schema, dict):
        return ()
    patterns = tuple(_patterns(members[0].schema, relax))
    others = value.types() - {"string"}
    if not patterns or not others:
        return patterns
    if others & {"array", "object"}:
        return ()
    scalars = {"null": "null", "boolean": "true|false", "number": r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"}
    return tuple("|".join([f"(?:{pattern})", *(scalars[name] for name in sorted(others))]) for pattern in patterns)


def string_patterns(schema: Mapping[str, Any], relax: bool) -> tuple[str, ...]:
    """Return regexes that a text of this schema must match, each as a whole. Raises as `text_patterns`."""
    return tuple(_patterns(schema, relax))


def _patterns(schema: Mapping[str, Any], relax: bool) -> Iterator[str]:
    least, most = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    if least or most is not None:
        yield f"(?s:.{{{least},{'' if most is None else most}}})"
    if isinstance(schema.get("pattern"), str):
        try:
            yield _whole(rust_pattern(schema["pattern"]))
        except UntranslatablePattern as fault:
            if not relax:
                raise GrammarError(
                    f"the pattern {schema['pattern']!r:.80} of a tool's parameter can't be enforced: {fault} is not "
                    "supported; use on_unsupported='relax', or strict=False for this tool",
                    kind="unsupported",
                ) from None
    if (name := str(schema.get("format"))) in _FORMATS:
        yield _FORMATS[name]


def _whole(pattern: str) -> str:
    """Return a pattern that matches a whole text wherever this one is found in it."""
    body = pattern.removeprefix("^")
    is_open = re.search(r"(?<!\\)(?:\\\\)*\$\Z", body) is None
    body = body if is_open else body[:-1]
    before = "" if pattern.startswith("^") else "(?s:.*)"
    return f"{before}(?:{body}){'(?s:.*)' if is_open else ''}"


def type_of(value: Any) -> str:
    """Return the JSON type of a value, one of `ANY_TYPE`."""
    if isinstance(value, bool):
        return "boolean"
    names = ((str, "string"), (int | float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")
