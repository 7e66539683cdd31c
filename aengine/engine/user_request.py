"""`UserRequest`: a user's call under way. `Limits`: what bounds all of them. `check_request` compares the two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..checkpoint.sampling_defaults import SamplingDefaults
from ..errors import InvalidRequestError
from ..ipc.messages import NO_RESULTS, Extras
from ..params import CallOptions, SamplingParams, StructuredOutput, check_options, check_params
from .adapters.adapters import NO_SHARE, AdapterShare
from .keeping.keeping import Turn, no_turn
from .sampling_extras import check_extra_args
from .scheduler.request import Request
from .streams.token_stream import Mailbox
from .structured.output_type import AskedType
from .tokenizer.prompt import PromptPart

if TYPE_CHECKING:
    from .replicas.replica import Replica
    from .structured.backend import Compiled
    from .tenants.accounts import Payer


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the running engine; known once the worker is ready."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and completion together
    max_num_queued_requests: int
    wait_when_full: bool
    eos_token_ids: frozenset[int]
    unread_timeout: float | None
    sampling: SamplingDefaults
    tasks: frozenset[str] = frozenset({"generate"})
    """What the model does: "generate", "embed", "classify"."""
    is_encoder: bool = False
    processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The schemas of the arguments that `SamplingParams.extra_args` may have, by name."""


class Phase(Enum):
    """Place of a request that has not come to the step loop, as error messages name it."""

    HELD = "the request waited for a place in the queue"
    PLANNING = "the chat was being prepared"
    COMPILING = "its grammar was being prepared"
    ENCODING = "its prompt was being encoded"
    LOADING = "its adapter was being loaded"
    SCHEDULED = "the request was in the step loop"


@dataclass(slots=True, eq=False)
class UserRequest:
    """A user's call: n completions of one prompt. `Admission` moves it from phase to phase."""

    request_id: str
    prompt: PromptPart | None  # None once ``requests`` hold the tokens
    params: SamplingParams
    priority: int
    cache_salt: bytes
    arrival_time: float
    mailbox: Mailbox
    account: Payer
    num_expected: int = 0  # tokens that it takes from the account's quota
    num_taken: int = 0  # those that it has taken
    keep: float = 0.0  # seconds for which its KV is kept
    constraint: StructuredOutput | None = None  # constraint of a completion; the one of a chat is part of its plan
    asked_type: AskedType | None = None  # a type that is yet to be described, and then becomes the constraint
    samples: bool = True  # False: it gets one result in place of tokens
    extras: Extras = field(default_factory=dict)  # see `NewRequest`, beside those of ``params``
    results_from: int = NO_RESULTS  # see `NewRequest`
    adapter: str | None = None  # the name of its adapter, if it has one
    session: tuple[bytes, str] | None = None  # the session whose turn it is: its salt, and its id
    share: AdapterShare = NO_SHARE  # what it has of its adapter, once it is prepared
    turn: Turn = no_turn  # called when it ends: what its session keeps of it
    phase: Phase = Phase.HELD
    preparing: asyncio.Task[None] | None = None
    requests: list[Request] = field(default_factory=list)  # one for each of the n completions
    replica: Replica | None = None  # the replica that computes the requests
    timers: tuple[asyncio.TimerHandle, ...] = ()  # the timers of its deadlines

    @property
    def must_be_prepared(self) -> bool:
        """Whether a text or words must be encoded, a chat planned, a grammar compiled or an adapter loaded before the
        request can be scheduled."""
        assert self.prompt is not None
        has_grammar = self.constraint is not None or self.asked_type is not None
        needs_more = bool(self.params.bad_words) or self.adapter is not None
        return self.prompt.kind != "token_ids" or has_grammar or needs_more


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of preparing a request."""

    token_ids: Sequence[int]
    grammar: Compiled | None = None
    markers: frozenset[int] = frozenset()  # control tokens that divide the text into parts, see `MarkedDetokenizer`
    begins_text: bool = False  # the completion is a text of its own, and does not continue the prompt's last word
    bad_words: Sequence[Sequence[int]] = ()  # sequences of tokens, see `encode_bad_words`


def _why_it_generates_nothing(limits: Limits) -> str:
    calls = "classify() and score()" if "classify" in limits.tasks else "embed()"
    if limits.is_encoder:
        return f"this model is an encoder, which generates no text: call {calls}"
    if "classify" in limits.tasks:
        return f"this model classifies texts, and generates none: call {calls}"
    cure = f"call {calls}" if limits.tasks else "load a ...ForCausalLM, or start with pooling='last' and call embed()"
    return f"this model's checkpoint has no output matrix (lm_head), without which it generates no text: {cure}"


def check_request(limits: Limits, has_tokenizer: bool, kind: str, params: SamplingParams, options: CallOptions) -> None:
    """Raise InvalidRequestError for options and parameters that this engine can't take. ``kind``: of the prompt."""
    if "generate" not in limits.tasks:
        raise InvalidRequestError(_why_it_generates_nothing(limits), param="prompt")
    check_params(params)
    check_options(options)
    if not has_tokenizer:
        if kind == "chat":
            raise InvalidRequestError("a chat needs a tokenizer: start without skip_tokenizer=True", param="messages")
        needs = [(f"a prompt of {kind} needs", "prompt")] if kind != "token_ids" else []
        needs += [("stop strings need", "prompt")] if params.stop else []
        needs += [("bad_words need", "bad_words")] if params.bad_words else []
        for what, param in needs:
            raise InvalidRequestError(
                f"{what} a tokenizer, and the engine was started with skip_tokenizer=True", param=param
            )
    check_extra_args(params, limits.processors)
    vocab_size = limits.vocab_size
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        largest = max(getattr(params, name) or (), default=0)
        if largest >= vocab_size:
            raise InvalidRequestError(
                f"{name} names token {largest}, but this model has {vocab_size} tokens", param=name
            )
