"""What all answers have: ids, usage, finish reasons, log-probabilities."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request

from ...chat import Delta, ReasoningDelta, TextDelta
from ...outputs import Completion, FinishReason, Logprob, Token, Usage
from ..http import WrittenJSON, dumps

if TYPE_CHECKING:
    from ...engine.tokenizer_view import TokenizerView

TokenRow = tuple[int, float | None, Sequence[Logprob]]
"""A token's id, its logprob, and the likeliest alternatives at its place."""

MOST_EVENTS = 64
"""Events written at once: what waits for a slow reader is sent in pieces, so that the loop does not stand still."""
_MOST_TOKENS = 256
"""Tokens in the events written at once."""
_MOST_LOGPROBS = 2048
"""Log-probabilities in the events written at once. A chat's event has 65 at most."""
_LEAST = -9999.0
"""What a token that is impossible has, as in vLLM: JSON has no infinity."""
KNOWN_TOKENS = 4096
"""Tokens of which an answer's writer keeps how they are written."""

_CHOICE_VALUES = 8
"""About as many values a choice has as JSON, besides its tokens."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class AnswerId(NamedTuple):
    """Names of one request."""

    text: str
    """The answer's id: "chatcmpl-..."."""
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


def tokens_at_once(num_logprobs: int | None) -> int:
    """Return how many tokens should be written before what was written is sent; ``num_logprobs``: of each token."""
    return _MOST_TOKENS if num_logprobs is None else min(_MOST_TOKENS, _MOST_LOGPROBS // (1 + num_logprobs))


class EntryWriter:
    """Writes the entries of tokens in the logprobs of chat completions and of responses."""

    def __init__(self, tokenizer: TokenizerView) -> None:
        self._parts = lru_cache(KNOWN_TOKENS)(partial(_parts, tokenizer))

    def entry(self, row: TokenRow) -> WrittenJSON:
        token_id, logprob, others = row
        parts = self._parts
        top = ",".join([f"{parts(one)[0]}{json_number(value)}{parts(one)[1]}}}" for one, value in others])
        before, after = parts(token_id)
        return WrittenJSON(f'{before}{json_number(logprob)}{after},"top_logprobs":[{top}]}}')

    def entries(self, tokens: Iterable[Token]) -> str:
        """Return a JSON list of these tokens' entries."""
        return f"[{','.join([self.entry((one.token_id, one.logprob, one.top_logprobs)) for one in tokens])}]"


def rows_of(logprobs: Iterable[tuple[Logprob, ...]]) -> Iterable[TokenRow]:
    """Return the rows of a whole completion, whose entries begin with the token itself."""
    return ((row[0].token_id, row[0].logprob, row[1:]) for row in logprobs if row)


class PromptWriter:
    """Writes vLLM's ``prompt_logprobs``."""

    def __init__(self, tokenizer: TokenizerView) -> None:
        self._text = lru_cache(KNOWN_TOKENS)(lambda i: dumps(tokenizer.token_bytes(i).decode("utf-8", "replace")))

    def entries(self, logprobs: Iterable[tuple[Logprob, ...] | None], most: int) -> Iterator[WrittenJSON]:
        """Yield an entry a token, with ``most`` alternatives. The rank of one that is not among them is not known."""
        return (WrittenJSON("null" if row is None else self._entry(row[0], row[1 : 1 + most])) for row in logprobs)

    def _entry(self, own: Logprob, likeliest: tuple[Logprob, ...]) -> str:
        ranked: dict[Logprob, int | None] = {own: None}
        ranked |= {one: rank for rank, one in enumerate(likeliest, 1)}
        parts = [
            f'"{i}":{{"logprob":{json_number(value)},"rank":{dumps(rank)},"decoded_token":{self._text(i)}}}'
            for (i, value), rank in ranked.items()
        ]
        return f"{{{','.join(parts)}}}"


def num_values_of(*completions: Completion[Any]) -> int:
    """Return about how many values the answer has as JSON: choices, tokens, log-probabilities."""
    choices = [choice for completion in completions for choice in completion.choices]
    num_logprobs = sum(len(choice.logprobs) * len(choice.logprobs[0]) for choice in choices if choice.logprobs)
    for completion in completions:
        if completion.prompt_logprobs:
            each = len(completion.prompt_logprobs[-1] or ())
            num_logprobs += len(completion.choices) * len(completion.prompt_logprobs) * each
    return _CHOICE_VALUES * len(choices) + sum(len(choice.token_ids) // 16 for choice in choices) + 8 * num_logprobs


def _parts(tokenizer: TokenizerView, token_id: int) -> tuple[str, str]:
    """Return what stands before a token's log-probability in its entry, and after."""
    raw = tokenizer.token_bytes(token_id)
    return f'{{"token":{dumps(raw.decode("utf-8", "replace"))},"logprob":', f',"bytes":{dumps(list(raw))}'


def merged(deltas: list[Delta]) -> Iterator[Delta]:
    """Join texts that follow each other, unless their tokens are to be told apart."""
    for (kind, choice, has_tokens), group in groupby(deltas, lambda d: (type(d), d.choice, bool(d.tokens))):
        if has_tokens or kind not in (TextDelta, ReasoningDelta):
            yield from group
        else:
            yield kind("".join(delta.text for delta in group), choice=choice)  # type: ignore[union-attr]


def json_number(logprob: float | None) -> str:
    """Return a log-probability as JSON."""
    return "null" if logprob is None else repr(max(_LEAST, logprob))
