"""What all answers have: ids, usage, finish reasons, log-probabilities."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request

from ...chat.messages import Delta, ReasoningDelta, TextDelta
from ...outputs import Completion, FinishReason, Logprob, Usage
from ..http import dumps

if TYPE_CHECKING:
    from ...engine.tokenizer_view import TokenizerView

__all__ = [
    "AnswerId",
    "TokenRow",
    "answer_id",
    "dumps",
    "finish_reason",
    "finite",
    "headers_of_id",
    "num_values_of",
    "rows_of",
    "token_entry",
    "usage_of",
]

TokenRow = tuple[int, float | None, Sequence[Logprob]]
"""A token's id, its logprob, and the likeliest alternatives at its place."""

MOST_EVENTS = 64
"""That are sent at once: a reader that is slow would be sent all at once, and the loop stand still meanwhile."""

_CHOICE_VALUES = 8
"""About as many values a choice has as JSON, besides its tokens."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class AnswerId(NamedTuple):
    """Names of one request."""

    text: str
    """In the answer: "chatcmpl-..."."""
    request_id: str
    """The engine's, and so that of its logs and of `AsyncLLM.abort`. Nobody else's: clients may give theirs twice."""
    headers: dict[str, str]
    fresh: str
    """Nobody else's, and not to be guessed."""


def answer_id(prefix: str, request: Request, given: str | None = None) -> AnswerId:
    """Name a request, after ``given`` or its header ``X-Request-Id`` if there is one. An error that follows has its
    header, too."""
    name = _answer_id(prefix, request, given)
    request.state.headers_of_id = name.headers
    return name


def headers_of_id(request: Request) -> dict[str, str]:
    """Return the header that names a request, also of one that has failed before it was named."""
    known: dict[str, str] | None = getattr(request.state, "headers_of_id", None)
    return answer_id("req", request).headers if known is None else known


def _answer_id(prefix: str, request: Request, given: str | None) -> AnswerId:
    fresh = uuid.uuid4().hex
    header = request.headers.get("x-request-id", "")
    name = given or (header if _REQUEST_ID.fullmatch(header) else None)
    if name is None:
        text = f"{prefix}-{fresh}"
        return AnswerId(text, text, {"x-request-id": text}, fresh)
    text = f"{prefix}-{name}"
    return AnswerId(text, f"{text}-{fresh[:12]}", {"x-request-id": name}, fresh)


def finish_reason(reason: FinishReason, *, is_forced: bool = False) -> str:
    """Return OpenAI's word, or "abort" for an answer that the server has ended, which an error follows.

    ``is_forced``: the request names the function to call; OpenAI's word for such a call is "stop".
    """
    if is_forced and reason is FinishReason.TOOL_CALLS:
        return "stop"
    return str(reason)


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def token_entry(tokenizer: TokenizerView, row: TokenRow) -> dict[str, Any]:
    """Return a token's entry in the logprobs of chat completions and of responses."""
    token_id, logprob, others = row
    return _entry(tokenizer, token_id, logprob) | {"top_logprobs": [_entry(tokenizer, *other) for other in others]}


def rows_of(logprobs: Iterable[tuple[Logprob, ...]]) -> Iterable[TokenRow]:
    """The rows of a whole completion, whose entries begin with the token itself."""
    return ((row[0].token_id, row[0].logprob, row[1:]) for row in logprobs if row)


def num_values_of(*completions: Completion[Any]) -> int:
    """Return about how many values the answer has as JSON: choices, tokens, log-probabilities."""
    choices = [choice for completion in completions for choice in completion.choices]
    num_rows = sum(len(row) for choice in choices for row in choice.logprobs or ())
    return _CHOICE_VALUES * len(choices) + sum(len(choice.token_ids) // 16 for choice in choices) + 8 * num_rows


def _entry(tokenizer: TokenizerView, token_id: int, logprob: float | None) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def merged(deltas: list[Delta]) -> Iterator[Delta]:
    """Join texts that follow each other, unless their tokens are to be told apart."""
    for (kind, choice, has_tokens), group in groupby(deltas, lambda d: (type(d), d.choice, bool(d.tokens))):
        if has_tokens or kind not in (TextDelta, ReasoningDelta):
            yield from group
        else:
            yield kind("".join(delta.text for delta in group), choice=choice)  # type: ignore[union-attr]


def finite(logprob: float | None) -> float | None:
    """Return what JSON can say: -9999.0, as vLLM, for a token that is impossible."""
    return None if logprob is None else max(logprob, -9999.0)
