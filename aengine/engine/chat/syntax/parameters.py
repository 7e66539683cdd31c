"""`Parameters`: arguments as marked texts, a name and a value each, as Qwen3-Coder, GLM 4.5 and MiniMax write them.

    <parameter=  city  >\\n  Paris  \\n</parameter>\\n  <parameter=  days  >\\n  3  \\n</parameter>\\n
    └ before_key       └ after_key  └ after_value

A value that is a text by the schema is written as it is; any other is JSON. Where the schema allows both, what reads as
JSON of one of the other types is that. The order is that of the schema, as in JSON that a grammar holds to it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...structured.parts import BLANKS, Choice, Json, Part, Regex, Repeat, seq
from .arguments import ArgumentReader, ArgumentSyntax, PiecewiseReader, Progress, ToolSchema, closed_schema
from .literal_text import no_constant
from .markers import NO_MARKERS, Markers
from .scan import TOKENS, begins_with, held_back
from .schemas import Root, Value, text_patterns, type_of, values_of

_LONGEST_NAME = 64
_NAME = f"[A-Za-z0-9_.-]{{1,{_LONGEST_NAME}}}"
_BRACKETS = ("[", "{")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters(ArgumentSyntax):
    """Marks round each name and value. ``after_value`` may begin with a control token, and has none elsewhere."""

    before_key: str
    after_key: str
    after_value: str
    markers: Markers = NO_MARKERS

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.before_key, self.after_key, self.after_value

    def in_vocabulary(self, markers: Markers) -> Parameters:
        before_key, after_key, after_value = map(markers.encode, self.marks)
        return replace(self, before_key=before_key, after_key=after_key, after_value=after_value, markers=markers)

    def part(self, tool: ToolSchema, relax: bool) -> Part:
        values, is_open = values_of(closed_schema(tool), tool, relax)
        if is_open:
            head = seq(self.markers.part(self.before_key), Regex(_NAME), self.markers.part(self.after_key))
            return Repeat(seq(head, self.markers.text_up_to(self.after_value)))
        parts: list[Part] = []
        for value in values:
            head = self.markers.part(f"{self.before_key}{value.name}{self.after_key}")
            parameter = seq(head, self._value(value, tool, relax))
            parts.append(parameter if value.is_required else Repeat(parameter, most=1))
        return seq(*parts)

    def _value(self, value: Value, tool: ToolSchema, relax: bool) -> Part:
        end = self.markers.part(self.after_value)
        options = value.options()
        if options is not None:
            written = list(dict.fromkeys(name for option in options for name in _written(option)))
            value.root.spend(sum(map(len, written)) + len(written))
            texts = tuple(filter(None, written))
            choice = [Repeat(Choice(texts), least=int(len(texts) == len(written)), most=1)] if texts else []
            return seq(*choice, end)
        if "string" in value.types():
            return self.markers.text_up_to(self.after_value, text_patterns(value, relax))
        return seq(
            Json(value.text(), f"the parameter {value.name!r} of the tool {tool.name!r}", relax=relax, tool=tool.name),
            end,
        )

    def write(self, arguments: Mapping[str, Any]) -> str:
        texts = {name: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for name, v in arguments.items()}
        return "".join(f"{self.before_key}{k}{self.after_key}{v}{self.after_value}" for k, v in texts.items())

    def reader(self, tool: ToolSchema) -> ArgumentReader:
        values, _ = values_of(tool.parameters, tool, relax=True)
        # Each value is found by all spellings of its name.
        named = {spelling: value for value in values for spelling in self.markers.spellings(value.name)}
        return _Reader(self.before_key, self.after_key, self.after_value, named)


def _written(value: Any) -> list[str]:
    """Return how an option may be written. Templates print Python's names of true, false and null, or JSON's."""
    if isinstance(value, str):
        return [value]
    text = json.dumps(value, ensure_ascii=False)
    return [text, *(name for name, known in _PYTHON.items() if known == text)]


class _Reader(PiecewiseReader):
    def __init__(self, before_key: str, after_key: str, after_value: str, values: Mapping[str, Value]) -> None:
        self._before_key, self._after_key, self._after_value = before_key, after_key, after_value
        self._values = values
        self._seen: set[str] = set()
        self._value: Value | None = None  # the value being read
        self._pieces: list[str] | None = None  # pieces of a value that is decoded as a whole; None: a text is passed on

    @property
    def is_in_string(self) -> bool:
        return self._value is not None

    def _read_piece(self, text: str) -> tuple[int, str, Progress | None]:
        return self._key(text) if self._value is None else self._body(text)

    def _key(self, text: str) -> tuple[int, str, Progress | None]:
        blanks = len(text) - len(text.lstrip(BLANKS))
        begins = begins_with(text[blanks:], self._before_key)
        if begins is None or blanks == len(text):
            return blanks, "", Progress.MORE
        if not begins:
            return blanks, "}" if self._seen else "{}", Progress.WHOLE
        rest = text[blanks + len(self._before_key) :]
        name = next((known for known in self._values if rest.startswith(known + self._after_key)), None)
        if name is None:
            if any((known + self._after_key).startswith(rest) for known in self._values):
                return 0, "", Progress.MORE
            name, found, _ = rest.partition(self._after_key)
            if not found:
                is_name = len(name) - held_back(name, (self._after_key,)) <= _LONGEST_NAME
                return 0, "", Progress.MORE if is_name else Progress.BROKEN
        length, value = len(name), self._values.get(name)
        if value is None:
            if TOKENS.search(name) or length > _LONGEST_NAME:
                return 0, "", Progress.BROKEN
            value = Value(name, True, Root({}))
        name = value.name
        if name in self._seen:
            return 0, "", Progress.BROKEN
        begun = ", " if self._seen else "{"
        self._seen.add(name)
        self._value = value
        is_text = value.types() == {"string"}
        self._pieces = None if is_text else []
        written = f"{begun}{json.dumps(name, ensure_ascii=False)}: " + '"' * is_text
        return blanks + len(self._before_key) + length + len(self._after_key), written, None

    def _body(self, text: str) -> tuple[int, str, Progress | None]:
        assert self._value is not None
        body, end, _ = text.partition(self._after_value)
        if not end:
            body = body[: len(body) - held_back(body, (self._after_value,))]
        token = TOKENS.search(body)
        if token is not None:
            return token.start(), self._add(body[: token.start()]), Progress.BROKEN
        if not end:
            return len(body), self._add(body), Progress.MORE
        written = self._add(body)
        written += '"' if self._pieces is None else _as_json("".join(self._pieces), self._value)
        self._value = None
        return len(body) + len(end), written, None

    def _add(self, piece: str) -> str:
        if self._pieces is None:
            return json.dumps(piece, ensure_ascii=False)[1:-1]
        self._pieces.append(piece)
        return ""


def _as_json(text: str, value: Value) -> str:
    """Return the JSON of a value that may be no text. Lists may be written as Python shows them: templates do so."""
    types = value.types()
    may_be_text = "string" in types
    body = text if may_be_text else text.strip()
    body = _PYTHON.get(body, body)
    try:
        found = json.loads(body, parse_constant=no_constant)
        if type_of(found) in types - {"string"} or not may_be_text:
            return body
    except (ValueError, RecursionError):
        pass
    if body[:1] in _BRACKETS or not may_be_text:
        try:
            found = ast.literal_eval(body)
            if type_of(found) in types - {"string"} or not may_be_text:
                return json.dumps(found, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)
