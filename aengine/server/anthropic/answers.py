"""What an answer has, whole or as events: content blocks, why it ended, usage."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from ...chat import ChatCompletion, ChatMessage, Delta, ReasoningDelta, TextDelta, ToolCall, ToolCallStart
from ...limits.retention import SHORT
from ...outputs import FinishReason, Usage
from .requests import MessagesBody

SIGNATURE = "aengine"
"""Signature of thoughts. Clients send it back with them, and some leave out thoughts without one; nobody checks it."""


def blocks_of(deltas: Iterable[Delta], message: ChatMessage, *, shows_thinking: bool) -> list[dict[str, Any]]:
    """Return the content in the order in which it came, without text of nothing but white space.

    ``deltas``: all of the ``message``.
    """
    blocks: list[dict[str, Any]] = []
    for (kind, index), group in groupby(deltas, lambda delta: (type(delta), getattr(delta, "index", 0))):
        if kind is ToolCallStart:
            call = message.tool_calls[index]
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call)})
        elif kind in (TextDelta, ReasoningDelta):
            text = "".join(delta.text for delta in group)  # type: ignore[union-attr]
            if kind is ReasoningDelta:
                thinking = text if shows_thinking else ""
                blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
            elif text and not text.isspace():
                blocks.append({"type": "text", "text": text, "citations": None})
    return blocks


def _input_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments; of a call that was cut off those that have come."""
    if call.is_complete:
        return call.parsed_arguments()
    try:
        so_far = from_json(call.arguments, allow_partial=True)  # as Anthropic's client parses a stream that ends
    except ValueError:  # no arguments have come, or a model without a grammar wrote something else
        return {}
    return so_far if isinstance(so_far, dict) else {}


def ending_of(completion: ChatCompletion[Any], body: MessagesBody) -> dict[str, Any]:
    """Return why the answer ended."""
    stop = completion.choices[0].stop_reason
    match completion.finish_reason:
        case FinishReason.TOOL_CALLS:
            reason = "tool_use"
        case FinishReason.STOP:
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        case FinishReason.LENGTH if completion.usage.completion_tokens < body.max_tokens:
            reason = "model_context_window_exceeded"
        case _:
            reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}


def usage_of(usage: Usage, keep: float | None) -> dict[str, Any]:
    """Return the tokens: those of the prompt are the sum of the first three. ``keep``: seconds for which the KV of all
    of them is kept, so that those that were computed count as written to the cache."""
    computed = usage.prompt_tokens - usage.cached_tokens
    written = computed if keep is not None else 0
    is_short = keep is None or keep <= SHORT
    return {
        "input_tokens": computed - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written if is_short else 0,
            "ephemeral_1h_input_tokens": 0 if is_short else written,
        },
        "output_tokens": usage.completion_tokens,
    }
