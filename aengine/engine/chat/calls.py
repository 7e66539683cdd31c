"""`Calls`: the grammar of a group of tool calls, out of a `ToolFormat`.

As a rule, the format's strings are texts around the schemas of the arguments:

    "\\n{\\"name\\": \\"get_time\\", \\"arguments\\": "  Json({...})  "}\\n</tool_call>"

Where calls stand beside an answer that is JSON too, a lexer could not tell the two apart (see `structured.parts`).
There, a format whose calls are JSON becomes a JSON schema itself: a call is written out, read as JSON, and turned into
the schema of such values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..structured.parts import Json, Part, Regex, Repeat, any_of, seq
from ..structured.schema_walk import relocated
from .formats import ID, INDEX, INDEX_DIGITS, ToolFormat
from .syntax.arguments import JSON_OBJECT
from .tools import Tool

_NAME = "the name"
_ARGUMENTS: dict[str, Any] = {"the arguments": 0}


class Calls:
    """The calls of some tools, in a format as `in_vocabulary` makes it.

    ``relax``: leave out keywords of schemas that can't be enforced.

    Raises GrammarError for a tool's schema, if it is larger than any grammar's may be.
    """

    def __init__(self, tools: Sequence[Tool], tool_format: ToolFormat, parallel: bool, relax: bool) -> None:
        self.tools = tools
        self.format = tool_format
        self.parallel = parallel
        self._relax = relax
        self._arguments = [tool_format.arguments.part(tool, relax) for tool in tools]

    def group(self, *, beside_json: bool = False) -> Part:
        """Return one group, from its opening to its closing. ``beside_json``: a JSON value may stand in its place."""
        options: list[Part] = []
        for index in range(len(self.format.openings)):
            example = self._example(index) if beside_json else None
            if example is None:
                options.append(seq(self._text(self.format.trigger_of(index)), self._after_trigger(index)))
            else:
                options.append(self._as_json(example, index))
        return any_of(*options)

    def one(self) -> Part:
        """Return one call, from its head to the end of its arguments."""
        return self._one_of_the_tools("")

    def after_triggers(self, single: bool = False) -> list[tuple[str, Part]]:
        """Return each trigger, encoded, and what follows it to the closing. ``single``: one call, even if parallel."""
        known = self.format
        if not known.names_trigger:
            return [(known.trigger_of(i), self._after_trigger(i, single)) for i in range(len(known.openings))]
        found: list[tuple[str, Part]] = []
        for index, opening in enumerate(known.openings):
            for tool, arguments in zip(self.tools, self._arguments, strict=True):
                trigger = opening + known.head(tool.name)
                found.append((trigger, seq(arguments, *self._after_first(index, single))))
        return found

    def _after_trigger(self, index: int, single: bool = False) -> Part:
        known = self.format
        first = self._one_of_the_tools(known.openings[index], len(known.trigger_of(index)))
        return seq(first, *self._after_first(index, single))

    def _after_first(self, index: int, single: bool) -> list[Part]:
        """Return what follows the arguments of the first call of a group."""
        known = self.format
        end = any_of(*map(self._text, known.ends))
        parts = [end]
        if self.parallel and not single:
            parts.append(Repeat(seq(self._one_of_the_tools(known.separator), end)))
        return [*parts, self._text(known.closing_of(index))]

    def _one_of_the_tools(self, before: str, skipped: int = 0) -> Part:
        """Return a call up to the end of its arguments. ``skipped``: characters of its head that came already."""
        options: list[Part] = []
        for tool, arguments in zip(self.tools, self._arguments, strict=True):
            heads = [(before + head)[skipped:] for head in self.format.heads(tool.name)]
            options.append(seq(any_of(*map(self._text, heads)), arguments))
        return any_of(*options)

    def _text(self, text: str) -> Part:
        for sign, pattern in ((ID, f"[A-Za-z0-9]{{{self.format.id_length}}}"), (INDEX, f"[0-9]{{1,{INDEX_DIGITS}}}")):
            before, found, after = text.partition(sign)
            if found:
                return seq(self.format.tokens.part(before), Regex(pattern), self.format.tokens.part(after))
        return self.format.tokens.part(text)

    def _example(self, index: int) -> Any:
        """Return a group of one call as a JSON value, or None if it is none."""
        known, opening = self.format, self.format.openings[index]
        if known.arguments is not JSON_OBJECT:
            return None
        text = opening + known.head(_NAME) + json.dumps(_ARGUMENTS) + known.after_arguments + known.closing_of(index)
        try:
            return json.loads(text)
        except ValueError:
            return None

    def _as_json(self, example: Any, index: int) -> Part:
        own = tuple(arguments for arguments in self._arguments if isinstance(arguments, Json))
        definitions = {
            f"arguments_{i}": relocated(json.loads(arguments.schema), f"#/$defs/arguments_{i}")
            for i, arguments in enumerate(own)
        }
        is_group = bool(self.format.openings[index] + self.format.closing)  # one value with all calls in an array
        schema = self._schema_of(example) if is_group else {"anyOf": self._each_tool(example)}
        text = json.dumps({**schema, "$defs": definitions}, ensure_ascii=False, separators=(",", ":"))
        calls = Json(text, relax=self._relax, made_of=own)
        if is_group or not self.parallel:
            return calls
        return seq(calls, Repeat(seq(self._text(self.format.separator), calls)))

    def _each_tool(self, call: Any) -> list[dict[str, Any]]:
        return [self._schema_of(call, i) for i in range(len(self.tools))]

    def _schema_of(self, value: Any, tool: int | None = None) -> dict[str, Any]:
        """Return the schema of values like ``value``: calls of the given tool, arrays with calls of any."""
        if value == _ARGUMENTS:
            return {"$ref": f"#/$defs/arguments_{tool}"}
        if isinstance(value, dict):
            members = {key: self._schema_of(member, tool) for key, member in value.items()}
            return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
        if isinstance(value, list):
            limits = {"minItems": 1} if self.parallel else {"minItems": 1, "maxItems": 1}
            return {"type": "array", "items": {"anyOf": self._each_tool(value[0])}, **limits}
        return {"const": self.tools[tool].name if value == _NAME and tool is not None else value}
