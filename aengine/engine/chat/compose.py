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

from collections.abc import Sequence

from ...errors import GrammarError, InvalidRequestError
from ..structured.parts import BLANKS, FreeText, Part, Regex, Repeat, Text, TextUpTo, any_of, seq
from ..structured.spec import GrammarSpec, composed_of
from .calls import Calls
from .formats import ReasoningFormat, TokenId, ToolFormat, in_vocabulary
from .syntax import harmony
from .tools import Tool, ToolChoice

_ORIGINS = {"json_schema": "the schema of the answer", "regex": "the regex of the answer"}
_FEW_BLANKS = Repeat(Regex(f"[{BLANKS}]{{1,4}}"), most=1)
"""Few, so that no model loops on them."""
_BLANKS = Repeat(Regex(f"[{BLANKS}]+"), most=1)


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
    """Return the grammar of a chat completion, or None where anything goes.

    ``parallel``: several calls in one answer; ``shape``: of an answer that calls nothing, as `spec_of` makes it;
    ``relax``: leave out keywords of the tools' schemas that can't be enforced.

    Raises:
        GrammarError: a tool's parameters can't be enforced, or are more than a grammar may be.
        InvalidRequestError: the shape can't stand beside reasoning or calls.
    """
    try:
        if not tools and shape is None:
            return None
        callable_tools = tool_choice.allowed(tools)
        if shape is not None and reasoning is None and not callable_tools and not tool_format.channels:
            return shape
        if shape is not None:
            _check_composable(shape, "tools" if callable_tools else "the reasoning of this model")
        tool_format, reasoning = in_vocabulary(tool_format, reasoning, token_id)
        calls = Calls(callable_tools, tool_format, parallel and tool_choice.mode != "named", relax)
        must_call = tool_choice.mode in ("required", "named")
        if tool_format.channels:
            return composed_of(
                harmony.messages(
                    tool_format.tokens,
                    calls=calls.one() if callable_tools else None,
                    shape=None if shape is None or must_call else shape.part(_ORIGINS.get(shape.kind, "the answer")),
                    must_call=must_call,
                    reasons=reasoning is not None,
                    begun=reasoning is not None and reasoning.begun,
                )
            )
        return composed_of(_Composer(calls, None if must_call else shape, must_call).all(reasoning))
    except (OverflowError, RecursionError, MemoryError) as error:
        raise GrammarError(
            f"the tools' parameters are too large or deep for a grammar ({type(error).__name__}): make them smaller",
            kind="too_complex",
        ) from None


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


class _Composer:
    """Composes the answer. ``begin``: how reasoning begins, where a text can't begin with that; else ""."""

    def __init__(self, calls: Calls, shape: GrammarSpec | None, must_call: bool) -> None:
        self.calls = calls
        self.may_call = bool(calls.tools)
        self.must_call = must_call
        self.shape = shape
        self.format = calls.format
        self.markers = calls.format.tokens
        named = self.format.names_trigger
        triggers = [trigger for trigger, _ in calls.after_triggers()] if named else self.format.triggers
        self.text_triggers = tuple(text for trigger in triggers if (text := self.markers.in_text(trigger)))

    def all(self, reasoning: ReasoningFormat | None) -> Part:
        if reasoning is None:
            return self.answer("")
        begin = reasoning.begin
        reasoned = seq(self.markers.text_up_to(reasoning.end), self.answer("", after_reasoning=True))
        if reasoning.begun:
            return reasoned
        return any_of(seq(self.markers.part(begin), reasoned), self.answer(self.markers.in_text(begin)))

    def answer(self, begin: str, *, after_reasoning: bool = False) -> Part:
        blanks = [_FEW_BLANKS] if after_reasoning else []
        if self.must_call:
            return seq(*blanks, self.calls.group())
        if self.shape is not None:
            shaped = self.shaped(self.shape, begin)
            if self.may_call:
                shaped = any_of(self.calls.group(beside_json=self.shape.kind == "json_schema"), shaped)
            return seq(*blanks, shaped)
        if self.format.text == "instead":
            return self.text_or_calls(begin, after_reasoning)
        return self.text_and_calls(begin) if self.may_call else self.text(begin)

    def shaped(self, shape: GrammarSpec, begin: str) -> Part:
        not_first = (*(self.text_triggers if self.may_call else ()), *_given(begin))
        return self.marked(shape.part(_ORIGINS.get(shape.kind, "the answer"), not_first))

    def text(self, begin: str) -> Part:
        """Return free text without the triggers, or nothing."""
        return self.marked(_maybe(FreeText(self.text_triggers, _given(begin))))

    def marked(self, text: Part) -> Part:
        """Return the text, or it between the control tokens that may stand around it."""
        known = [m for m in self.format.text_marks if all(self.markers.id_of(mark[0]) is not None for mark in m)]
        return any_of(text, *(seq(self.markers.part(first), text, self.markers.part(last)) for first, last in known))

    def text_or_calls(self, begin: str, after_blanks: bool) -> Part:
        text = _maybe(FreeText(not_first=(*self.text_triggers, *_given(begin)), after_blanks=after_blanks))
        options: list[Part] = [text]
        for trigger, rest in self.calls.after_triggers() if self.may_call else ():
            head = self.markers.part(trigger)
            if self.markers.id_of(trigger[0]) is None:
                head = Text(trigger, after_blanks)
            elif after_blanks:
                head = seq(_BLANKS, head)
            options.append(seq(head, rest))
        return any_of(*options)

    def text_and_calls(self, begin: str) -> Part:
        around = self.format.text == "around"
        single = around and not self.format.is_group
        first = [seq(self.head(trigger, begin), rest) for trigger, rest in self.calls.after_triggers(single)]
        if not around:
            return any_of(self.text(begin), *first)
        more: list[Part] = []
        if self.calls.parallel:
            later = [seq(self.head(trigger, ""), rest) for trigger, rest in self.calls.after_triggers(single)]
            more.append(Repeat(any_of(*later)))
        return any_of(self.text(begin), seq(any_of(*first), *more, self.text("")))

    def head(self, trigger: str, begin: str) -> Part:
        """Return any text up to and with the first trigger."""
        if self.markers.id_of(trigger[0]) is None:
            return TextUpTo(trigger, _given(begin))
        return seq(self.text(begin), self.markers.part(trigger))


def _maybe(part: Part) -> Part:
    return Repeat(part, most=1)


def _given(text: str) -> tuple[str, ...]:
    return (text,) if text else ()
