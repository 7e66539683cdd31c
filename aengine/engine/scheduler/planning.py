"""A step being planned: which requests compute how many tokens in it, and the changes that it carries.

All that decode are in it with one token each. Then, by urgency, those that catch up: chunks of prompts, decodes that
lack a block, requests that look ahead. Then the waiting. What keeps it right is drawn in scheduler.py.
"""

from __future__ import annotations

from ...ipc.messages import NewRequest, SchedulerOutput, int32
from .crash_quarantine import CrashQuarantine
from .request import Request, RequestStatus
from .rows import Rows
from .step import NOTHING, NOTHING_AHEAD, AheadTokens, InFlightStep
from .waiting_queue import WaitingQueue

_MOST_KNOWN_TOKENS = 1 << 18
"""Tokens of the requests that get a row in one step, if they are several. The blocks of each one's prompt are looked up
and its tokens sent, though they are computed already: hundreds of completions of one long prompt would take seconds."""
_CATCHING_UP, _DECODING, _DRAINING = RequestStatus.CATCHING_UP, RequestStatus.DECODING, RequestStatus.DRAINING


class StepPlan:
    """A step being planned, apart from its plain decodes. `make` ends the planning."""

    __slots__ = (
        *("_ahead", "_budget", "_coming", "_counts", "_grown_groups", "_grown_ids", "_grown_rows", "_keeps_states"),
        *("_kept_states", "_new_requests", "_num_ahead", "_num_waiting", "_page_copies", "_prompt_budget", "_rows"),
        *("catching_up", "newcomers", "num_cache_hits", "num_cache_queries", "num_prompt_tokens"),
    )

    def __init__(
        self, rows: Rows, budget: int, num_waiting: int, prompt_budget: int, *, can_be_undone: bool = False
    ) -> None:
        """``budget``: tokens that may be scheduled; ``prompt_budget``: those of prompts among them; ``num_waiting``:
        requests that may be admitted. ``can_be_undone``: no state is kept aside, which can't be taken back."""
        self._keeps_states = rows.kv.has_states and not can_be_undone
        self._page_copies: list[int] = []  # pairs of pages: from, to
        self._kept_states: list[int] = []  # see `SchedulerOutput.kept_states`
        self._rows = rows
        self._budget = budget
        self._prompt_budget = prompt_budget
        self.num_prompt_tokens = 0
        self._num_waiting = num_waiting
        self._num_ahead = 0  # tokens in ``_ahead``
        self.catching_up: list[Request] = []  # requests of this step that catch up or are new
        self._counts: list[int] = []  # number of tokens that each of ``catching_up`` computes in this step
        self._ahead: dict[int, AheadTokens] = {}  # those of requests that look ahead, by place in ``catching_up``
        self._new_requests: list[NewRequest] = []
        self.newcomers: list[Request] = []  # requests that have not been in any step before
        self.num_cache_queries = self.num_cache_hits = 0  # tokens of the newcomers that were looked up; tokens found
        self._grown_rows: list[int] = []  # row of each block that is given out
        self._grown_ids: list[int] = []  # id of each block that is given out
        self._grown_groups: list[int] = []  # KV group of each block that is given out
        self._coming: int | None = None  # most blocks that answers in flight will free; None: not counted yet

    def serve_rows(self, due: list[Request]) -> None:
        """Give blocks to the decodes in ``due``, and tokens and blocks to the requests that catch up.

        This goes by urgency and before any progress is noted: a request that is preempted for another one comes later
        in this order, so that nothing of this step must be undone.
        """
        for request in self._rows.rope.crossing((*due, *self._rows.catching_up_now())):
            self._rows.restart(request)
        # A decode short of a block catches up too. Its one token is kept for it, whatever chunks come before.
        needy = self._rows.catching_up_now()
        kept = sum(r.num_computed_tokens + 1 >= len(r.token_ids) for r in needy)
        for request in due:
            if request.status is not _DECODING:  # `crossing` above has restarted the request
                continue
            if request.num_computed_tokens < request.max_num_tokens - 1:
                needy.append(request)
            else:  # the token in flight is the request's last
                self._rows.drain(request)
        self._rows.order.sort(needy)
        for request in needy:
            if request.status is _DECODING:
                self._continue_decode(request)
            elif request.status is _CATCHING_UP:
                to_go = max(1, len(request.token_ids) - request.num_computed_tokens)
                kept -= to_go == 1
                self._catch_up(request, to_go, self._budget - kept)

    def _continue_decode(self, request: Request) -> None:
        """Continue a decode whose next token needs a block, in some group."""
        kv, num_tokens = self._rows.kv, request.num_computed_tokens + 1
        if kv.pool.num_free < kv.num_growing:
            lacking = kv.num_lacking(request, num_tokens)
            if self._make_room(request, lacking) < lacking:
                self._rows.stop_decoding(request)
                return
        self._grow(request, num_tokens)
        if self._keeps_states:
            self._keep_states(request)
        self._rows.set_limit(request)

    def _catch_up(self, request: Request, to_go: int, most: int) -> None:
        """Schedule as many of ``to_go`` tokens as ``most`` and the blocks allow; then those ahead."""
        kv, begin, num_tokens = self._rows.kv, request.num_computed_tokens, min(to_go, most)
        if to_go > 1:
            room = min(most, self._prompt_budget - self.num_prompt_tokens)
            num_tokens = min(to_go, room - self._rows.order.room_for_waiting(request, room, self._rows))
        lacking = kv.num_lacking(request, begin + num_tokens)
        if lacking:
            granted = self._make_room(request, lacking)
            if granted < lacking:
                num_tokens = kv.reach(request, granted, begin + num_tokens) - begin
            self._grow(request, begin + num_tokens)
        if num_tokens <= 0:
            return
        if self._keeps_states:
            self._keep_states(request)
        ahead, end, rows = NOTHING_AHEAD, begin + num_tokens, self._rows
        if num_tokens == to_go:
            num_logits = rows.num_running + min(rows.num_free, self._num_waiting) + self._num_ahead  # at most
            ahead = rows.lookahead.extend(request, end, most - num_tokens, num_logits)
            self._grow(request, end + len(ahead.token_ids))
        self._add(request, num_tokens, ahead)

    def _keep_states(self, request: Request) -> None:
        """Have the step copy the request's states aside first, if they are at a border where they should be kept, and
        if it is known that they will be there."""
        if not self._rows.lookahead.may_reject(request):
            self._page_copies += self._rows.kv.keep_states(request, self._rows.num_spare_blocks)

    def _make_room(self, request: Request, num_wanted: int) -> int:
        """Return how many of ``num_wanted`` blocks it can have now; preempts the least urgent as far as that helps."""
        kv = self._rows.kv
        if kv.pool.num_free < num_wanted:
            if self._coming is None:
                self._coming = self._rows.num_blocks_coming()
            while kv.pool.num_free + self._coming < num_wanted:
                victim = self._rows.preempt_for(request)
                if victim is None:
                    break
                if self._rows.steps:
                    self._coming += kv.num_held(victim)
        return min(num_wanted, kv.pool.num_free)

    def admit(self, waiting: WaitingQueue, quarantine: CrashQuarantine, *, whole_prompts: bool = False) -> None:
        """Give rows to the waiting, while their known tokens fit and everybody with a row could grow by a block.
        ``whole_prompts``: only while all of their tokens fit into this step."""
        rows, kv = self._rows, self._rows.kv
        num_known = 0  # tokens of those that got a row here
        most = rows.batches.room(rows.num_running + len(waiting))
        while waiting and self._budget > 0 and self.num_prompt_tokens < self._prompt_budget and rows.num_free:
            if len(self._new_requests) >= most:
                return
            spare = rows.num_spare_blocks
            if spare <= 0:
                return
            request = quarantine.first if quarantine else waiting.peek()
            if request.status is not RequestStatus.WAITING:  # one from the quarantine runs, and nobody beside it
                return
            num_tokens = len(request.token_ids)
            if whole_prompts and num_tokens > self._budget:
                return
            if num_known and num_known + num_tokens > _MOST_KNOWN_TOKENS:
                return
            rows.rope.choose(request)
            prefix = rows.preempted.longest(request, kv.match(request))
            num_cached = prefix.length
            if prefix.kept and not rows.num_running and spare < kv.num_missing(prefix, num_tokens):
                prefix = kv.no_prefix()  # the request fits alone, but not beside the states that would be copied
                num_cached = 0
            if spare < kv.num_missing(prefix, num_tokens):
                return
            waiting.discard(request)
            is_copying = rows.preempted.has_copies or rows.steps.copy_aside
            if not quarantine and not is_copying and rows.elsewhere.fetch(request, prefix, spare):
                continue
            if not quarantine and rows.prefixes.follow(request, num_cached):
                continue
            num_scheduled = min(num_tokens - num_cached, self._budget, self._prompt_budget - self.num_prompt_tokens)
            kv.begin(request, prefix)
            if self._keeps_states and waiting and not quarantine:
                rows.prefixes.expect(request, waiting.peek())
            kv.grow(request, num_cached + num_scheduled)
            if prefix.kept:
                self._page_copies += kv.restore_states(request, prefix)
            rows.preempted.restore(request, prefix)
            rows.take(request)
            rows.prefixes.lead(request)
            num_known += num_tokens
            if not request.has_begun:  # its first time here: what it finds later may be its own
                request.begin()
                request.num_cached_tokens = num_cached
                self.newcomers.append(request)
                if request.root_hash is not None:
                    self.num_cache_queries += num_tokens
                    self.num_cache_hits += num_cached
            request.next_check_len = num_tokens + 1
            self._new_requests.append(request.to_message())
            self._add(request, num_scheduled)

    def _add(self, request: Request, num_tokens: int, ahead: AheadTokens = NOTHING_AHEAD) -> None:
        if num_tokens > 1:
            self.num_prompt_tokens += num_tokens
            if self._keeps_states:
                self._kept_states += self._rows.kv.states.keep_within(request, num_tokens, self._rows.num_spare_blocks)
        if ahead.token_ids:
            self._ahead[len(self.catching_up)] = ahead
            self._num_ahead += len(ahead.token_ids)
            num_tokens += len(ahead.token_ids)
        self.catching_up.append(request)
        self._counts.append(num_tokens)
        self._budget -= num_tokens
        request.num_computed_tokens += num_tokens

    def _grow(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks that the request lacks to hold ``num_tokens`` tokens, and note them for the message."""
        for group, block_ids in self._rows.kv.grow(request, num_tokens):
            self._grown_ids += block_ids
            self._grown_rows += [request.req_idx] * len(block_ids)
            self._grown_groups += [group] * len(block_ids)

    @property
    def is_full(self) -> bool:
        """Whether the step has no room for another token of a prompt."""
        return self._budget <= 0 or self.num_prompt_tokens >= self._prompt_budget

    def make(self, step_id: int, *, has_grammars: bool) -> SchedulerOutput:
        """End the planning: put the step among those in flight, and return its message."""
        rows, decoding = self._rows, self._rows.batches.current
        batch, req_idx, num_scheduled = decoding.requests, decoding.req_idx, decoding.num_scheduled
        chunks: dict[int, int] = {}
        ahead = self._ahead
        num_tokens = len(batch) + sum(self._counts)
        if self.catching_up:
            ahead = {len(batch) + place: tokens for place, tokens in ahead.items()}
            req_idx = req_idx + int32([request.req_idx for request in self.catching_up])
            num_scheduled = num_scheduled + int32(self._counts)
            chunks = self._plan_next_step(len(batch))
            batch = batch + self.catching_up
        step = InFlightStep(step_id, batch, chunks, ahead, num_tokens, self.num_prompt_tokens)
        step.newcomers = self.newcomers
        step.is_gated = has_grammars and bool(step.constrained())
        rows.steps.add(step)
        grown = NOTHING, NOTHING, NOTHING
        if self._grown_ids:
            groups = int32(self._grown_groups) if rows.kv.num_groups > 1 else NOTHING
            grown = int32(self._grown_rows), int32(self._grown_ids), groups
        step.grown_rows, step.grown_groups = self._grown_rows, self._grown_groups
        changes = (*step.settled, step.removed, self._new_requests, *grown)
        aside = rows.preempted.take_copies()
        step.copies_aside = bool(aside)
        page_copies = self._page_copies + aside
        copies = int32(page_copies) if page_copies else NOTHING
        output = SchedulerOutput(step_id, *changes, req_idx, num_scheduled, not step.is_gated, page_copies=copies)
        if self._kept_states:
            output.kept_states = int32(self._kept_states)
        rows.lookahead.tell(output, ahead)
        return output

    def _plan_next_step(self, batch_idx: int) -> dict[int, int]:
        """Set what the requests that catch up in this step do in the next: the first is at ``batch_idx``. Returns the
        chunks of prompts, see `InFlightStep`."""
        chunks: dict[int, int] = {}
        joining: list[Request] = []
        draining: list[Request] = []
        waits = len(self._rows.batches) > 1
        for place, request in enumerate(self.catching_up):
            if request.num_computed_tokens < len(request.token_ids):
                chunks[batch_idx] = request.num_computed_tokens
            elif not request.samples:
                draining.append(request)
            elif waits and self._ahead.get(place, NOTHING_AHEAD).num_samples > 1:
                request.is_unsettled = True
            else:
                joining.append(request)
            batch_idx += 1
        self._rows.caught_up(joining, draining)
        return chunks
