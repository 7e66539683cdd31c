"""`compose`: reasoning, then text, tool calls or an answer of a shape, as one grammar.

    start: reasoning? answer

    tool_choice   answer without a shape                    with one
    none          text that calls nothing                   the shape
    auto          text and calls, as the format has them    calls, or else the shape
    required      calls, at least one                       calls, at least one
    a name        one call of that tool                     one call of that tool
    of some       as auto or required, of these tools       likewise

Reasoning is there if the model has it. It is optional, unless the prompt began it. The shape is a JSON schema, a regex
or a choice of texts; a grammar can't be composed with anything, and neither can what is for another library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import GrammarError, InvalidRequestError
from ..structured.llguidance.json_schema import left_out_of
from ..structured.spec import GrammarSpec
from .calls import Calls
from .formats import Markers, ReasoningFormat, TokenId, ToolFormat
from .lark import (
    ANY,
    BLANK_CLASS,
    choice_lexeme,
    inline_schema,
    literal_regex,
    regex_lexeme,
    symbols,
    text_lexeme,
)
from .tools import Tool, ToolChoice

__all__ = ["blame", "compose", "left_out", "suspects"]


def compose(
    *,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    parallel: bool,
    tool_format: ToolFormat,
    reasoning: ReasoningFormat | None,
    shape: GrammarSpec | None,
    token_id: TokenId,
    relax: bool = False,
) -> GrammarSpec | None:
    """The grammar of a chat completion, or None where anything goes.

    ``parallel``: several calls in one answer; ``shape``: of an answer that calls nothing, as `spec_of` makes it;
    ``relax``: leave out keywords of the tools' schemas that can't be enforced.

    Raises:
        GrammarError: no text has the ``shape``.
        InvalidRequestError: it can't stand beside reasoning or calls.
    """
    if not tools and shape is None:
        return None
    callable_tools = tool_choice.allowed(tools)
    if shape is not None and reasoning is None and not callable_tools:
        return shape
    if shape is not None:
        _check_composable(shape, "tools" if callable_tools else "the reasoning of this model")
    markers = Markers.of(tool_format, reasoning, token_id)
    calls = Calls(callable_tools, tool_format, markers, parallel and tool_choice.mode != "named", relax)
    composer = _Composer(calls, tool_choice, tool_format, reasoning, markers, shape)
    is_relaxed = relax or (shape is not None and shape.relax)
    return GrammarSpec(kind="lark", text=composer.grammar(), relax=is_relaxed)


def blame(
    error: GrammarError,
    compile_spec: Callable[[GrammarSpec], object],
    *,
    tools: Sequence[Tool],
    shape: GrammarSpec | None,
    relax: bool = False,
) -> GrammarError:
    """Whose fault it is that a composed grammar was refused with ``error``: each part is compiled by itself.

    Blocking, so for the thread that compiles. Returns an error that names the tool, or the one given.
    """
    for owner, spec in suspects(tools=tools, shape=shape, relax=relax):
        try:
            compile_spec(spec)
        except GrammarError as found:
            return GrammarError(f"{owner}: {found}", kind=found.kind, path=found.path)
    return error


def suspects(*, tools: Sequence[Tool], shape: GrammarSpec | None, relax: bool = False) -> list[tuple[str, GrammarSpec]]:
    """The parts of a composed grammar, each with whose it is, to be compiled by itself when the whole is refused."""
    parts = [
        (
            f"the parameters of the tool {tool.name!r}",
            GrammarSpec(kind="json_schema", text=json.dumps(tool.argument_schema), relax=relax),
        )
        for tool in tools
    ]
    return parts if shape is None else [*parts, (_SHAPES.get(shape.kind, "the answer"), shape)]


def left_out(*, tools: Sequence[Tool], shape: GrammarSpec | None, relax: bool) -> tuple[str, ...]:
    """What of a relaxed grammar's schemas is not enforced, as far as its library does not say so itself."""
    warnings: list[str] = []
    for owner, spec in suspects(tools=tools, shape=shape, relax=relax):
        if spec.relax and spec.kind == "json_schema":
            warnings += (f"{owner}: {text}" for text in left_out_of(spec.text))
    return tuple(warnings)


_SHAPES = {"json_schema": "the schema of the answer", "regex": "the regex of the answer"}


def _check_composable(shape: GrammarSpec, beside: str) -> None:
    if shape.kind in ("lark", "ebnf"):
        wrong = "its grammar"
    elif shape.backend != "llguidance":
        wrong = f"backend={shape.backend!r}"
    else:
        return
    raise InvalidRequestError(
        f"structured_output can't be composed with {beside}: {wrong} stands for itself; "
        "give a json_schema, a regex or a choice, with the default backend",
        param="structured_output",
    )


def _schema_of(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if schema is False:
        raise GrammarError("the JSON schema is false, which no value fits", kind="unsatisfiable", path="$")
    return {} if schema is True else schema


class _Composer:
    """Writes the rules. ``first`` ones are for an answer with no reasoning before it, ``after`` ones for one with."""

    def __init__(
        self,
        calls: Calls,
        tool_choice: ToolChoice,
        tool_format: ToolFormat,
        reasoning: ReasoningFormat | None,
        markers: Markers,
        shape: GrammarSpec | None,
    ) -> None:
        self.calls = calls
        self.may_call = bool(calls.tools)
        self.must_call = tool_choice.mode in ("required", "named")
        self.shape = None if self.must_call else shape
        self.format = tool_format
        self.reasoning = reasoning
        self.markers = markers
        triggers = [markers.encode(trigger) for trigger in tool_format.triggers]
        self.text_triggers = [text for trigger in triggers if (text := markers.in_text(trigger))]
        self.rules: dict[str, str] = {}

    def grammar(self) -> str:
        self.rules["start"] = ""  # the first line
        if self.reasoning is None:
            self.rules["start"] = self.answer("first", "")
        else:
            begin, end = self.markers.encode(self.reasoning.begin), self.markers.encode(self.reasoning.end)
            thought = self.thought(end)
            after = self.answer("after", "")
            self.rules["after"] = after
            if self.reasoning.begun:
                self.rules["start"] = f"{thought} after"
            else:
                self.rules["first"] = self.answer("first", self.markers.in_text(begin))
                self.rules["start"] = f"{symbols(begin, self.markers)} {thought} after | first"
        return "".join(f"{name}: {body}\n" for name, body in (self.rules | self.calls.rules).items())

    def thought(self, end: str) -> str:
        if self.markers.id_of(end[0]) is not None:
            self.rules["THOUGHT"] = text_lexeme([text] if (text := self.markers.in_text(end)) else [])
            return f"THOUGHT? {symbols(end, self.markers)}"
        self.rules["thought[lazy]"] = f"/{ANY}{literal_regex(end)}/"
        return "thought"

    def answer(self, where: str, begin: str) -> str:
        """What an answer is; ``begin``: of reasoning, where text can't begin with it."""
        blanks = ""
        if where == "after" and (self.must_call or self.shape is not None):
            self.rules["BLANKS"] = f"/{BLANK_CLASS}{{1,4}}/"  # few, so that no model loops on them
            blanks = "BLANKS? "
        if self.must_call:
            return blanks + self.calls.group()
        if self.shape is not None:
            shaped = self.shaped(self.shape, where, begin)
            if not self.may_call:
                return blanks + shaped
            return f"{blanks}({self.calls.group(beside_json=self.shape.kind == 'json_schema')} | {shaped})"
        if self.format.text == "instead":
            return self.text_or_calls(where, begin)
        if not self.may_call:
            return self.text(where, begin) + "?"
        return self.text_and_calls(where, begin)

    def shaped(self, shape: GrammarSpec, where: str, begin: str) -> str:
        """An answer of the shape; the name of its rule or lexeme."""
        if shape.kind == "json_schema":
            schema = _schema_of(shape.text)
            self.rules["answer"] = inline_schema(schema, relax=shape.relax, whitespace=shape.whitespace)
            return "answer"
        name = f"ANSWER_{where.upper()}"
        not_first = [*(self.text_triggers if self.may_call else ()), *[begin] * bool(begin)]
        if shape.kind == "choice":
            self.rules[name] = choice_lexeme(json.loads(shape.text), not_first)
        else:
            self.rules[name] = regex_lexeme(shape.text, not_first)
        return name

    def text(self, where: str, begin: str) -> str:
        """Free text without the triggers; the name of its lexeme."""
        name = f"TEXT_{where.upper()}"
        self.rules[name] = text_lexeme(self.text_triggers, [begin] * bool(begin))
        return name

    def text_or_calls(self, where: str, begin: str) -> str:
        name = f"TEXT_{where.upper()}"
        blanks = where == "after"
        not_first = [*self.text_triggers, *[begin] * bool(begin)]
        self.rules[name] = text_lexeme([], not_first, after_blanks=blanks)
        if not self.may_call:
            return name + "?"
        options = [f"{name}?"]
        for trigger, rest in self.calls.after_triggers():
            if self.markers.id_of(trigger[0]) is not None:
                head = ("BLANK_RUN? " if blanks else "") + symbols(trigger, self.markers)
                self.rules |= {"BLANK_RUN": f"/{BLANK_CLASS}+/"} if blanks else {}
            else:
                head = f"/{BLANK_CLASS + '*' if blanks else ''}{literal_regex(trigger)}/"
            options.append(f"{head} {rest}")
        return " | ".join(options)

    def text_and_calls(self, where: str, begin: str) -> str:
        around = self.format.text == "around"
        first = [f"{self.head(trigger, where, begin)} {rest}" for trigger, rest in self.calls.after_triggers(around)]
        text = self.text(where, begin) + "?"
        if not around:
            return f"{text} | {' | '.join(first)}"
        tail = self.text("later", "") + "?"
        more = ""
        if self.calls.parallel:
            later = [f"{self.head(trigger, 'later', '')} {rest}" for trigger, rest in self.calls.after_triggers(True)]
            more = f"({' | '.join(later)})* "
        return f"{text} | ({' | '.join(first)}) {more}{tail}"

    def head(self, trigger: str, where: str, begin: str) -> str:
        """Any text up to and with the first trigger."""
        if self.markers.id_of(trigger[0]) is not None:
            return f"{self.text(where, begin)}? {symbols(trigger, self.markers)}"
        name = f"head_{where}"
        exclusion = f" & ~/{literal_regex(begin)}{ANY}/" if begin else ""
        self.rules[f"HEAD_{where.upper()}"] = f"/{ANY}{literal_regex(trigger)}/{exclusion}"
        self.rules[f"{name}[lazy]"] = f"HEAD_{where.upper()}"
        return name
