"""`Literals`: arguments as keywords with literals: Python's, as LFM2, Llama 4 and Olmo 3 write them, or Gemma 4's own.

    city="Paris", days=[1, 2], at={"day": "mon"}          Python's; JSON's names and quotes too
    city:<|"|>Paris<|"|>,days:[1,2],at:{day:<|"|>mon<|"|>}     Gemma 4's: a control token quotes, nothing is escaped

The grammar follows the schema as far as it can be written part by part. What it can't be for, Python's kind writes as
JSON, which is held to the schema as a whole and is read likewise. The order is that of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import GrammarError
from ...structured.parts import (
    BLANKS,
    AnyOf,
    Choice,
    FreeText,
    Json,
    Part,
    Regex,
    Repeat,
    Seq,
    Text,
    any_of,
    seq,
)
from .arguments import ArgumentReader, ArgumentSyntax, PiecewiseReader, Progress, ToolSchema, closed_schema
from .literal_text import literal_of
from .markers import NO_MARKERS, Markers
from .scan import held_back
from .schemas import ANY_TYPE, Root, Value, count_of, required_of, string_patterns, values_of

_PYTHON_QUOTES = ("'", '"')
_HEX = "[0-9a-fA-F]"
_ESCAPED = (
    rf"\\(?:[^NUux]|x{_HEX}{{2}}|u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89aAbB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))"
)
"""One character; no half of a surrogate pair."""
_ANY_STRING = "|".join(f"{quote}(?:[^{quote}\\\\]|{_ESCAPED})*{quote}" for quote in _PYTHON_QUOTES)
_KEYWORD = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_TOKEN = "[\ud800-\udfff]"
_ESCAPE = "\\\\[^\ud800-\udfff]"
_LONGEST_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_.$-]+")
_ENDS = (",", ")", "}")
_ENDS_LITERALS = re.compile(f"<|{_TOKEN}")
"""No literal has them, outside of strings."""
_BARE_KEY = "[A-Za-z0-9_.$-]{1,64}"
_NAMES = {True: ("True", "true"), False: ("False", "false"), None: ("None", "null")}
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WHOLE_ONLY = (
    "allOf", "not", "if", "prefixItems", "contains", "uniqueItems", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef",
)  # fmt: skip
"""Keywords that say something of a value as a whole."""
_DEPTH = 8
_DEPTH_OF_ANY = 3
"""How deep lists and objects may be nested within a value of which the schema says nothing."""


class _OnlyAsWhole(Exception):
    """Raised for a schema whose grammar can't be written part by part; the message names the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals(ArgumentSyntax):
    """One way in which models write arguments as literals of a programming language."""

    assign: str = "="
    """Between a name and its value."""
    separator: str = ", "
    quote: str = ""
    """What begins and ends a string, in which nothing is escaped, and keys are bare; "": strings are as Python's."""
    markers: Markers = NO_MARKERS

    def in_vocabulary(self, markers: Markers) -> Literals:
        return replace(self, quote=markers.encode(self.quote), markers=markers)

    def part(self, tool: ToolSchema, relax: bool) -> Part:
        values, is_open = values_of(closed_schema(tool), tool, relax)
        writer = _Writer(self, tool, relax)
        if is_open:
            pair = seq(Regex(_KEYWORD), Text(self.assign), writer.any(_DEPTH_OF_ANY))
            return Repeat(seq(pair, Repeat(seq(Text(self.separator), pair))), most=1)
        pairs = [(seq(Text(value.name + self.assign), writer.argument(value)), value.is_required) for value in values]
        return writer.in_order(pairs)

    def write(self, arguments: Mapping[str, Any]) -> str:
        return self.separator.join(f"{name}{self.assign}{self.written(value)}" for name, value in arguments.items())

    def written(self, value: Any) -> str:
        """Return one value as the model would write it."""
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}" if self.quote else json.dumps(value, ensure_ascii=False)
        if value is None or isinstance(value, bool):
            return _NAMES[value][bool(self.quote)]
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.written, value))}]"
        if isinstance(value, dict):
            members = (f"{self.key(key)}{self.written(member)}" for key, member in value.items())
            return f"{{{self.separator.join(members)}}}"
        return json.dumps(value)

    def key(self, name: str) -> str:
        """Return the name of an object's member, up to its value."""
        return f"{name}:" if self.quote else f"{json.dumps(name, ensure_ascii=False)}: "

    def reader(self, tool: ToolSchema) -> ArgumentReader:
        values, _ = values_of(tool.parameters, tool, relax=True)
        quotes = (self.quote,) if self.quote else _PYTHON_QUOTES
        return _Reader(self.assign, quotes, tuple(value.name for value in values))


class _Writer:
    """Writes the grammar of one tool's arguments."""

    def __init__(self, syntax: Literals, tool: ToolSchema, relax: bool) -> None:
        self._syntax, self._tool, self._relax = syntax, tool, relax
        self._separator = Text(syntax.separator)
        self._parts: dict[int, tuple[object, Part]] = {}  # (schema, part) by id of a schema, to which many may refer

    def argument(self, value: Value) -> Part:
        """Return the grammar of a value.

        Raises GrammarError for a schema that can't be enforced.
        """
        try:
            return self._value(value, 0)
        except _OnlyAsWhole as error:
            if not self._syntax.quote:
                return self._json(value, value.text())
            if self._relax:
                return self.any(_DEPTH_OF_ANY)
            raise GrammarError(
                f"the parameter {value.name!r} of the tool {self._tool.name!r}: {error} can't be enforced in the way "
                "this model writes arguments; use on_unsupported='relax', or strict=False for this tool",
                kind="unsupported",
                tool=self._tool.name,
                path=f"$.properties.{value.name}",
            ) from None

    def in_order(self, pairs: Sequence[tuple[Part, bool]]) -> Part:
        """Return the pairs in order with separators between; those that are not required may be missing.

        Pairs after one that must come are a flat sequence. What may follow one before is a shared rule for each place.
        Both ways the grammar grows linearly.
        """
        num_first = next((i + 1 for i, (_, is_required) in enumerate(pairs) if is_required), len(pairs))
        rest = seq(*(self._after_another(*pair) for pair in pairs[num_first:]))
        firsts: list[Part] = [] if any(is_required for _, is_required in pairs) else [Seq(())]
        for pair, is_required in reversed(pairs[:num_first]):
            firsts.append(seq(pair, rest))
            rest = AnyOf((seq(self._after_another(pair, is_required), rest),))
        return any_of(*reversed(firsts))

    def _after_another(self, pair: Part, is_required: bool) -> Part:
        more = seq(self._separator, pair)
        return more if is_required else Repeat(more, most=1)

    def any(self, depth: int) -> Part:
        """Return any value, with so many levels of lists and objects."""
        numbers = self._json(Value("", {}, Root({})), '{"type": "number"}')
        options = [self._string(()), numbers, *(Choice(names) for names in _NAMES.values())]
        if depth:
            options += [self._list(self.any(depth - 1), 0, None), self._map(self.any(depth - 1))]
        return any_of(*options)

    def _value(self, value: Value, depth: int) -> Part:
        schema = value.resolved()
        if depth > _DEPTH or (isinstance(schema, dict) and "$ref" in schema):
            raise _OnlyAsWhole("a schema that refers to itself, or to what can't be found,")
        if not isinstance(schema, dict) or not schema:
            return self.any(_DEPTH_OF_ANY)
        if id(schema) not in self._parts:
            self._parts[id(schema)] = schema, AnyOf((self._value_of(value, schema, depth),))  # a rule of its own
        return self._parts[id(schema)][1]

    def _value_of(self, value: Value, schema: Mapping[str, Any], depth: int) -> Part:
        options = value.options()
        if options is not None:
            return any_of(*map(self._option, options))
        wrong = next((keyword for keyword in _WHOLE_ONLY if keyword in schema), None)
        if wrong is not None:
            raise _OnlyAsWhole(repr(wrong))
        members = value.alternatives()
        if members[0].schema is not schema:
            strings = [member for member in members if "string" in member.types()]
            if len(strings) > 1:  # two kinds of strings can't be told apart while they come
                members = [member for member in members if member not in strings] + [value.within({"type": "string"})]
            return any_of(*(self._value(member, depth + 1) for member in members))
        types = value.types()
        if types == ANY_TYPE:
            return self.any(_DEPTH_OF_ANY)
        return any_of(*(self._of_type(name, value, schema, depth) for name in sorted(types)))

    def _of_type(self, name: str, value: Value, schema: Mapping[str, Any], depth: int) -> Part:
        if name == "string":
            return self._string(string_patterns(schema, self._relax))
        if name == "number":
            given = schema.get("type")
            is_whole = given == "integer" or (isinstance(given, list) and "number" not in given)
            limits = {key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}
            return self._json(value, json.dumps({"type": "integer" if is_whole else "number", **limits}))
        if name == "array":
            items = schema.get("items", {})
            item = self._value(value.within(items), depth + 1)
            return self._list(item, count_of(schema, "minItems") or 0, count_of(schema, "maxItems"))
        if name == "object":
            return self._object(value, schema, depth)
        return any_of(*map(self._option, (True, False) if name == "boolean" else (None,)))

    def _object(self, value: Value, schema: Mapping[str, Any], depth: int) -> Part:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            others = schema.get("additionalProperties", {})
            if others is False:
                return Text("{}")
            unknown = not isinstance(others, dict) or not others
            return self._map(self.any(_DEPTH_OF_ANY) if unknown else self._value(value.within(others), depth + 1))
        required = required_of(schema)
        pairs = [
            (seq(self._key(name), self._value(value.within(member), depth + 1)), name in required)
            for name, member in properties.items()
        ]
        return seq(Text("{"), self.in_order(pairs), Text("}"))

    def _key(self, name: str) -> Part:
        if self._syntax.quote:
            return Text(self._syntax.key(name))
        return seq(Choice(tuple(dict.fromkeys((json.dumps(name, ensure_ascii=False), repr(name))))), Text(": "))

    def _map(self, member: Part) -> Part:
        key = seq(Regex(_BARE_KEY), Text(":")) if self._syntax.quote else seq(Regex(_ANY_STRING), Text(": "))
        pair = seq(key, member)
        return seq(Text("{"), Repeat(seq(pair, Repeat(seq(self._separator, pair))), most=1), Text("}"))

    def _list(self, item: Part, least: int, most: int | None) -> Part:
        if most == 0:
            return Text("[]")
        more = Repeat(seq(self._separator, item), max(least - 1, 0), None if most is None else most - 1)
        return seq(Text("["), Repeat(seq(item, more), int(least > 0), 1), Text("]"))

    def _option(self, option: Any) -> Part:
        if option is None or isinstance(option, bool):
            return Choice(_NAMES[option])
        if self._syntax.quote or not isinstance(option, str):
            return self._syntax.markers.part(self._syntax.written(option))
        quoted = [json.dumps(option, ensure_ascii=False)]
        if "'" not in option and "\\" not in option:
            quoted.append(f"'{option}'")
        return Choice(tuple(quoted))

    def _string(self, patterns: tuple[str, ...]) -> Part:
        if self._syntax.quote:
            quote, markers = self._syntax.quote, self._syntax.markers
            return seq(markers.part(quote), markers.text_up_to(quote, patterns))
        if not patterns:
            return Regex(_ANY_STRING)
        # A string that must match a pattern is written without escapes: no grammar could undo them.
        return any_of(*(self._quoted(quote, patterns) for quote in _PYTHON_QUOTES))

    def _quoted(self, quote: str, patterns: tuple[str, ...]) -> Part:
        return seq(Text(quote), FreeText(without=(quote, "\\"), matching=patterns), Text(quote))

    def _json(self, value: Value, schema: str) -> Json:
        about = f"the parameter {value.name!r}" if value.name else "a parameter"
        return Json(schema, f"{about} of the tool {self._tool.name!r}", relax=self._relax, tool=self._tool.name)


@dataclass(slots=True)
class _Reader(PiecewiseReader):
    """Collects a keyword's literal up to the comma or the bracket after it, and gives it as JSON then."""

    assign: str
    quotes: tuple[str, ...]
    names: tuple[str, ...]
    """The tool's parameters, which may have any letters."""
    _name: str | None = field(default=None, init=False)  # name of the argument whose literal is being read
    _inside: str = field(default="", init=False)  # quote of the string being read; "": none
    _depth: int = field(default=0, init=False)  # number of open brackets
    _pieces: list[str] = field(default_factory=list, init=False)  # pieces of the literal being read
    _seen: set[str] = field(default_factory=set, init=False)
    _is_broken: bool = field(default=False, init=False)  # an argument can't be read: the others are only read over

    @property
    def is_in_string(self) -> bool:
        return bool(self._inside)

    def _read_piece(self, text: str) -> tuple[int, str, Progress | None]:
        return self._keyword(text) if self._name is None else self._literal(text)

    def _keyword(self, text: str) -> tuple[int, str, Progress | None]:
        blanks = len(text) - len(text.lstrip(BLANKS))
        rest = text[blanks:]
        places = range(blanks + 1)  # names may begin with blanks, too
        known = [(at, name) for at in places for name in self.names if text.startswith(name + self.assign, at)]
        if known:
            place, name = max(known, key=lambda found: len(found[1]))
        else:
            if not rest or any((name + self.assign).startswith(text[at:]) for at in places for name in self.names):
                return 0, "", Progress.MORE
            if rest[0] in ")}":  # a comma may stand before it
                return blanks, "}" if self._seen else "{}", Progress.BROKEN if self._is_broken else Progress.WHOLE
            if rest[0] == "]" or _ENDS_LITERALS.match(rest):
                return blanks, "", Progress.BROKEN
            found = _NAME.match(rest)
            gap = (
                len(rest) - len(rest[found.end() :].lstrip(BLANKS)) if found else 0
            )  # blanks before the sign are not counted
            if found and gap <= _LONGEST_NAME and self.assign.startswith(rest[gap:]):
                return 0, "", Progress.MORE
            if found is None or gap > _LONGEST_NAME or not rest.startswith(self.assign, gap):
                return self._read_over()
            place, name = blanks + gap - found.end(), found[0]
        if name in self._seen:
            return self._read_over()
        self._name = name
        return place + len(name) + len(self.assign), "", None

    def _read_over(self) -> tuple[int, str, Progress | None]:
        """Take no argument up to the next comma, and none from there on."""
        self._is_broken, self._name = True, ""
        return 0, "", None

    def _literal(self, text: str) -> tuple[int, str, Progress | None]:
        place = 0
        while True:
            found = self._sign().search(text, place)
            if found is None:
                stop = len(text) - held_back(text[place:], self._held())
                self._pieces.append(text[:stop])
                return stop, "", Progress.MORE
            sign, start, place = found[0], found.start(), found.end()
            if sign == "<" and any(quote.startswith(text[start:]) for quote in self.quotes):
                self._pieces.append(text[:start])
                return start, "", Progress.MORE
            is_mark = sign not in self.quotes and _ENDS_LITERALS.match(sign) is not None
            if is_mark or (sign == "]" and not self._inside and not self._depth):
                self._pieces.append(text[:start])
                return start, "", Progress.BROKEN
            if not self._inside and not self._depth and sign in _ENDS:
                self._pieces.append(text[:start])
                written = self._written()
                if sign == ",":
                    return place, written, None
                return (start, "", Progress.BROKEN) if self._is_broken else (start, written + "}", Progress.WHOLE)
            if sign in self.quotes:
                self._inside = "" if self._inside else sign
            elif not self._inside:
                self._depth += 1 if sign in "([{" else -1 if sign in ")]}" else 0

    def _sign(self) -> re.Pattern[str]:
        """Return the pattern of what matters next: ends of strings, or their beginnings, brackets and commas."""
        if not self._inside:
            return _signs_outside(self.quotes)
        if self.quotes == _PYTHON_QUOTES:
            return re.compile(f"{_ESCAPE}|{re.escape(self._inside)}|{_TOKEN}")
        return re.compile(f"{re.escape(self._inside)}|{_TOKEN}")

    def _held(self) -> tuple[str, ...]:
        """Return the strings whose first letters must wait for more."""
        return (*self.quotes, "\\\\") if self._inside else self.quotes

    def _written(self) -> str:
        """Return the argument that has ended, as JSON; "" if it, or one before, is none."""
        text, name, self._name = "".join(self._pieces), self._name, None
        assert name is not None
        self._pieces.clear()
        try:
            value = json.dumps(literal_of(text, self.quotes), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            self._is_broken = True
        if self._is_broken:
            return ""
        begun = ", " if self._seen else "{"
        self._seen.add(name)
        return f"{begun}{json.dumps(name, ensure_ascii=False)}: {value}"


def _signs_outside(quotes: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, quotes), r"[()\[\]{},<]", _TOKEN]))
