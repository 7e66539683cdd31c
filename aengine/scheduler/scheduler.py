"""Which requests compute how many tokens in the next step. A pure function of its state: no clock, no I/O, no tensors.

    add_request ──> waiting ──> rows: catching up ──> decoding ──> draining ──> gone
                       ^                  └─────────────┴── preempted, for want of a block
                       └─────────────────────────────────────────┘

    schedule()  step N+1 is made while step N is under way: a token that N samples counts as known, its id comes later
    propose()   drafts: a request's next step computes and samples at several positions, and brings 1 to 1 + k tokens
    update()    the answers, in the order of the steps: ids are committed, stops found, a token past a stop is dropped;
                what was counted for drafts that were rejected is taken back, and the worker is told with the next step
    revoke()    the newest steps were leased, and the worker has dropped them unbegun: as if they had not been made

Order of a step: all that decode (one token each, the budget always covers them), then those that catch up, then the
waiting, each by (priority, arrival): lower and earlier first. What keeps it right:

* A row that is left is told as ``removed`` in the next step made, and may be given anew in that same step.
* Blocks that are left are freed when the newest step made so far has been answered: no step in flight writes them.
* A preempted request waits for its answers in flight (HELD), then its prompt and output are computed again.
* Only a less urgent request is preempted, so the most urgent one with a row always gets its blocks; every request fits
  into the pool alone (`max_tokens_capacity`); and one that lacks a block was given all that were free, so nobody is
  admitted past it. Hence all end.
"""

from __future__ import annotations

# large on purpose: one state machine, every part of which reads and changes the same state.
from array import array
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from ..errors import InternalError
from ..ipc.messages import (
    DraftColumns,
    KVCacheGroup,
    ModelRunnerOutput,
    PooledColumns,
    RowError,
    SchedulerOutput,
    int32,
)
from ..outputs import FinishReason
from .crash_quarantine import Suspects
from .invariants import check_scheduler
from .kv_cache_manager import KVCacheManager, private_root, shared_root
from .parallel_sampling import Siblings
from .request import Request, RequestStatus
from .step import DecodeBatch, InFlightStep, StepDraft
from .waiting_queue import WaitingQueue

__all__ = ["Scheduler", "StepResult"]

_sort_key = attrgetter("sort_key")
_LEAST_LOGITS = 64
"""Rows of logits that a step may have, drafts included, however few rows there are."""
_CATCHING_UP, _DECODING, _DRAINING = RequestStatus.CATCHING_UP, RequestStatus.DECODING, RequestStatus.DRAINING


class StepResult(NamedTuple):
    """What an answer has brought."""

    sampled: list[tuple[Request, int, int]]  # request, token id, and its place in the answer's ``token_ids``
    failed: list[tuple[Request, RowError]]
    pooled: list[tuple[Request, array[float]]]  # with the vector of each, which ends it
    num_rows: int  # requests that got tokens


class Scheduler:
    """Owns the requests, the rows and the KV blocks of one worker group.

    ``num_blocks`` pages, which the ``kv_groups`` share; ``max_num_batched_tokens`` in one step. At most
    ``max_num_seqs`` requests have a row, and no more than the token budget covers, so that whoever decodes is in every
    step.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        kv_groups: Sequence[KVCacheGroup],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        max_in_flight_steps: int = 2,
        vocab_size: int = 1 << 31,
    ) -> None:
        self.num_rows = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._kv_groups = kv_groups
        self._begin_worker(num_blocks)
        self.max_tokens_capacity = self._kv.capacity(max_model_len)
        """Most tokens, prompt and completion, that one request may have; admission sees to it."""
        self.enable_prefix_caching = enable_prefix_caching
        self.max_in_flight_steps = max_in_flight_steps
        self._vocab_size = vocab_size  # ids beyond it are no answer

        self._waiting = WaitingQueue()
        self._siblings = Siblings()
        self._held: set[Request] = set()
        self._running: set[Request] = set()  # all that have a row
        self._suspects = Suspects()
        self._num_added = 0
        self.num_constrained = 0  # unfinished requests with a grammar; those preempted may still get tokens
        self._next_step_id = 0

        self.begun: list[Request] = []  # that got their first token with the last answer
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # prompt tokens looked up
        self.prefix_cache_hits = 0  # of them found

    def _begin_worker(self, num_blocks: int) -> None:
        """What is known of a worker that has not been told anything."""
        self._kv = KVCacheManager(num_blocks, self._kv_groups, self.max_num_batched_tokens)
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        self._removed = int32()  # rows to be told as removed
        self._decoding = DecodeBatch()
        self._catching_up: list[Request] = []
        self._in_flight: deque[InFlightStep] = deque()
        self._settled = int32(), int32()  # rows of which a step with drafts was answered, and what was rejected

    def drop_tables(self) -> None:
        """Free what is known of blocks and steps, when nothing is scheduled any more."""
        self._begin_worker(0)

    @property
    def oldest_step(self) -> InFlightStep | None:
        """The step whose answer comes next."""
        return self._in_flight[0] if self._in_flight else None

    @property
    def newest_step(self) -> InFlightStep | None:
        return self._in_flight[-1] if self._in_flight else None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._siblings.following) + len(self._held)

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free

    # -- coming and going

    def add_request(self, request: Request) -> None:
        """Queue it. Completions 1 .. n-1 of a call are added after its index 0, whose prompt they share."""
        assert request.status is RequestStatus.NEW, f"{request} was added before"
        assert request.max_num_tokens <= self.max_tokens_capacity, f"{request} does not fit into the KV cache"
        self._num_added += 1
        self.num_constrained += request.grammar is not None
        request.sort_key = (request.priority, request.arrival_time, self._num_added)
        if self.enable_prefix_caching:
            request.root_hash = shared_root(request.cache_key)
        if request.params.n > 1 and request.num_prompt_tokens > self._kv.block_size:
            if request.index == 0:
                self._siblings.lead(request)
                if not self.enable_prefix_caching:
                    request.root_hash = private_root(self._num_added)
            elif self._siblings.follow(request):
                return
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is. Idempotent: the first reason counts."""
        if request.finish_reason is not None:
            return
        status = request.status
        request.finish_reason = reason
        if status is not RequestStatus.NEW:
            self.num_constrained -= request.grammar is not None
        request.status = RequestStatus.FINISHED
        self._suspects.drop(request)
        if status is RequestStatus.WAITING:
            self._waiting.discard(request)
        elif status is RequestStatus.HELD:
            self._held.discard(request)
        elif status is RequestStatus.FOLLOWING:
            self._siblings.drop(request)
        elif status is not RequestStatus.NEW:
            self._leave_row(request, status)
        self._release_followers(request)

    def _release_followers(self, leader: Request) -> None:
        for request in self._siblings.release(leader):
            self._enqueue(request)

    def propose(self, request: Request, token_ids: Sequence[int]) -> None:
        """Guess that ``token_ids`` follow what the request has sampled, all steps in flight included.

        Its next step computes them too and samples after each, as far as there is room. Whatever they are, the tokens
        that it gets are those of a run without. Nothing happens unless it decodes and `Request.takes_drafts`, nor with
        a model that keeps a state, out of which a rejected token could not be taken again.
        """
        if request.status is not _DECODING or not request.takes_drafts or self._kv.has_states:
            return
        stops = request.stop_token_ids
        stop = next((i for i, token_id in enumerate(token_ids) if token_id in stops), len(token_ids))
        most = request.max_num_tokens - 2 - request.num_computed_tokens  # the last token is sampled
        drafts = list(token_ids[: max(0, min(stop, most))])
        if drafts:
            request.draft_token_ids = drafts
            self._stop_decoding(request)

    def pause(self, request: Request) -> None:
        """Leave a request that decodes out of the steps to come, until `resume`. It keeps its row and its blocks.
        Nothing happens if its last token is in flight."""
        if request.status is _DECODING and request.num_computed_tokens < request.max_num_tokens - 1:
            request.is_paused = True
            self._stop_decoding(request)

    @staticmethod
    def resume(request: Request) -> None:
        request.is_paused = False

    def _stop_decoding(self, request: Request) -> None:
        request.status = _CATCHING_UP
        self._catching_up.append(request)
        self._decoding.leave()

    def _leave_row(self, request: Request, status: RequestStatus) -> None:
        self._running.discard(request)
        self._removed.append(request.req_idx)
        self._free_rows.append(request.req_idx)
        request.req_idx = -1
        if status is _DECODING:
            self._decoding.leave()
        elif status is _CATCHING_UP:
            self._catching_up.remove(request)
        # The newest step, not the request's own last one: a step later than need be at most, and nothing to count.
        if self._in_flight:
            self._in_flight[-1].leavers.append(request)
        else:
            self._release_blocks(request)

    def _release_blocks(self, request: Request) -> None:
        """No step in flight knows it any more."""
        self._kv.release(request)
        self._reset(request)
        if request.finish_reason is None:
            self._held.discard(request)
            self._enqueue(request)

    @staticmethod
    def _reset(request: Request) -> None:
        request.block_tables = []
        request.num_computed_tokens = request.num_offered_tokens = 0
        request.req_idx = -1
        request.is_paused = False
        request.draft_token_ids = []

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        status, request.status = request.status, RequestStatus.HELD
        self._held.add(request)
        self._leave_row(request, status)

    def preempt_all(self) -> list[Request]:
        """The worker is a new one: no row, no KV, no answer on its way. Every request will be computed again.

        Returns the unfinished requests of which the worker before, and others before it, can be said to have died.
        They should be finished.
        """
        in_flight = {request: None for step in self._in_flight for request in step.batch}
        condemned = self._suspects.note_death(request for request in in_flight if request.finish_reason is None)
        leaving = [request for step in self._in_flight for request in step.leavers]
        unfinished = (*self._running, *self._held)
        for request in (*unfinished, *leaving):
            self._reset(request)
        for request in unfinished:
            self._enqueue(request)
        self._running.clear()
        self._held.clear()
        self._begin_worker(self.num_blocks)
        return condemned

    # -- making a step

    @property
    def is_steady(self) -> bool:
        """Whether the next step does nothing but continue requests that decode: such a step may be leased."""
        others = self._waiting or self._catching_up or self._held or self._siblings.following or self.num_constrained
        return not others and self._kv.num_free >= len(self._running) * self._kv.num_groups

    def schedule(self, *, is_leased: bool = False) -> SchedulerOutput | None:
        """The next step, or None when nobody has anything to compute before more answers or requests come.

        ``is_leased``: `revoke` may take it back. Only while `is_steady`.
        """
        assert len(self._in_flight) < self.max_in_flight_steps, "too many steps in flight"
        decoding = self._decoding.refresh()
        num_sampling = len(self._running) + min(len(self._free_rows), len(self._waiting))  # at most
        most_drafts = max(self.num_rows, _LEAST_LOGITS) - num_sampling
        draft = StepDraft(self.max_num_batched_tokens - len(decoding), most_drafts)
        due = [request for request in decoding if request.num_computed_tokens == request.limit]
        if due or self._catching_up:
            self._serve_rows(due, draft)
            decoding = self._decoding.refresh()
        for request in decoding:
            request.num_computed_tokens += 1
        if self._waiting:
            self._admit(draft)
        if not decoding and not draft.extras:
            return None
        return self._make_step(decoding, draft, is_leased)

    def _serve_rows(self, due: list[Request], draft: StepDraft) -> None:
        """Blocks for the decoding that need one, tokens and blocks for those that catch up.

        In order of urgency, and before anybody's progress is noted: whoever is preempted for another comes later in
        this order, so nothing of this step has to be undone.
        """
        # A decode short of a block catches up too. Its one token is kept for it, whatever chunks come before.
        needy = [request for request in self._catching_up if not request.is_paused]
        kept = sum(r.num_computed_tokens + 1 >= len(r.token_ids) for r in needy)
        for request in due:
            if request.num_computed_tokens < request.max_num_tokens - 1:
                needy.append(request)
            else:  # the token in flight is its last
                request.status = _DRAINING
                self._decoding.leave()
        needy.sort(key=_sort_key)
        for request in needy:
            if request.status is _DECODING:
                self._continue_decode(request, draft)
            elif request.status is _CATCHING_UP:
                to_go = max(1, len(request.token_ids) - request.num_computed_tokens)
                kept -= to_go == 1
                self._catch_up(request, to_go, draft.budget - kept, draft)

    def _continue_decode(self, request: Request, draft: StepDraft) -> None:
        """Its next token needs a block, in some group."""
        kv, num_tokens = self._kv, request.num_computed_tokens + 1
        if kv.num_free < kv.num_groups:
            lacking = kv.num_lacking(request, num_tokens)
            if self._make_room(request, lacking, draft) < lacking:
                self._stop_decoding(request)
                return
        draft.grow(request, kv.grow(request, num_tokens))
        self._set_limit(request)

    def _set_limit(self, request: Request) -> None:
        request.limit = min(self._kv.room(request), request.max_num_tokens - 1)

    def _catch_up(self, request: Request, to_go: int, most: int, draft: StepDraft) -> None:
        """As many of ``to_go`` tokens as ``most`` and the blocks allow; then its drafts."""
        kv, begin, num_tokens = self._kv, request.num_computed_tokens, min(to_go, most)
        lacking = kv.num_lacking(request, begin + num_tokens)
        if lacking:
            granted = self._make_room(request, lacking, draft)
            if granted < lacking:
                num_tokens = kv.reach(request, granted, begin + num_tokens) - begin
            draft.grow(request, kv.grow(request, begin + num_tokens))
        if num_tokens <= 0:
            return
        drafts: list[int] = []
        if request.draft_token_ids and num_tokens == to_go:
            drafts, request.draft_token_ids = request.draft_token_ids, []
            end = begin + num_tokens
            drafts = drafts[: self._num_drafts(request, end, min(len(drafts), most - num_tokens, draft.most_drafts))]
            draft.grow(request, kv.grow(request, end + len(drafts)))
        draft.add(request, num_tokens, drafts)

    def _num_drafts(self, request: Request, end: int, wanted: int) -> int:
        """How many drafts, after ``end`` tokens, there are blocks for: nobody is preempted for them, and all others
        can still grow by one block."""
        kv = self._kv
        spare = max(0, kv.num_free - len(self._running) * kv.num_groups)
        if kv.num_lacking(request, end + wanted) > spare:
            wanted = min(wanted, kv.reach(request, spare, end + wanted) - end)
        return max(0, wanted)

    def _make_room(self, request: Request, num_wanted: int, draft: StepDraft) -> int:
        """How many of ``num_wanted`` blocks it can have now; preempts the least urgent as far as that helps."""
        kv = self._kv
        if kv.num_free < num_wanted:
            if draft.coming is None:
                draft.coming = self._count_coming()
            while kv.num_free + draft.coming < num_wanted:
                victim = max((r for r in self._running if r.status is not _DRAINING), key=_sort_key)
                if victim is request:
                    break
                if self._in_flight:
                    draft.coming += kv.num_held(victim)
                self._preempt(victim)
        return min(num_wanted, kv.num_free)

    def _count_coming(self) -> int:
        """Blocks that answers in flight will free, at most."""
        kv = self._kv
        leaving = [request for step in self._in_flight for request in step.leavers]
        leaving += [request for request in self._running if request.status is _DRAINING]
        coming = sum(map(kv.num_held, leaving))
        if self._in_flight and kv.has_windows:
            coming += sum(kv.num_leaving(request) for request in self._catching_up if not request.is_paused)
        return coming

    def _admit(self, draft: StepDraft) -> None:
        """Give rows to the waiting, while their known tokens fit and everybody with a row could grow by a block."""
        kv, waiting = self._kv, self._waiting
        while waiting and draft.budget > 0 and self._free_rows:
            spare = kv.num_free - len(self._running) * kv.num_groups
            if spare <= 0:
                return
            request = self._suspects.first if self._suspects else waiting.peek()
            if request.status is not RequestStatus.WAITING:  # a suspect is on trial: nobody else comes in
                return
            num_tokens = len(request.token_ids)
            hit = kv.match(request)
            if spare < kv.num_missing(hit, num_tokens):
                return
            waiting.discard(request)
            num_cached = hit.num_tokens
            num_scheduled = min(num_tokens - num_cached, draft.budget)
            kv.begin(request, hit)
            kv.grow(request, num_cached + num_scheduled)
            request.req_idx = self._free_rows.pop()
            if request.milestone == 0:  # its first time here: what it finds later may be its own
                request.num_cached_tokens = num_cached
                draft.newcomers.append(request)
                if request.root_hash is not None:
                    self.prefix_cache_queries += num_tokens
                    self.prefix_cache_hits += num_cached
            request.milestone = num_tokens + 1
            request.status = _CATCHING_UP
            self._catching_up.append(request)
            self._running.add(request)
            draft.new_requests.append(request.to_message())
            draft.add(request, num_scheduled)

    def _make_step(self, decoding: list[Request], draft: StepDraft, is_leased: bool) -> SchedulerOutput:
        batch, req_idx, num_scheduled = decoding, self._decoding.req_idx, self._decoding.num_scheduled
        chunks: dict[int, int] = {}
        drafts = {len(decoding) + place: token_ids for place, token_ids in draft.drafts.items()}
        if draft.extras:
            batch = decoding + draft.extras
            req_idx = req_idx + int32([request.req_idx for request in draft.extras])
            num_scheduled = num_scheduled + int32(draft.counts)
            self._sort_out(draft.extras, len(decoding), chunks)
        step_id = self._next_step_id
        self._next_step_id = step_id + 1
        step = InFlightStep(step_id, batch, chunks, drafts)
        step.newcomers = draft.newcomers
        step.is_gated = self.num_constrained > 0 and bool(step.constrained())
        self._in_flight.append(step)
        removed, self._removed = self._removed, int32()
        settled, self._settled = self._settled, (int32(), int32())
        grown = (draft.grown_rows, draft.grown_ids, draft.grown_groups)
        if is_leased:
            assert not draft.extras and not self._catching_up, "only a step of decodes can be taken back"
            step.is_leased, step.settled, step.removed = True, settled, removed
            step.grown_rows, step.grown_groups = draft.grown_rows, draft.grown_groups
        flags = (not step.is_gated, is_leased)
        columns = _draft_columns(len(batch), drafts) if drafts else None
        changes = (*settled, removed, draft.new_requests, *grown)
        return SchedulerOutput(step_id, *changes, req_idx, num_scheduled, *flags, columns)

    def _sort_out(self, extras: list[Request], batch_idx: int, chunks: dict[int, int]) -> None:
        """What those that caught up in this step do in the next one."""
        joining = []
        for request in extras:
            if request.num_computed_tokens < len(request.token_ids):
                chunks[batch_idx] = request.num_computed_tokens
            else:
                request.status = _DECODING
                self._set_limit(request)
                joining.append(request)
            batch_idx += 1
        if len(chunks) < len(extras):
            self._catching_up = [request for request in self._catching_up if request.status is _CATCHING_UP]
        if joining:
            self._decoding.join(joining)

    def revoke(self, num_steps: int) -> None:
        """Undo the newest ``num_steps``: the worker has not begun them, and never will.

        Raises:
            InternalError: not all of them were leased.
        """
        requests: dict[Request, None] = {}
        leavers: list[Request] = []
        for _ in range(num_steps):
            if not self._in_flight or not self._in_flight[-1].is_leased:
                raise InternalError(f"the worker dropped {num_steps} steps, which were not leased")
            step = self._in_flight.pop()
            requests |= dict.fromkeys(step.undo(self._kv))
            leavers += step.leavers
            self._removed.extend(step.removed)
            for column, told in zip(self._settled, step.settled, strict=True):
                column.extend(told)
        self._decoding.refresh()
        self._decoding.join([request for request in requests if request.status is _DRAINING])
        for request in requests:
            request.status = _DECODING
            self._set_limit(request)
        for step in self._in_flight:
            step.is_leased = False  # the worker has begun it
        if self._in_flight:
            self._in_flight[-1].leavers += leavers
            return
        for request in leavers:
            self._release_blocks(request)

    # -- taking an answer

    def update(self, output: ModelRunnerOutput) -> StepResult:
        """Apply the answer to the oldest step in flight. Requests that ended have their ``finish_reason`` set.

        Raises:
            InternalError: it is not the answer to that step.
        """
        step = self._take_step(output)
        self.begun = []
        failed: list[tuple[Request, RowError]] = []
        for error in output.errors:
            request = step.batch[error.batch_idx]
            if request.finish_reason is None:
                self.finish(request, FinishReason.ERROR)
                failed.append((request, error))
        if output.counts is None:
            sampled = self._commit(step, output.token_ids)
            num_rows = len(sampled)
        else:
            sampled, num_rows = self._commit_ragged(step, output.token_ids, output.counts)
        pooled = [] if output.pooled is None else self._commit_pooled(step, output.pooled)
        for request in step.leavers:
            self._release_blocks(request)
        return StepResult(sampled, failed, pooled, num_rows)

    def _commit(self, step: InFlightStep, column: array[int]) -> list[tuple[Request, int, int]]:
        """One token for each request, or -1."""
        sampled: list[tuple[Request, int, int]] = []
        batch_idx = -1
        for request, token_id in zip(step.batch, column, strict=True):
            batch_idx += 1
            if request.finish_reason is not None:  # sampled past its end
                continue
            if token_id < 0:
                self._kv.note_written(request, step.chunks.get(batch_idx, 0))
                continue
            token_ids = request.token_ids
            token_ids.append(token_id)
            sampled.append((request, token_id, batch_idx))
            if len(token_ids) == request.milestone or token_id in request.stop_token_ids:
                self._pass_milestone(request, token_id)
        return sampled

    def _commit_ragged(
        self, step: InFlightStep, column: array[int], counts: Sequence[int]
    ) -> tuple[list[tuple[Request, int, int]], int]:
        """``counts[i]`` tokens for request i; and how many requests got some."""
        sampled: list[tuple[Request, int, int]] = []
        num_rows = end = 0
        for batch_idx, (request, count) in enumerate(zip(step.batch, counts, strict=True)):
            begin, end = end, end + count
            if request.finish_reason is not None:
                continue
            if batch_idx in step.chunks:
                self._kv.note_written(request, step.chunks[batch_idx])
            num_rows += count > 0
            places = range(begin, end)
            sampled += [(request, column[place], place) for place in places if self._append(request, column[place])]
            if batch_idx in step.drafts and request.req_idx >= 0:
                self._settle(request, 1 + len(step.drafts[batch_idx]) - count)
        return sampled, num_rows

    def _append(self, request: Request, token_id: int) -> bool:
        """False: the request has ended, and this one was sampled past its end."""
        if request.finish_reason is not None:
            return False
        request.token_ids.append(token_id)
        if len(request.token_ids) == request.milestone or token_id in request.stop_token_ids:
            self._pass_milestone(request, token_id)
        return True

    def _settle(self, request: Request, num_rejected: int) -> None:
        """A step in which it had drafts was answered: it has computed so many tokens less than was counted."""
        rows, rejected = self._settled
        rows.append(request.req_idx)
        rejected.append(num_rejected)
        request.num_computed_tokens -= num_rejected
        if request.status is _DRAINING and request.num_computed_tokens < request.max_num_tokens - 1:
            self._decoding.refresh()
            request.status = _DECODING
            self._set_limit(request)
            self._decoding.join([request])

    def _commit_pooled(self, step: InFlightStep, columns: PooledColumns) -> list[tuple[Request, array[float]]]:
        """A vector is all that these requests wait for."""
        pooled = []
        for batch_idx, vector in columns.vectors():
            request = step.batch[batch_idx]
            if request.finish_reason is None:
                self._kv.note_written(request, len(request.token_ids))
                self.finish(request, FinishReason.STOP)
                pooled.append((request, vector))
        return pooled

    def _take_step(self, output: ModelRunnerOutput) -> InFlightStep:
        """All of it is checked before anything is committed: afterwards the step is computed again, or never."""
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            wanted = f"step {self._in_flight[0].step_id}" if self._in_flight else "none"
            raise InternalError(f"the worker answered step {output.step_id}, but {wanted} is due")
        self._in_flight[0].check(output, self._vocab_size)
        return self._in_flight.popleft()

    def _pass_milestone(self, request: Request, token_id: int) -> None:
        """A stop token, the last token, the first one after (re)starting, or one past a full block."""
        num_tokens = len(request.token_ids)
        if num_tokens == request.milestone:
            # Its last token was sampled just now, so the KV of all before it is written, however many steps overlap.
            self._kv.note_written(request, num_tokens - 1)
            block_size = self._kv.block_size
            next_full = ((num_tokens - 1) // block_size + 1) * block_size
            if self._suspects and self._suspects.is_on_trial(request):
                next_full = num_tokens
            request.milestone = min(next_full + 1, request.max_num_tokens)
            if request.followers:
                self._release_followers(request)
        num_output = num_tokens - request.num_prompt_tokens
        if num_output == 1:
            self.begun.append(request)
        if token_id in request.stop_token_ids and num_output > request.params.min_tokens:
            self.finish(request, FinishReason.STOP)
        elif num_tokens == request.max_num_tokens:
            self.finish(request, FinishReason.LENGTH)

    def check(self) -> None:
        """Assert what must hold between any two calls. Costs a walk over everything: for tests, and for idle times."""
        check_scheduler(self)


def _draft_columns(num_reqs: int, drafts: dict[int, list[int]]) -> DraftColumns:
    counts, token_ids = int32(bytes(4 * num_reqs)), int32()
    for batch_idx in sorted(drafts):
        counts[batch_idx] = len(drafts[batch_idx])
        token_ids.extend(drafts[batch_idx])
    return DraftColumns(counts, token_ids)
