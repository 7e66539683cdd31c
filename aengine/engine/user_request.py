"""`Call`: one user call under way. `Limits`: what bounds all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..params import SamplingParams, StructuredOutput
from ..scheduler.request import Request
from ..streams.token_stream import Mailbox
from ..structured.asked_type import AskedType
from ..tokenizer.prompt import Prompt
from .sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from ..chat.plan import ChatRequest
    from ..structured.backend import Compiled
    from ..structured.spec import GrammarSpec

__all__ = ["Call", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running engine can take; known once the worker is ready."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and completion together
    max_num_queued_requests: int
    wait_when_full: bool
    eos_token_ids: frozenset[int]
    unread_timeout: float | None
    sampling: SamplingDefaults


@dataclass(slots=True, eq=False)
class Call:
    """One user call under way."""

    request_id: str
    prompt: Prompt | None
    kind: str
    params: SamplingParams
    priority: int
    cache_salt: bytes
    arrival_time: float
    mailbox: Mailbox
    chat: ChatRequest | None = None  # that it answers
    requests: list[Request] = field(default_factory=list)
    num_left: int = 0  # requests that have not ended
    timers: tuple[asyncio.TimerHandle, ...] = ()  # of its limits in time
    asked_type: AskedType | None = None  # it will be the constraint
    constraint: StructuredOutput | GrammarSpec | None = None
    compiled: Compiled | None = None  # of the constraint
    preparing: asyncio.Task[None] | None = None
