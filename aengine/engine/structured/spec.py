"""`GrammarSpec`: what is to be compiled, as plain values; equal specs are the same grammar.

A spec is hashable: a cache key. It is one text, or `parts` that are composed. A JSON schema is in it
as canonical JSON text: no blanks, and keys in the order given, because a library makes the model write an object's
properties in the order of ``properties``; its objects are closed (`closed_objects`) unless they are to be open.

Whatever a caller passes as a schema comes through `plain_json`, which goes so deep and no further, so that a schema
that is nested a million deep, refers to itself, or is huge through shared parts, costs a bounded time and an error.
"""

from __future__ import annotations

import functools
import json
import marshal
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import GrammarError
from ...limits.checks import size_of
from ...limits.values import is_unicode
from ...params import StructuredOutput
from ..threads.yield_gil import yield_gil
from .closed_objects import close_objects
from .parts import Choice, Json, Part, Regex, leaves
from .schema_walk import json_path

Kind = Literal["json_schema", "regex", "choice", "lark", "ebnf", "composed"]

MAX_JSON_BYTES = 1 << 20
"""Size of a schema or a list of choices: a compile takes longer with its length, and can't be stopped."""
MAX_PATTERN_BYTES = 64 << 10
"""Size of a regex or a grammar: written by hand, so far smaller; automata grow faster than their pattern."""
MAX_DEPTH = 124
"""Levels of lists and objects in a schema. llguidance reads no more, and readers that recurse must be safe."""
MAX_NUMBER_BITS = 4096
"""Bits of an integer. Python refuses to write one of more than 4300 digits, and no grammar needs one."""

_YIELD_EVERY = 64
"""Members of a schema, walked in 0.06 ms, after which other threads get their turn. A step takes several turns."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_EBNF_RULE = re.compile(r"^[ \t]*+[\w.<>-]++[ \t]*+::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^[ \t]*+(?:[!?]*+start\b[^:\n]*+:(?!:?=)|%[a-z])", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One grammar to compile. Made by `spec_of`, which checks it, or `composed_of`."""

    kind: Kind
    text: str
    """Canonical JSON of the schema | the pattern | JSON list of the options | the grammar | empty, if composed."""
    whitespace: Literal["compact", "any"] = "compact"
    relax: bool = False
    """Keywords that the backend can't enforce are left out, with a warning, instead of refused."""
    backend: str = "llguidance"
    root: Part | None = None
    """What a composed grammar consists of; llguidance alone compiles those."""

    def part(self, origin: str = "", not_first: tuple[str, ...] = ()) -> Part:
        """Return the schema, regex or choice as a part of a larger grammar; ``not_first``: how a text may not begin.

        Raises ValueError for a grammar, which stands for itself."""
        if self.kind == "json_schema":
            return Json(self.text, origin, self.whitespace, self.relax)
        if self.kind == "regex":
            return Regex(self.text, origin, not_first)
        if self.kind == "choice":
            return Choice(tuple(json.loads(self.text)), origin, not_first)
        raise ValueError(f"a spec of kind {self.kind!r} is no part of another")


def composed_of(root: Part) -> GrammarSpec:
    """Return the spec of a composed grammar; of a single part with nothing around it, if it is that."""
    return spec_of_part(root) or GrammarSpec("composed", "", root=root)


def spec_of_part(part: Part) -> GrammarSpec | None:
    """Return the grammar that a schema, a regex or a choice is by itself; None for other parts."""
    if isinstance(part, Json):
        return GrammarSpec("json_schema", part.schema, part.whitespace, part.relax)
    if isinstance(part, Regex) and not part.not_first:
        return GrammarSpec("regex", part.pattern)
    if isinstance(part, Choice) and not part.not_first:
        return GrammarSpec("choice", json.dumps(part.options, ensure_ascii=False, separators=(",", ":")))
    return None


def specs_by_origin(root: Part) -> Iterator[tuple[Json | Regex | Choice, GrammarSpec]]:
    """Yield the schemas, regexes and choices of a composed grammar that name their origin, and each by itself."""
    for leaf in leaves(root):
        if isinstance(leaf, Json) and leaf.made_of:
            yield from ((part, spec) for part in leaf.made_of if (spec := spec_of_part(part)))
        elif isinstance(leaf, Json | Regex | Choice) and leaf.origin:
            spec = spec_of_part(replace(leaf, not_first=()) if isinstance(leaf, Regex | Choice) else leaf)
            if spec is not None:
                yield leaf, spec


def spec_of(wanted: StructuredOutput) -> GrammarSpec:
    """Convert ``wanted``, checked as far as it can be without a grammar library. Raises GrammarError."""
    kind, text = _kind_and_text(wanted)
    return GrammarSpec(
        kind=kind,
        text=text,
        whitespace=wanted.whitespace,
        relax=wanted.on_unsupported == "relax",
        backend="llguidance" if wanted.backend == "auto" else wanted.backend,
    )


def _kind_and_text(wanted: StructuredOutput) -> tuple[Kind, str]:
    if wanted.json_schema is not None:
        return "json_schema", _schema_text(wanted.json_schema, wanted.open_objects)
    if wanted.regex is not None:
        pattern = _pattern(wanted.regex, "regex")
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # the library would read beyond a lone backslash, or drop it
            raise GrammarError("the regex can't be used: it ends with a lone backslash", kind="invalid")
        return "regex", pattern
    if wanted.choice is not None:
        return "choice", _choice_text(wanted.choice)
    if wanted.grammar is not None:
        text = _pattern(wanted.grammar, "grammar")
        return _notation(text), text
    return "json_schema", '{"type":"object"}'


def _schema_text(schema: Mapping[str, Any] | str | bool, is_open: bool) -> str:
    """Return the canonical text, with closed objects unless ``is_open``. The same schema comes with many requests: it
    is checked, closed and written once."""
    try:
        # Version 4 writes a part that is used often once, so a small schema has a small image. Which parts those are
        # may differ between equal schemas; then one is checked again.
        image = marshal.dumps(schema, 4)  # type: ignore[arg-type]
    except ValueError:  # no plain data, or nested too deeply
        return _checked_text(schema, is_open)
    if len(image) <= _SMALL_IMAGE:
        return _text_of_small_image(image, is_open)
    return _text_of_image(image, is_open) if len(image) <= MAX_JSON_BYTES else _checked_text(schema, is_open)


def _checked_text_of_image(image: bytes, is_open: bool) -> str:
    return _checked_text(marshal.loads(image), is_open)


_SMALL_IMAGE = 1 << 14  # bytes of a schema that is cached
# Tools and answers of many kinds come in turn, each with a schema of its own: some MB for all of them.
_text_of_small_image = functools.lru_cache(maxsize=512)(_checked_text_of_image)
_text_of_image = functools.lru_cache(maxsize=16)(_checked_text_of_image)


def _checked_text(schema: Mapping[str, Any] | str | bool, is_open: bool) -> str:
    value = plain_json(_read_json(schema) if isinstance(schema, str) else schema)
    if not isinstance(value, dict | bool):
        raise GrammarError(f"a JSON schema is an object, true or false, not {value!r:.60}", kind="invalid", path="$")
    if not is_open:
        close_objects(value)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_JSON_BYTES:
        raise _too_large("the JSON schema", MAX_JSON_BYTES)
    return text


def num_levels(text: str) -> int:
    """Return how deep the brackets of a JSON text are nested, counted up to the first level beyond `MAX_DEPTH`."""
    depth = most = 0
    for bracket in _BRACKETS.finditer(text):
        first = text[bracket.start()]
        depth += (first in "[{") - (first in "]}")
        most = max(most, depth)
        if most > MAX_DEPTH:
            break
    return most


def _read_json(text: str) -> object:
    if len(text) > MAX_JSON_BYTES:
        raise _too_large("the JSON schema", MAX_JSON_BYTES)
    if num_levels(text) > MAX_DEPTH:
        raise _too_deep("")
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}", kind="invalid") from None


def _choice_text(choice: Sequence[str]) -> str:
    seen: set[str] = set()
    for index, option in enumerate(choice):
        path = f"$[{index}]"
        if not option:
            raise GrammarError(f"{path}: an option of choice is the empty string", kind="invalid", path=path)
        if not is_unicode(option):
            raise GrammarError(f"{path}: an option of choice has a lone surrogate", kind="invalid", path=path)
        if option in seen:
            raise GrammarError(f"{path}: choice has {option[:80]!r} twice", kind="invalid", path=path)
        seen.add(option)
    text = json.dumps([str(option) for option in choice], ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_JSON_BYTES:
        raise _too_large("choice", MAX_JSON_BYTES)
    return text


def _pattern(text: str, name: str) -> str:
    if not is_unicode(text):
        raise GrammarError(f"{name} has a lone surrogate: it can't be written as UTF-8", kind="invalid")
    if len(text.encode()) > MAX_PATTERN_BYTES:
        raise _too_large(name, MAX_PATTERN_BYTES)
    return text


def _notation(grammar: str) -> Literal["lark", "ebnf"]:
    """Return the notation by the first line that is a rule of either."""
    ebnf, lark = _EBNF_RULE.search(grammar), _LARK_RULE.search(grammar)
    if lark is not None and (ebnf is None or lark.start() < ebnf.start()):
        return "lark"
    if ebnf is not None:
        return "ebnf"
    raise GrammarError(
        'grammar is in no known notation: Lark has a rule named start, as in \'start: "yes" | "no"\', '
        'and EBNF (GBNF) a rule named root, as in \'root ::= "yes" | "no"\'',
        kind="invalid",
    )


def check_schema_size(schema: object) -> None:
    """Raise GrammarError for a JSON schema that is too large, without a look at what is in it."""
    if size_of(schema, MAX_JSON_BYTES) > MAX_JSON_BYTES:
        raise _too_large("the JSON schema", MAX_JSON_BYTES)


def plain_json(source: object) -> Any:
    """Return a copy of ``source`` in dicts, lists, strings, numbers, booleans and None.

    Raises GrammarError: kind "invalid" with the path of what JSON can't say, "too_complex" for too deep or too large.
    """
    return _Copying().copy_of(source)


class _Copying:
    """A copy in the making, where it is now: it goes `MAX_DEPTH` levels down, and no further."""

    def __init__(self) -> None:
        self._path: list[str | int] = []  # key of the member that is copied, at each level
        self._inside: list[int] = []  # ids of the lists and objects that it is in
        self._size = self._num_members = 0

    def copy_of(self, source: object) -> Any:
        if not isinstance(source, Mapping | list | tuple):
            return self._scalar(source)
        if id(source) in self._inside:
            raise self._invalid("refers to an object that it is a part of")
        if len(self._inside) >= MAX_DEPTH:
            raise _too_deep(json_path(self._path))
        self._inside.append(id(source))
        copy: Any
        if isinstance(source, Mapping):
            copy = {}
            for key, value in source.items():
                name = self._name(key)
                self._enter(name, len(name) + 4, value)
                copy[name] = self.copy_of(value)
                self._path.pop()
        else:
            copy = []
            for index, value in enumerate(source):
                self._enter(index, 1, value)
                copy.append(self.copy_of(value))
                self._path.pop()
        self._inside.pop()
        return copy

    def _name(self, key: object) -> str:
        if not isinstance(key, str):
            raise self._invalid(f"has the key {key!r:.80}; keys of JSON objects are strings")
        if not is_unicode(key):
            self._path.append(key)
            raise self._invalid("has a lone surrogate in its name: it can't be written as UTF-8")
        return str.__str__(key)

    def _enter(self, key: str | int, num_letters: int, value: object) -> None:
        """Go on to a member. ``num_letters``: the fewest that it adds besides its value, a comma and its key."""
        self._path.append(key)
        self._num_members += 1
        if self._num_members % _YIELD_EVERY == 0:
            yield_gil()
        self._size += num_letters + (len(value) if isinstance(value, str) else 1)
        if self._size > MAX_JSON_BYTES:
            raise _too_large("the JSON schema", MAX_JSON_BYTES)

    def _scalar(self, value: object) -> object:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if not is_unicode(value):
                raise self._invalid("has a lone surrogate: it can't be written as UTF-8")
            return str.__str__(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_NUMBER_BITS:
                raise self._invalid(f"is an integer of more than {MAX_NUMBER_BITS} bits")
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise self._invalid(f"is {value}, which JSON does not have")
            return float(value)
        raise self._invalid(f"is of type {type(value).__name__}, which JSON does not have")

    def _invalid(self, fault: str) -> GrammarError:
        path = json_path(self._path)
        return GrammarError(f"the JSON schema is not JSON: {path} {fault}", kind="invalid", path=path)


def _too_deep(path: str) -> GrammarError:
    return GrammarError(
        f"the JSON schema is nested deeper than {MAX_DEPTH} levels: move parts of it to $defs and use $ref",
        kind="too_complex",
        path=path,
    )


def _too_large(what: str, limit: int) -> GrammarError:
    return GrammarError(f"{what} is larger than {limit >> 10} KiB, the most that can be used", kind="too_complex")
