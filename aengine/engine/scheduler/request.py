"""A request in the scheduler: its tokens, how far they are computed, its row and its blocks.

                                                all known tokens          its last token
                                                  are scheduled             is scheduled
    NEW ── add_request ──> WAITING ── schedule ──> CATCHING_UP ──> DECODING ──> DRAINING
                │           ^  ^                       │    ^         │ │
                │           │  └──────── HELD <── preempted ├─────────┘ │
                └> WAITING_ ┘             ^                 └ no block ─┤
                   FOR_PROMPT             └──────────── preempted ──────┘

Any of them becomes FINISHED. Everything a request does is one rule: let ``num_computed_tokens`` catch up with the
number of its tokens. A token that a step in flight samples counts as known from the moment that the step is made,
although its id comes later. So while a request computes prompt or resumed tokens, ``num_computed_tokens`` is less
than ``len(token_ids)``; and once it samples in each step,

    position    0 ............. len(token_ids) - 1 | len(token_ids) ......... num_computed_tokens
                ids known here                     | ids in flight: num_pending of them
                <---------- KV written, by steps answered or in flight -----> the next step's input

which is why ``num_pending`` needs no counter.

A step that looks k tokens ahead (`Lookahead`) brings 1 to 1 + k tokens. Until its answer comes it counts as 1 + k, so
that ``num_computed_tokens`` is an upper bound, for which there are blocks; the answer takes back what was too many.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from ...ipc.messages import NO_RESULTS, Extras, NewRequest, int32
from ...outputs import FinishReason
from ...params import SamplingParams
from .block_pool import BlockTable

if TYPE_CHECKING:
    from ..structured.bitmasks import RequestGrammar


class RequestStatus(Enum):
    NEW = auto()  # it has not been given to the scheduler
    WAITING = auto()  # it is in the queue, without a row or blocks
    WAITING_FOR_PROMPT = auto()  # it is one of n completions, and waits until the prompt of index 0 is computed
    WAITING_FOR_PAGES = auto()  # pages that it begins with are on their way, see kv_elsewhere.py
    WAITING_FOR_PREFIX = auto()  # another request computes the tokens that this one begins with, see coming_prefixes.py
    HELD = auto()  # it was preempted; steps in flight may still bring tokens and write its blocks
    CATCHING_UP = auto()  # it has a row, and known tokens that are not computed or lack a block
    DECODING = auto()  # it has a row, and is in every step with one token
    DRAINING = auto()  # it has a row; its last token is in flight, and nothing is left to schedule
    FINISHED = auto()


class CacheKey(NamedTuple):
    """The key of KV besides the tokens: only requests of equal salt, adapter and media share prefixes, and these end
    where what is ``placed`` begins to differ."""

    salt: bytes = b""  # the caller's `cache_salt`
    adapter: bytes = b""  # the adapter that changes the weights
    media: bytes = b""  # digest of what changes the KV of all tokens
    placed: tuple[tuple[int, bytes], ...] = ()  # (position, digest), ascending: of what changes it from there on


class PromptTokens:
    """The tokens of a prompt, which the n completions of a call share. Nobody changes them."""

    __slots__ = ("_packed", "token_ids")

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = list(token_ids)
        self._packed: array[int] | None = None

    @property
    def packed(self) -> array[int]:
        """The tokens as a message has them. Made once."""
        if self._packed is None:
            self._packed = int32(self.token_ids)
        return self._packed


class StateCopy(NamedTuple):
    """Pages that a step under way copies from or to."""

    border: int  # number of tokens up to which the pages hold the states
    pages: list[int]  # one page for each KV group with states


class RequestStates:
    """Borders at which a request's states are kept, see kv_cache_manager.py."""

    __slots__ = ("begun", "copies", "guessed", "newest", "num_known", "offered", "planned")

    def __init__(self) -> None:
        self.planned: list[int] = []  # borders within its prompt at which they are to be kept, ascending
        self.guessed: set[int] = set()  # those of them at which nobody is known to need them
        self.begun = 0  # the border from which the request has begun, in tokens
        self.num_known = 0  # tokens that it had when it began
        self.newest = 0  # the last border at which states were kept, or ``begun``
        self.copies: list[StateCopy] = []  # copies that have not been answered, by ascending border
        self.offered: list[int] = []  # borders whose states other requests can find, ascending

    @property
    def num_found(self) -> int:
        """Number of tokens of its prompt up to which other requests can take over its states."""
        return self.offered[-1] if self.offered else self.begun

    @property
    def num_copied(self) -> int:
        return sum(len(copy.pages) for copy in self.copies)


NO_STATES = RequestStates()
"""The borders of a request without a row, or of a model without states; never changed in place."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The computation of one completion.

    ``priority``: lower is more urgent; among equals the earlier ``arrival_time`` (any unit), then the earlier added.
    ``max_num_tokens`` counts prompt and completion. ``samples``: it gets tokens; if not, one result in place of the
    one token that ``max_num_tokens`` counts. ``extras``, ``results_from``: see `NewRequest`. ``stop_token_ids``
    includes the model's end-of-sequence tokens unless those are ignored. ``sink`` is the caller's; ``grammar`` what its
    tokens must obey.
    """

    request_id: str
    prompt_token_ids: InitVar[Iterable[int] | PromptTokens]
    params: SamplingParams
    _: KW_ONLY
    seed: int
    max_num_tokens: int
    stop_token_ids: frozenset[int]
    index: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    cache_key: CacheKey = field(default_factory=CacheKey)
    account: Any = None  # for whom it is computed, where a `ServingOrder` counts that
    sink: Any = None
    grammar: RequestGrammar | None = None
    samples: bool = True
    extras: Extras = field(default_factory=dict)
    results_from: int = NO_RESULTS

    prompt: PromptTokens = field(init=False)
    token_ids: list[int] = field(init=False)  # prompt, then the committed output; its own from `begin` on
    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = field(default=RequestStatus.NEW, init=False)
    is_paused: bool = field(default=False, init=False)  # it keeps its row, but is in no step until `Scheduler.resume`
    # it keeps its row, but is in no step until `Rows.settle` says how many tokens it has
    is_unsettled: bool = field(default=False, init=False)
    num_pauses: int = field(default=0, init=False)  # number of pauses until now
    finish_reason: FinishReason | None = field(default=None, init=False)
    # (priority, arrival time, order of adding); `add_request` sets the last
    sort_key: tuple[int, float, int] = field(init=False)
    req_idx: int = field(default=-1, init=False)  # row on the worker; -1: it has none
    batch_index: int = field(default=0, init=False)  # see `DecodeBatches`, while it has a row
    # one for each KV group, while it has a row
    block_tables: list[BlockTable] = field(default_factory=list, init=False)
    states: RequestStates = field(default=NO_STATES, init=False)
    num_computed_tokens: int = field(default=0, init=False)  # tokens that all steps made so far compute, at most
    num_cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the prefix cache at its first step
    # Two thresholds, so that the loop over all requests compares one number with another:
    # value of num_computed_tokens at which a DECODING request needs a block or ends
    limit: int = field(default=0, init=False)
    # len(token_ids) at which `update` has more to do than append: a block is full, or it ends; 0: it has had no step
    next_check_len: int = field(default=0, init=False)

    num_charged: int = field(default=0, init=False)  # leading tokens that its account was charged for
    history: Any = field(default=None, init=False)  # what a `Speculation` keeps of the request

    # For crash_quarantine.py: recent deaths of workers that had the request in a step; those of them while it was
    # the first in quarantine; and its number of tokens at the last of them.
    num_deaths: int = field(default=0, init=False)
    num_deaths_alone: int = field(default=0, init=False)
    # the exception that ended the last worker, if it had no other request in its steps
    exception_alone: str = field(default="", init=False)
    num_tokens_at_death: int = field(default=-(1 << 31), init=False)

    # it has had a row with more tokens than the model's rope border, see `Rows.take`
    is_long: bool = field(default=False, init=False)
    # root of the hashes of its blocks; None: its blocks are not shared
    root_hash: bytes | None = field(default=None, init=False)
    # hashes of its leading full blocks, as many as were needed until now
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    # leading tokens whose blocks came from the prefix cache or were offered to it
    num_offered_tokens: int = field(default=0, init=False)
    # tokens whose pages were sent for last; what has gone again since is computed
    num_fetched_tokens: int = field(default=0, init=False)
    was_sought: bool = field(default=False, init=False)  # stores were asked for pages, and have no more
    is_leading: bool = field(default=False, init=False)  # others may wait for its prompt, see coming_prefixes.py
    # completions 1 .. n-1, while they wait for this one's prompt
    dependents: list[Request] = field(default_factory=list, init=False)

    def __post_init__(self, prompt: Iterable[int] | PromptTokens) -> None:
        self.prompt = prompt if isinstance(prompt, PromptTokens) else PromptTokens(prompt)
        self.token_ids = self.prompt.token_ids
        self.num_prompt_tokens = len(self.token_ids)
        self.sort_key = (self.priority, self.arrival_time, 0)
        assert 0 < self.num_prompt_tokens < self.max_num_tokens, "admission leaves room for one token at least"
        assert self.samples or self.max_num_tokens == self.num_prompt_tokens + 1

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id}/{self.index} {self.status.name} "
            f"computed {self.num_computed_tokens} of {len(self.token_ids)}>"
        )

    @property
    def has_begun(self) -> bool:
        """Whether it has had a row, here or elsewhere."""
        return self.next_check_len != 0

    @property
    def is_preempted(self) -> bool:
        """Whether it has had a row, and waits for another."""
        return self.has_begun and self.status in (RequestStatus.WAITING, RequestStatus.HELD)

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight sample, at most: they count as known, their ids have not come yet."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def num_reusable(self) -> int:
        """Most of its known tokens whose KV may be found, rather than computed: all but the last, as far as no result
        is made of their hidden states."""
        return min(len(self.token_ids) - 1, self.results_from)

    def begin(self) -> None:
        """Take a list of its own for its tokens, before its first step."""
        self.token_ids = list(self.token_ids)

    def end(self) -> None:
        """Give back its own list, when all of its tokens are delivered: those of a call's completions are freed one by
        one then, not all at the call's end."""
        if self.history is not None:
            self.history.end(self)
        self.token_ids = self.prompt.token_ids
        self.history = None

    def forget_worker(self) -> None:
        """Forget the row, the blocks and what is computed."""
        self.block_tables = []
        self.is_leading = False
        self.states = NO_STATES
        self.num_computed_tokens = self.num_offered_tokens = self.num_fetched_tokens = 0
        self.was_sought = False
        self.req_idx = -1
        self.is_paused = self.is_unsettled = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def to_message(self) -> NewRequest:
        """Return the message with which a worker can go on with the request from here."""
        params, tables = self.params, self.block_tables
        block_ids, spans = int32(), int32()
        for table in tables:
            block_ids.extend(table.block_ids)
        if len(tables) > 1 or any(table.begin for table in tables):
            spans.extend(count for table in tables for count in (table.begin, len(table.block_ids)))
        return NewRequest(
            req_idx=self.req_idx,
            token_ids=self.prompt.packed + int32(self.output_token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=block_ids,
            block_spans=spans,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=self.seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            min_tokens=params.min_tokens,
            max_num_tokens=self.max_num_tokens,
            results_from=self.results_from,
            stop_token_ids=int32(sorted(self.stop_token_ids)),
            extras=self.extras,
        )
