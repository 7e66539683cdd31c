"""Results of requests, and reports of a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=None)  # type of ``parsed``: the type that was given as ``output_type``
    T_co = TypeVar("T_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    T = TypeVar("T")
    T_co = TypeVar("T_co", covariant=True)

__all__ = [
    "Choice",
    "Completion",
    "FinishReason",
    "Logprob",
    "RequestEnd",
    "StartupProgress",
    "Timings",
    "Token",
    "Usage",
]

ALIVE_STATES = ("running", "paused", "asleep", "draining")
"""States of an engine that has workers, or replaces them."""

_NO_VALUE: Any = None


class FinishReason(StrEnum):
    """Why a completion ended. Compares equal to its lower-case name, which is also OpenAI's spelling."""

    STOP = "stop"  # an end-of-sequence token, a stop token, or a stop string
    TOOL_CALLS = "tool_calls"  # the answer of a chat has ended by itself and calls a tool
    LENGTH = "length"  # max_tokens, or the end of the model's context
    ABORT = "abort"  # engine.abort(), or the caller went away
    ERROR = "error"  # the stream raised an error


class Logprob(NamedTuple):
    """One alternative at one position."""

    token_id: int
    logprob: float  # natural logarithm of the probability, before temperature and truncation


class Token(NamedTuple):
    """One generated token as it arrives.

    The ``text``\\ s of a stream, joined, are the completion. A token that ends in the middle of a character, or
    that may be the beginning of a stop string, has an empty ``text``: a later one brings what it held back.
    """

    text: str
    token_id: int
    index: int = 0  # type: ignore[assignment]  # (tuple.index is hidden) which of the n completions this token belongs to, 0 <= index < n
    logprob: float | None = None  # log-probability of this token; None unless SamplingParams.logprobs was given
    finish_reason: FinishReason | None = None  # set on the last token of its completion
    position: int = 0  # 0 for the completion's first token
    top_logprobs: Sequence[Logprob] = ()  # the likeliest alternatives, likeliest first; read-only


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one request, over all its completions."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    reasoning_tokens: int = 0  # completion tokens of a chat's reasoning; known when it has ended

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request, in seconds. None: it never came to that."""

    queued: float | None = None
    """From the call to its first step, or to its end if it had none: encoding, compiling its grammar, waiting."""
    prefill: float | None = None
    """From its first step to its first token."""
    first_token: float | None = None
    """From the call to its first token; of n completions to that of any. queued and prefill together."""
    per_token: float | None = None
    """From one token to the next, on average: from the first to the end, by the longest of n completions."""
    total: float | None = None
    """From the call to its end."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """One request that has ended, as ``on_request_end`` gets it."""

    request_id: str
    finish_reason: FinishReason  # the reason of the first of n completions that was not aborted
    usage: Usage
    timings: Timings
    error: BaseException | None = None  # the error that the caller gets, with FinishReason.ERROR
    finish_reasons: tuple[FinishReason, ...] = ()  # one for each of the n completions


@dataclass(frozen=True, slots=True)
class Choice(Generic[T_co]):
    """One of the n completions of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: Sequence[tuple[Logprob, ...]] | None = None
    """One entry a token: the sampled token first, then the likeliest, likeliest first. None unless asked for. A
    read-only sequence, whose entries are made when they are read."""
    parsed: T_co = _NO_VALUE
    """With an output_type: its value. None if the text is not complete or not valid, which ``finish_reason`` and
    ``parse_error`` tell; the type leaves that out."""
    parse_error: Exception | None = None
    """With an output_type: why there is no value though the text is complete, as a validator's ValidationError."""
    stop_reason: str | int | None = field(default=None, kw_only=True)
    """With FinishReason.STOP: the stop string, or the one of ``stop_token_ids``, that ended it. None: the end of
    sequence."""


@dataclass(frozen=True, slots=True)
class Completion(Generic[T_co]):
    """The whole answer to a request. ``text``, ``token_ids``, ... are those of its first choice."""

    request_id: str
    choices: tuple[Choice[T_co], ...]
    usage: Usage
    warnings: tuple[str, ...] = ()  # keywords of a schema that on_unsupported="relax" left out
    timings: Timings = field(default_factory=Timings, compare=False)
    prompt_logprobs: Sequence[tuple[Logprob, ...] | None] | None = field(default=None, kw_only=True)
    """One entry a token of the prompt: None for the first, which nothing comes before; else the token itself, then the
    likeliest at its place, likeliest first. None unless asked for. A read-only sequence, whose entries are made when
    they are read."""
    weight_versions: tuple[str, ...] = field(default=(), compare=False, kw_only=True)
    """The versions of the weights that have computed it, oldest first: "0" are those of the start, others what
    `AsyncLLM.finish_weight_update` named."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def parsed(self) -> T_co:
        """The value of the ``output_type``; None if the text is not complete or not valid, see `Choice`."""
        return self.choices[0].parsed

    @property
    def parse_error(self) -> Exception | None:
        return self.choices[0].parse_error

    @property
    def logprobs(self) -> Sequence[tuple[Logprob, ...]] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """One report of a long start: ``done`` of ``total`` in ``unit``s ("bytes", "steps"); total 0: not known."""

    stage: str  # "import", "resolve", "download", "worker", "weights", "profile", "ready"
    done: int = 0
    total: int = 0
    unit: str = ""
    detail: str = ""
