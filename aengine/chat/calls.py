"""`Calls`: the rules for a group of tool calls, out of a `ToolFormat`.

Two ways to the same texts. As a rule, the format's strings are literals around the schemas of the arguments:

    "\\n{\\"name\\": \\"get_time\\", \\"arguments\\": " %json {...} "}\\n</tool_call>"

Where calls stand beside an answer that is JSON too, the lexer could not tell the two apart (see `aengine.chat.lark`).
There, a format whose calls are JSON becomes a JSON schema itself: a call is written out, read as JSON, and turned into
the schema of such values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import ID, Markers, ToolFormat
from .lark import inline_schema, symbols
from .tools import Tool

__all__ = ["Calls"]

_NAME = "the name"
_ARGUMENTS: dict[str, Any] = {"the arguments": 0}


class Calls:
    """What a group of calls of these tools looks like. `rules` are those that have been asked for."""

    def __init__(
        self, tools: Sequence[Tool], tool_format: ToolFormat, markers: Markers, parallel: bool, relax: bool
    ) -> None:
        self.tools = tools
        self.format = tool_format
        self.markers = markers
        self.parallel = parallel
        self.relax = relax
        self.rules: dict[str, str] = {}

    def group(self, *, beside_json: bool = False) -> str:
        """One group from its opening to its closing. ``beside_json``: a JSON value may stand in its place."""
        options: list[str] = []
        for index, opening in enumerate(self.format.openings):
            example = self._example(opening) if beside_json else None
            if example is None:
                trigger = self.markers.encode(self.format.triggers[index])
                options.append(f"{symbols(trigger, self.markers)} {self._after_trigger(index, single=False)}")
            else:
                options.append(self._as_schema(example, index))
        return f"({' | '.join(options)})"

    def after_triggers(self, single: bool = False) -> list[tuple[str, str]]:
        """For each trigger, encoded: what follows it, up to the closing. ``single``: one call, even if parallel."""
        triggers = [self.markers.encode(trigger) for trigger in self.format.triggers]
        return [(trigger, self._after_trigger(index, single=single)) for index, trigger in enumerate(triggers)]

    def _after_trigger(self, index: int, *, single: bool) -> str:
        known = self.format
        skipped = len(known.triggers[index])
        first = self._alternatives(f"first_{index}", known.openings[index], skipped)
        after = self._one_of(known.ends)
        more = ""
        if self.parallel and not single:
            next_call = self._alternatives("next", known.separator)
            more = f"({next_call} {after})*"
        return " ".join(filter(None, (first, after, more, self._symbols(known.closing))))

    def _alternatives(self, rule: str, before: str, skipped: int = 0) -> str:
        """One of the tools: its head, then its arguments. ``skipped``: characters of the head that came already."""
        options: list[str] = []
        for index, tool in enumerate(self.tools):
            self.rules[f"arguments_{index}"] = inline_schema(tool.argument_schema, relax=self.relax)
            heads = [(before + head)[skipped:] for head in self.format.heads(tool.name)]
            options.append(f"{self._one_of(heads)} arguments_{index}")
        self.rules[rule] = " | ".join(options)
        return rule

    def _one_of(self, texts: Sequence[str]) -> str:
        if len(texts) == 1:
            return self._symbols(texts[0])
        return f"({' | '.join(map(self._symbols, texts))})"

    def _symbols(self, text: str) -> str:
        before, with_id, after = text.partition(ID)
        parts = [symbols(self.markers.encode(part), self.markers) for part in (before, after)]
        if not with_id:
            return parts[0]
        self.rules["CALL_ID"] = f"/[A-Za-z0-9]{{{self.format.id_length}}}/"
        return " ".join(filter(None, (parts[0], "CALL_ID", parts[1])))

    def _example(self, opening: str) -> Any:
        """A group of one call as a JSON value, or None if it is none."""
        known = self.format
        text = opening + known.head(_NAME) + json.dumps(_ARGUMENTS) + known.after_arguments + known.closing
        try:
            return json.loads(text)
        except ValueError:
            return None

    def _as_schema(self, example: Any, index: int) -> str:
        arguments = {f"arguments_{i}": tool.argument_schema for i, tool in enumerate(self.tools)}
        definitions = {name: _moved(schema, f"#/$defs/{name}") for name, schema in arguments.items()}
        is_group = bool(self.format.openings[index] + self.format.closing)  # one value with all calls in an array
        schema = self._schema_of(example) if is_group else {"anyOf": self._each_tool(example)}
        rule = f"json_calls_{index}"
        self.rules[rule] = inline_schema({**schema, "$defs": definitions}, relax=self.relax)
        if is_group or not self.parallel:
            return rule
        return f"{rule} ({self._symbols(self.format.separator)} {rule})*"

    def _each_tool(self, call: Any) -> list[dict[str, Any]]:
        return [self._schema_of(call, i) for i in range(len(self.tools))]

    def _schema_of(self, value: Any, tool: int | None = None) -> dict[str, Any]:
        """The schema of values like ``value``: calls of the given tool, arrays with calls of any."""
        if value == _ARGUMENTS:
            return {"$ref": f"#/$defs/arguments_{tool}"}
        if isinstance(value, dict):
            members = {key: self._schema_of(member, tool) for key, member in value.items()}
            return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        if isinstance(value, list):
            limits = {"minItems": 1} if self.parallel else {"minItems": 1, "maxItems": 1}
            return {"type": "array", "items": {"anyOf": self._each_tool(value[0])}, **limits}
        return {"const": self.tools[tool].name if value == _NAME and tool is not None else value}


_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def _moved(schema: Any, to: str) -> Any:
    """The schema with its references to itself as they must be once it lies at ``to``. A name of its own would give
    them another meaning, so it loses that."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$id"), str):
        name = schema["$id"].rstrip("#")
        return _with_references({key: value for key, value in schema.items() if key != "$id"}, to, name)
    return _with_references(schema, to, "")


def _with_references(schema: Any, to: str, name: str) -> Any:
    if isinstance(schema, list):
        return [_with_references(item, to, name) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA_KEYWORDS:
            moved[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            moved[key] = {member: _with_references(part, to, name) for member, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.removeprefix(name)[:2] in ("", "#", "#/"):
            moved[key] = to + value.removeprefix(name)[1:]
        else:
            moved[key] = _with_references(value, to, name)
    return moved
