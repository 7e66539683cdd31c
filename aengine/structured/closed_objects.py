"""Closes a JSON schema's objects: one that names properties and says nothing of others has no others.

    {"allOf": [{"properties": {"a": A}}, {"properties": {"b": B}}]}      is silent: JSON Schema lets it have any member
    {"allOf": [...], "properties": {"a": {}, "b": {}}, "additionalProperties": false}       closed: to a and b

A model that may invent members rambles. What is closed is a *place*, the root or what stands under ``properties``,
``items`` and so on, to the names that all parts which apply to the place together give, as ``unevaluatedProperties:
false`` does; closed part by part, the two above could not be met together.

- What applies together: the schema itself, what ``$ref`` leads to, and each of ``allOf``. A member of an ``anyOf`` or a
  ``oneOf`` is closed by itself, to its own names and those around it; in a ``oneOf`` whose members no type or required
  constant tells apart, to the names of all, as closing must not tell them apart.
- Names are those of ``properties``, ``patternProperties``, ``required``, and of what depends on a condition. A place of
  which no ``properties`` speaks stays open; so does one where ``additionalProperties`` or ``unevaluatedProperties`` is
  written, which lists its values (``enum``, ``const``), refers to what can't be found here, or wants more members than
  are named. So what could be met still can.
- A definition may be a place's own schema here and a part of another there: parts get a copy of it that is open.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import GrammarError
from ..threads.yield_gil import yield_gil
from .schema_walk import pointed_at, subschemas, walk

__all__ = ["close_objects"]

_PLACES = frozenset(
    ("additionalItems", "additionalProperties", "items", "patternProperties", "prefixItems", "properties")
)
"""Under these stand the schemas of an object's or a list's members."""
_NEGATED = frozenset(("contains", "if", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties"))
"""Narrower under these might be wider above."""
_CONDITIONAL = ("if", "then", "else")
_UNIONS = ("anyOf", "oneOf")
_SAYS_ALL = ("additionalProperties", "unevaluatedProperties", "const", "enum", "$dynamicRef", "$recursiveRef")
_NO_ASSERTION = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "title",
     "readOnly", "writeOnly")
)  # fmt: skip
_NAMING = frozenset(
    ("$ref", "allOf", "anyOf", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "oneOf",
     "patternProperties", "properties", "required", "then")
)  # fmt: skip
"""Keywords that may name members."""
_DEPTH = 16
"""References in a row."""
_YIELD_EVERY = 32
_MOST_WORK = 500_000
"""Parts and names looked at; a second or less."""
_MOST_APART = 64
"""Members of a ``oneOf`` that are compared with each other."""

_PLACE, _PART = 1, 2
"""Uses of a schema."""

Schema = dict[str, Any]


def close_objects(root: Any) -> None:
    """Change the schema ``root``, a `plain_json`. Raises GrammarError (kind "too_complex") where that is too much."""
    if isinstance(root, dict):
        _Closing(root).close()


@dataclass(slots=True)
class _Names:
    """What the parts of a place say of its members."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    is_object: bool = False
    """``properties`` is written."""
    is_open: bool = False
    least: int = 0
    """Members that there must be."""
    unions: list[tuple[list[Schema], bool]] = field(default_factory=list)
    """The members of each, and whether they may be closed to different names."""

    def add(self, other: _Names) -> None:
        self.names |= other.names
        self.patterns |= other.patterns

    def __bool__(self) -> bool:
        return self.is_object or bool(self.names or self.patterns)

    def beside(self, other: _Names) -> _Names:
        """Return both, without the unions."""
        return _Names(
            self.names | other.names,
            self.patterns | other.patterns,
            self.is_object or other.is_object,
            self.is_open or other.is_open,
            max(self.least, other.least),
        )


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        name = root.get("$id", root.get("id"))
        self._name = name.rstrip("#") if isinstance(name, str) else ""
        self._work = 0
        self._has_names = any(
            path and isinstance(part, dict) and isinstance(part.get("$id"), str) for path, part in walk(root)
        )
        self._anchors = dict(_anchors(root))
        self._done: set[int] = set()
        self._closed: dict[int, tuple[Schema, _Names]] = {}

    def close(self) -> None:
        self._separate_uses()
        for place in self._places():
            self._close(self._end(place), _Names())
        for part, known in self._closed.values():
            _write(part, known)

    # What refers to what.

    def _places(self) -> Iterator[Schema]:
        """Yield the root, and each schema of a member."""
        yield self._root
        stack = [self._root]
        while stack:
            part = stack.pop()
            self._count(1)
            for keys, member in subschemas(part):
                if keys[0] not in _NEGATED and isinstance(member, dict):
                    stack.append(member)
                    if keys[0] in _PLACES:
                        yield member

    def _target(self, part: Schema) -> Schema | None:
        """Return what the part refers to; None if that is not here."""
        ref = part["$ref"]
        if not isinstance(ref, str) or self._has_names:
            return None
        ref = ref.removeprefix(self._name)
        if ref.startswith("#") and ref[1:] in self._anchors:
            return self._anchors[ref[1:]]
        found = pointed_at(self._root, ref) if ref in ("", "#") or ref.startswith("#/") else None
        return found[1] if found is not None and isinstance(found[1], dict) else None

    def _end(self, part: Schema) -> Schema:
        return self._followed(part)[0]

    def _followed(self, part: Schema) -> tuple[Schema, Schema | None]:
        """Follow references that stand alone, as far as they lead. Returns their end, and what holds the first."""
        holder = None
        for _ in range(_DEPTH):
            said = part.keys() - _NO_ASSERTION
            if said == {"allOf"} and len(members := _members(part, "allOf")) == 1 == len(part["allOf"]):
                part = members[0]
            elif said == {"$ref"} and (found := self._target(part)) is not None:
                holder = holder or part
                part = found
            else:
                break
        return part, holder

    def _separate_uses(self) -> None:
        """Let parts refer to an open copy of what is a place's own schema, too."""
        copies: dict[int, tuple[Schema, str]] = {}
        is_new = True
        while is_new:
            is_new = False
            uses, references = self._uses()
            for holder, target in references:
                if uses[id(target)] != _PLACE | _PART or uses.get(id(holder)) == _PLACE | _PART:
                    continue
                if id(target) not in copies:
                    copies[id(target)] = target, self._add_definition(copy.deepcopy(target))
                holder["$ref"] = copies[id(target)][1]
                is_new = True

    def _uses(self) -> tuple[dict[int, int], list[tuple[Schema, Schema]]]:
        """Return how each schema is used, and each reference by which one is a part."""
        uses: dict[int, int] = {}
        references: list[tuple[Schema, Schema]] = []
        stack = [(place, _PLACE) for place in self._places()]
        while stack:
            part, use = stack.pop()
            known = uses.get(id(part), 0)
            if known | use == known:
                continue
            uses[id(part)] = known | use
            self._count(1)
            end, holder = self._followed(part)
            if holder is not None:
                references += [(holder, end)] if use == _PART else []
                stack.append((end, use))
                continue
            if "$ref" in part and (target := self._target(part)) is not None:
                references.append((part, self._end(target)))
                stack.append((self._end(target), _PART))
            for keyword in ("allOf", *_UNIONS):
                members = _members(part, keyword)
                is_only = part.keys() & _NAMING == {keyword} and keyword != "allOf"
                own = use if is_only and (keyword == "anyOf" or self._are_apart(members)) else _PART
                stack += [(member, own) for member in members]
            stack += [(member, _PART) for member in _conditional(part)]
        return uses, references

    def _add_definition(self, part: Schema) -> str:
        definitions = self._root.setdefault("$defs", {})
        if not isinstance(definitions, dict):
            raise GrammarError("$defs is no object", kind="invalid", path="$['$defs']")
        name = next(name for i in range(len(definitions) + 1) if (name := f"open_{i}") not in definitions)
        definitions[name] = part
        for _, named in list(_anchors(part)):
            del named["$anchor"]
        self._count(len(json.dumps(part)) // 8)
        return f"{self._name}#/$defs/{name}" if self._name else f"#/$defs/{name}"

    # What is closed to what.

    def _close(self, part: Schema, around: _Names) -> None:
        if not around:
            if id(part) in self._done:
                return
            self._done.add(id(part))
        own = self._joined(part)
        known = around.beside(own)
        if known.is_open:
            return
        if not own.unions:
            if known.is_object and (known.patterns or known.least <= len(known.names)):
                before = self._closed.get(id(part), (part, _Names()))[1]
                self._closed[id(part)] = part, known.beside(before)
            return
        names = [self._all_names(members) for members, _ in own.unions]
        for i, (members, are_apart) in enumerate(own.unions):
            others = known
            for j, these in enumerate(names):
                if j != i or not are_apart:
                    others = others.beside(these)
            for member in members:
                self._close(member if others else self._end(member), others)

    def _joined(self, part: Schema) -> _Names:
        """Return what the part and all that applies together with it say."""
        found = _Names()
        seen: set[int] = set()
        stack = [part]
        while stack:
            one = stack.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            self._add_names(one, found)
            found.is_open = found.is_open or any(keyword in one for keyword in _SAYS_ALL)
            least = one.get("minProperties")
            found.least = max(found.least, least if isinstance(least, int) else 0)
            for keyword in _UNIONS:
                if members := _members(one, keyword):
                    found.unions.append((members, keyword == "anyOf" or self._are_apart(members)))
            if conditional := _conditional(one):
                found.add(self._all_names(conditional))
            stack += reversed(_members(one, "allOf"))
            if "$ref" in one:
                target = self._target(one)
                found.is_open = found.is_open or target is None
                stack += [target] if target is not None else []
        return found

    def _add_names(self, part: Schema, found: _Names) -> None:
        properties, patterns = part.get("properties"), part.get("patternProperties")
        found.is_object = found.is_object or isinstance(properties, dict)
        found.names.update(dict.fromkeys([*(properties if isinstance(properties, dict) else ()), *_required(part)]))
        found.patterns.update(dict.fromkeys(patterns if isinstance(patterns, dict) else ()))
        self._count(1 + len(found.names))

    def _all_names(self, parts: list[Schema]) -> _Names:
        """Return the names that the parts may give, whichever of them apply."""
        found = _Names()
        seen: set[int] = set()
        stack = [*parts]
        while stack:
            one = stack.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            self._add_names(one, found)
            target = self._target(one) if "$ref" in one else None
            stack += [*([target] if target is not None else []), *_conditional(one)]
            stack += [member for keyword in ("allOf", *_UNIONS) for member in _members(one, keyword)]
        found.is_object = False
        return found

    def _are_apart(self, members: list[Schema]) -> bool:
        """Return whether no two members of a ``oneOf`` can hold at once, by their types or by a constant."""
        if len(members) > _MOST_APART:
            return False
        known = [(_types(end := self._end(member)), _constants(end)) for member in members]
        self._count(len(members) ** 2)
        return all(
            not (types & others) or any(not (constants[name] & more[name]) for name in constants.keys() & more.keys())
            for i, (types, constants) in enumerate(known)
            for others, more in known[:i]
        )

    def _count(self, amount: int) -> None:
        self._work += amount
        if self._work % _YIELD_EVERY == 0:
            yield_gil()
        if self._work > _MOST_WORK:
            raise GrammarError(
                "the JSON schema joins too many parts to find out which properties an object may have: write "
                "additionalProperties where it is to be open or closed",
                kind="too_complex",
            )


def _anchors(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield what has a name within the schema, by ``$anchor``."""
    for _, part in walk(root):
        if isinstance(part, dict) and isinstance(part.get("$anchor"), str):
            yield part["$anchor"], part


def _members(part: Schema, keyword: str) -> list[Schema]:
    members = part.get(keyword)
    return [member for member in members if isinstance(member, dict)] if isinstance(members, list) else []


def _conditional(part: Schema) -> list[Schema]:
    named = [part.get("dependentSchemas"), part.get("dependencies")]
    members = [member for one in named if isinstance(one, dict) for member in one.values()]
    return [member for member in (*map(part.get, _CONDITIONAL), *members) if isinstance(member, dict)]


def _required(part: Schema) -> list[str]:
    dependent = [part.get("dependentRequired"), part.get("dependencies")]
    lists = [part.get("required"), *(names for one in dependent if isinstance(one, dict) for names in one.values())]
    return [name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)]


def _types(part: Schema) -> frozenset[str]:
    given = part.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    found = {"number" if name == "integer" else str(name) for name in names}
    return frozenset(found or ("array", "boolean", "null", "number", "object", "string"))


def _constants(part: Schema) -> dict[str, frozenset[str]]:
    """Return the values of those properties that must be there and are constants."""
    properties, required = part.get("properties"), set(_required(part))
    found: dict[str, frozenset[str]] = {}
    for name, member in properties.items() if isinstance(properties, dict) else ():
        if (
            name in required
            and isinstance(member, dict)
            and ("const" in member or isinstance(member.get("enum"), list))
        ):
            values = [member["const"]] if "const" in member else member["enum"]
            found[name] = frozenset(map(json.dumps, values))
    return found


def _write(part: Schema, known: _Names) -> None:
    if "$ref" in part:  # drafts before 2019 read nothing beside it
        members = part.get("allOf")
        part["allOf"] = [*(members if isinstance(members, list) else ()), {"$ref": part.pop("$ref")}]
    for keyword, names in (("properties", known.names), ("patternProperties", known.patterns)):
        own = part.get(keyword)
        own = own if isinstance(own, dict) else {}
        if names or keyword == "properties":
            part[keyword] = {**own, **{name: {} for name in names if name not in own}}
    part["additionalProperties"] = False
