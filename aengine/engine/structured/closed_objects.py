"""Closes a JSON schema's objects: one that names properties and says nothing of others has no others.

    {"allOf": [{"properties": {"a": A}}, {"properties": {"b": B}}]}      is silent: JSON Schema lets it have any member
    {"allOf": [...], "properties": {"a": {}, "b": {}}, "additionalProperties": false}       closed: to a and b

A model that may invent members rambles. What is closed is a *place*, the root or what stands under ``properties``,
``items`` and so on, to the names that all parts which apply to the place together give, as ``unevaluatedProperties:
false`` does; closed part by part, the two above could not be met together.

- What applies together: the schema itself, what ``$ref`` leads to, and each of ``allOf``. A member of an ``anyOf``, or
  of a ``oneOf`` whose members a type or a required constant tells apart, is closed by itself, to its own names and
  those around it; another ``oneOf`` is closed as a whole, to the names of all.
- Names are those of ``properties``, ``patternProperties``, ``required``, and of all that is or depends on a condition.
- A member that several parts speak of is closed to the names of all of them.
- A definition may be a place's own schema here and a part of another there: parts get a copy of it that is open.

What could be met still can: a value that fits may lose its members that no part names. So a place stays open where that
changes what a part says (`_can_have_enough`, `_SAYS_ALL`, `_SEES_ALL`), or where it refers to what can't be found. So
does one of which no ``properties`` speaks, and one where ``additionalProperties`` is written.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

from ...errors import GrammarError
from ..threads.yield_gil import yield_gil
from .schema_walk import is_pointer, pointed_at, subschemas, walk

_PLACES = frozenset(
    ("additionalItems", "additionalProperties", "items", "patternProperties", "prefixItems", "properties")
)
"""Keywords whose values are the schemas of an object's or a list's members."""
_NEGATED = frozenset(("contains", "if", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties"))
"""Keywords under which nothing is closed: a schema that allows less there may make the whole allow more."""
_CONDITIONAL = ("if", "then", "else", "not")
_DEPENDENT = ("dependencies", "dependentRequired", "dependentSchemas")
_UNIONS = ("anyOf", "oneOf")
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_ITEMS = ("additionalItems", "contains", "items", "prefixItems", "unevaluatedItems")
_SAYS_ALL = frozenset((*_OTHERS, "const", "enum", "$dynamicRef", "$recursiveRef"))
"""Keywords that also speak of members that no part names: a place with one of them stays open."""
_SEES_ALL = _SAYS_ALL | {"maxProperties", "minProperties", "propertyNames"}
"""Keywords that keep a place open if a part that applies only sometimes (``if``, ``not``, ...) has one of them."""
_MAY_FORBID = frozenset((*_CONDITIONAL, *_DEPENDENT, "oneOf", "patternProperties", "propertyNames"))
"""Keywords that may forbid a member that ``properties`` allows."""
_MEMBERS = frozenset((*_DEPENDENT, "patternProperties", "properties", "required"))
"""Keywords that name members."""
_NAMING = _MEMBERS.union(_CONDITIONAL, _UNIONS, _OTHERS, ("$ref", "allOf"))
"""Keywords under which members may be named, or that say that there are others."""
_NO_ASSERTION = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "title",
     "readOnly", "writeOnly")
)  # fmt: skip
_LEAVES_A_VALUE = frozenset(
    ("additionalProperties", "const", "enum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum",
     "minItems", "minLength", "minProperties", "minimum", "multipleOf", "properties")
)  # fmt: skip
"""Keywords one of which, alone or beside a ``type``, leaves a schema a valid value; two of them may leave none."""
_PREFIX = re.compile(r"\^([\w-]*)(?![\w*?{-])")
_DEPTH = 16
"""References that are followed in a row."""
_YIELD_EVERY = 32
_MOST_WORK = 130_000
"""Parts, references and names looked at: half a second or less. OpenAPI 2's own schema (40 KB) takes 9,000."""

_PLACE, _PART = 1, 2
"""Uses of a schema."""

Schema = dict[str, Any]


def close_objects(root: Any) -> None:
    """Change the schema ``root``, a `plain_json`. Raises GrammarError (kind "too_complex") where that is too much."""
    if isinstance(root, dict):
        _Closing(root).close()


@dataclass(slots=True)
class _Known:
    """What is known of a place."""

    parts: dict[int, Schema] = field(default_factory=dict)
    """All that may apply to it, by their ids."""
    required: frozenset[str] = frozenset()
    """Members that there are in any case."""
    least: int = 0
    """Members that there must be."""
    is_object: bool = False
    """``properties`` is written in what applies in any case."""
    is_named: bool = False
    """A part names members."""
    is_open: bool = False
    unions: list[list[Schema]] = field(default_factory=list)
    """The members of each, which may be closed to different names."""

    def add(self, part: Schema) -> None:
        self.parts[id(part)] = part
        self.is_named = self.is_named or not _MEMBERS.isdisjoint(part)

    def key(self) -> tuple[frozenset[int], frozenset[str], bool]:
        return frozenset(self.parts), self.required, self.is_open

    def beside(self, *others: _Known) -> _Known:
        """Return all of them, without the unions."""
        every = (self, *others)
        return _Known(
            dict(chain.from_iterable(one.parts.items() for one in every)),
            frozenset[str]().union(*(one.required for one in every)),
            max(one.least for one in every),
            any(one.is_object for one in every),
            any(one.is_named for one in every),
            any(one.is_open for one in every),
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
        self._targets: dict[str, Schema | None] = {}
        self._apart: dict[int, bool] = {}
        self._numbers = count()
        self._closable: set[int] = set()
        self._done: set[tuple[Any, ...]] = set()
        self._done_together: set[frozenset[int]] = set()
        self._closed: dict[int, tuple[Schema, _Known]] = {}

    def close(self) -> None:
        self._separate_uses()
        negated = self._negated()
        places = list(self._places())
        self._closable = {id(place) for place in places} - negated
        for place in places:
            self._close(place, _Known())
        for part, known in self._closed.values():
            if not known.is_open and id(part) not in negated:
                _write(part, known)

    # The following functions find out which schema refers to which.

    def _places(self) -> Iterator[Schema]:
        """Yield the root, and the schema of each member."""
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

    def _negated(self) -> set[int]:
        """Return the ids of what is negated, of all that is in it, and of what that refers to."""
        stack = [member for _, part in walk(self._root) for keys, member in subschemas(part) if keys[0] in _NEGATED]
        seen: set[int] = set()
        while stack:
            part = stack.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            self._count(1)
            stack += [member for _, member in subschemas(part)]
            stack += [self._target(part)] if "$ref" in part else []
        return seen

    def _target(self, part: Schema) -> Schema | None:
        """Return the schema that the part refers to; None: it lies elsewhere."""
        ref = part["$ref"]
        self._count(1)
        if not isinstance(ref, str) or self._has_names:
            return None
        if ref not in self._targets:
            self._targets[ref] = self._find(ref.removeprefix(self._name))
        return self._targets[ref]

    def _find(self, ref: str) -> Schema | None:
        if ref.startswith("#") and ref[1:] in self._anchors:
            return self._anchors[ref[1:]]
        found = pointed_at(self._root, ref) if not ref or is_pointer(ref) else None
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
                own = use if is_only and (keyword == "anyOf" or self._are_apart(part["oneOf"])) else _PART
                stack += [(member, own) for member in members]
            stack += [(member, _PART) for member in _conditional(part)]
        return uses, references

    def _add_definition(self, part: Schema) -> str:
        definitions = self._root.setdefault("$defs", {})
        if not isinstance(definitions, dict):
            raise GrammarError("$defs is no object", kind="invalid", path="$['$defs']")
        name = next(name for i in self._numbers if (name := f"open_{i}") not in definitions)
        definitions[name] = part
        for _, named in list(_anchors(part)):
            del named["$anchor"]
        self._count(len(json.dumps(part)) // 8)
        return f"{self._name}#/$defs/{name}"

    # The following functions close objects to members of other names.

    def _close(self, place: Schema, beside: _Known) -> None:
        """Find out what the place is closed to, where ``beside`` may apply to it, too."""
        stack = [(self._end(place), _Known(), beside)]
        while stack:
            part, around, beside = stack.pop()
            self._count(len(around.parts) + len(beside.parts) + len(around.required))
            key = id(part), around.key(), beside.key()
            if key in self._done:
                continue
            self._done.add(key)
            own = self._joined(part)
            known = around.beside(own)
            if own.unions:
                stack += [(member, others, beside) for member, others in self._members_of_unions(own, known)]
                continue
            known = known.beside(beside)
            self._count(sum(_cost(part) for part in known.parts.values()))
            known.is_open = known.is_open or not known.is_object or not _can_have_enough(known)
            before = self._closed.get(id(part), (part, _Known()))[1]
            self._closed[id(part)] = part, known.beside(before)
            stack += self._members_beside(known)

    def _members_of_unions(self, own: _Known, known: _Known) -> Iterator[tuple[Schema, _Known]]:
        """Yield the members of the unions, each with what applies beside it."""
        every = [self._all(members) for members in own.unions] if len(own.unions) > 1 else [_Known()]
        for i, members in enumerate(own.unions):
            others = known.beside(*every[:i], *every[i + 1 :])
            self._count(len(others.parts))
            for member in members:
                yield member if others.is_named or others.is_open else self._end(member), others

    def _members_beside(self, known: _Known) -> Iterator[tuple[Schema, _Known, _Known]]:
        """Yield the schemas of members to which others apply, too, with all of those."""
        for together in self._applied_together([*known.parts.values()]):
            if (key := frozenset(map(id, together))) not in self._done_together:
                self._done_together.add(key)
                beside = self._all(together)
                yield from ((self._end(one), _Known(), beside) for one in together if id(one) in self._closable)

    def _applied_together(self, parts: list[Schema]) -> Iterator[list[Schema]]:
        """Yield the schemas that may apply to the same member of a value, each time two or more."""
        members = _schemas_by_name(parts)
        elsewhere: list[Any] = []
        for part in parts:
            patterns = [(_prefix(pattern), member) for pattern, member in _of(part, "patternProperties").items()]
            others = [one for one in map(part.get, _OTHERS) if isinstance(one, dict)]
            elsewhere += [*(member for _, member in patterns), *(others if len(parts) > 1 else ())]
            for name, found in members.items() if patterns or others else ():
                self._count(1 + len(patterns))
                found += [member for prefix, member in patterns if name.startswith(prefix)]
                found += others if name not in _of(part, "properties") else []
        items = [[one for keyword in _ITEMS for one in _members(part, keyword)] for part in parts]
        has_several = sum(map(bool, items)) > 1 or any("contains" in part for part in parts)
        for found in (*members.values(), elsewhere, *([list(chain(*items))] if has_several else ())):
            schemas = {id(one): one for one in found if isinstance(one, dict) and one.keys() - _NO_ASSERTION}
            if len(schemas) > 1:
                self._count(len(schemas))
                yield [*schemas.values()]

    def _joined(self, part: Schema) -> _Known:
        """Return what is known of the part and of all that applies together with it."""
        found = _Known()
        possible: list[Schema] = []
        stack = [part]
        while stack:
            one = stack.pop()
            if id(one) in found.parts:
                continue
            self._count(1)
            found.add(one)
            found.is_object = found.is_object or isinstance(one.get("properties"), dict)
            found.is_open = found.is_open or not _SAYS_ALL.isdisjoint(one)
            found.required |= set(required := _strings(one.get("required")))
            self._count(len(required))
            least = one.get("minProperties")
            found.least = max(found.least, math.ceil(least) if isinstance(least, int | float) else 0)
            found.unions += [members] if (members := _members(one, "anyOf")) else []
            if members := _members(one, "oneOf"):
                if self._are_apart(one["oneOf"]):
                    found.unions.append(members)
                else:  # if each were closed, a value that fits two of them could fit one
                    possible += members
                    found.is_object = found.is_object or all("properties" in self._end(member) for member in members)
            possible += _conditional(one)
            stack += reversed(_members(one, "allOf"))
            if "$ref" in one:
                target = self._target(one)
                found.is_open = found.is_open or target is None
                stack += [target] if target is not None else []
        return replace(found.beside(self._all(possible)), unions=found.unions) if possible else found

    def _all(self, schemas: list[Schema]) -> _Known:
        """Return what is known where any of the schemas, and of their parts, may apply or not."""
        found = _Known()
        stack = [*schemas]
        while stack:
            one = stack.pop()
            if id(one) in found.parts or "object" not in _types(one):
                continue
            self._count(1)
            found.add(one)
            target = self._target(one) if "$ref" in one else None
            found.is_open = found.is_open or not _SEES_ALL.isdisjoint(one) or ("$ref" in one and target is None)
            stack += [*([target] if target is not None else []), *_conditional(one)]
            stack += [member for keyword in ("allOf", *_UNIONS) for member in _members(one, keyword)]
        return found

    def _are_apart(self, members: Any) -> bool:
        """Return whether no object fits two members of a ``oneOf``, by their types or a constant."""
        if not isinstance(members, list):  # a value that is no list has at most one schema
            return True
        if id(members) not in self._apart:
            self._apart[id(members)] = self._have_a_constant(members)
        return self._apart[id(members)]

    def _have_a_constant(self, members: list[Any]) -> bool:
        ends = [self._end(member) for member in members if isinstance(member, dict)]
        objects = [end for end in ends if "object" in _types(end)]
        if True in members or len(objects) < 2:
            return len(objects) + members.count(True) < 2
        constants = [_constants(end) for end in objects]
        return any(
            sum(len(one[name]) for one in constants) == len(set[Any]().union(*(one[name] for one in constants)))
            for name in set(constants[0]).intersection(*constants[1:])
        )

    def _count(self, amount: int) -> None:
        before, self._work = self._work, self._work + amount
        if before // _YIELD_EVERY != self._work // _YIELD_EVERY:
            yield_gil()
        if self._work > _MOST_WORK:
            raise GrammarError(
                "the JSON schema joins too many parts to find out which properties an object may have: write "
                "additionalProperties where it is to be open or closed",
                kind="too_complex",
            )


def _anchors(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the parts of the schema that have an ``$anchor``."""
    for _, part in walk(root):
        if isinstance(part, dict) and isinstance(part.get("$anchor"), str):
            yield part["$anchor"], part


def _members(part: Schema, keyword: str) -> list[Schema]:
    """Return the schemas under a keyword, one or a list."""
    members = part.get(keyword)
    return [one for one in (members if isinstance(members, list) else [members]) if isinstance(one, dict)]


def _conditional(part: Schema) -> list[Schema]:
    named = [part.get("dependentSchemas"), part.get("dependencies")]
    members = [member for one in named if isinstance(one, dict) for member in one.values()]
    return [member for member in (*map(part.get, _CONDITIONAL), *members) if isinstance(member, dict)]


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _of(part: Schema, keyword: str) -> Schema:
    """Return the part's object of that keyword; an empty one, if there is none."""
    value = part.get(keyword)
    return value if isinstance(value, dict) else {}


def _names(part: Schema) -> list[str]:
    """Return the members that the part names, but for those of its own parts and patterns."""
    names = [*_of(part, "properties"), *_strings(part.get("required"))]
    for keyword in _DEPENDENT:
        for name, needed in _of(part, keyword).items():
            names += [name, *_strings(needed)]
    return names


def _cost(part: Schema) -> int:
    """Return how many names there are to look at."""
    return 1 + sum(len(part[keyword]) for keyword in _MEMBERS if isinstance(part.get(keyword), dict | list))


def _types(part: Schema) -> frozenset[str]:
    """Return the types that a value of the schema may have, "object" or others."""
    given = part.get("type")
    if isinstance(given, str | list):
        return frozenset([given] if isinstance(given, str) else _strings(given))
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
        return frozenset()
    return frozenset(("object",))


def _constants(part: Schema) -> dict[str, frozenset[Any]]:
    """Return the values of those properties that must be there and are constants, true apart from 1."""
    found: dict[str, frozenset[Any]] = {}
    for name in _strings(part.get("required")):
        member = _of(_of(part, "properties"), name)
        values = [member["const"]] if "const" in member else member.get("enum")
        if isinstance(values, list) and not any(isinstance(value, dict | list) for value in values):
            found[name] = frozenset((isinstance(value, bool), value) for value in values)
    return found


def _schemas_by_name(parts: Iterable[Schema]) -> dict[str, list[Any]]:
    members: dict[str, list[Any]] = {}
    for part in parts:
        for name, member in _of(part, "properties").items():
            members.setdefault(name, []).append(member)
    return members


def _prefix(pattern: str) -> str:
    """Return what each name begins with that the pattern fits, as far as that is plain: "x-" of ``^x-``."""
    found = _PREFIX.match(pattern)
    return found[1] if found and "|" not in pattern else ""


def _can_have_enough(known: _Known) -> bool:
    """Return whether as many members as there must be can come of those that are named."""
    if known.least <= len(known.required):
        return True
    if any(not _MAY_FORBID.isdisjoint(part) for part in known.parts.values()):
        return False
    members = _schemas_by_name(known.parts.values())
    possible = {name for name, found in members.items() if len(found) == 1 and _has_a_value(found[0])}
    return known.least <= len(known.required | possible)


def _has_a_value(schema: Any) -> bool:
    """Return whether some value fits the schema for sure."""
    if not isinstance(schema, dict):
        return schema is True
    said = schema.keys() - _NO_ASSERTION
    listed = said & {"const", "enum"}
    said = said if listed else said - {"type"}
    return len(said) <= 1 and said <= _LEAVES_A_VALUE and schema.get("enum") != []


def _write(part: Schema, known: _Known) -> None:
    if "$ref" in part:  # drafts before 2019 read nothing beside it
        members = part.get("allOf")
        part["allOf"] = [*(members if isinstance(members, list) else ()), {"$ref": part.pop("$ref")}]
    parts = known.parts.values()
    names: Schema = {name: {} for one in parts for name in _names(one)}
    patterns: Schema = {name: {} for one in parts for name in _of(one, "patternProperties")}
    for keyword, named in (("properties", names), ("patternProperties", patterns)):
        if named or keyword == "properties":
            part[keyword] = {**(own := _of(part, keyword)), **{n: {} for n in named if n not in own}}
    part["additionalProperties"] = False
