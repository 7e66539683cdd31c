"""Answers in gpt-oss' harmony format: messages on channels, after the prompt's ``<|start|>assistant``.

    <|channel|>analysis<|message|> reasoning <|end|><|start|>assistant          any number of times
    <|channel|>commentary<|message|> text before a call <|end|><|start|>assistant    likewise
    <|channel|>final<|message|> text <|return|>                                 then one of these two
    <|channel|>commentary to=functions.get_time <|constrain|>json<|message|> {...} <|call|>

``<|return|>`` and ``<|call|>`` are ends of sequence, so one answer has one call. A call may also be headed as the chat
template shows earlier ones: `` to=functions.get_time<|channel|>commentary json<|message|>``. The format is documented
in OpenAI's cookbook, "OpenAI Harmony Response Format".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...structured.parts import FreeText, Part, Repeat, any_of, seq

if TYPE_CHECKING:
    from .markers import Markers

ANALYSIS = "<|channel|>analysis<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
END = "<|end|><|start|>assistant"
MARKERS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>")

_HEADS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
)


def heads(tool_name: str) -> tuple[str, ...]:
    """Return what a call of the tool may begin with, up to its arguments."""
    return tuple(head.format(tool_name) for head in _HEADS)


def messages(
    markers: Markers, *, calls: Part | None, shape: Part | None, must_call: bool, reasons: bool, begun: bool
) -> Part:
    """Return the grammar of an answer.

    Args:
        calls: a call, from its head to the end of its arguments; None: there can be none.
        shape: of the final text; None: any text.
        must_call: there is no final text.
        reasons: analysis may come first. Text before a call may, where the final text has no shape.
        begun: the prompt ends within an analysis.
    """
    before = [_message(markers, ANALYSIS)] if reasons else []
    if calls is not None and shape is None and not must_call:
        before.append(_message(markers, PREAMBLE))
    final = seq(markers.part(markers.encode(FINAL)), shape if shape is not None else Repeat(FreeText(), most=1))
    answers = [final] * (not must_call) + ([calls] if calls is not None else [])
    first = [markers.text_up_to(markers.encode(END))] if begun else []
    return seq(*first, *([Repeat(any_of(*before))] if before else []), any_of(*answers))


def _message(markers: Markers, head: str) -> Part:
    return seq(markers.part(markers.encode(head)), markers.text_up_to(markers.encode(END)))
