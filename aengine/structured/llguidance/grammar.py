"""A `GrammarSpec` as llguidance reads it."""

from __future__ import annotations

import json

import llguidance

from ..spec import GrammarSpec
from .json_schema import json_options, readable_text
from .lark import choice_lark, lark_of

__all__ = ["grammar_of"]


def grammar_of(spec: GrammarSpec) -> str:
    """Return the library's form. Raises GrammarError or ValueError; most faults are only found by its matcher."""
    if spec.kind == "json_schema":
        text, options = readable_text(spec.text, relax=spec.relax), json_options(spec.whitespace, relax=spec.relax)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return llguidance.LLMatcher.grammar_from_lark(choice_lark(json.loads(spec.text)))
    if spec.kind == "ebnf":
        return llguidance.grammar_from("ebnf", spec.text)
    if spec.root is not None:
        return llguidance.LLMatcher.grammar_from_lark(lark_of(spec.root))
    return llguidance.LLMatcher.grammar_from_lark(spec.text)
