"""Which requests compute how many tokens in the next step. A pure function of its state: no clock, no I/O, no tensors.

    add_request ──> waiting ──> rows: catching up ──> decoding ──> draining ──> gone
                       ^                  └─────────────┴── preempted, for want of a block
                       └─────────────────────────────────────────┘

    schedule()  step N+1 is made while step N is under way: a token that N samples counts as known, its id comes later
    lookahead   a request's next step computes and samples at several positions, and brings 1 to 1 + k tokens
    update()    the answers, in the order of the steps: ids are committed, stops found, a token past a stop is dropped;
                what was counted for tokens that did not come is taken back, and the worker is told with the next step

Order of a step: all that decode (one token each, the budget always covers them), then those that catch up, then the
waiting, each by (priority, arrival): lower and earlier first. The state of rows and
blocks is in rows.py, a step in the making in planning.py, an answer's way in answers.py. What keeps it right:

* A row that is left is told as ``removed`` in the next step made, and may be given anew in that same step.
* Blocks that are left are freed when the newest step made so far has been answered: no step in flight writes them.
* A preempted request waits for its answers in flight (HELD), then its prompt and output are computed again. So does one
  that grows past the model's rope border, up to which and beyond which KV differ.
* Only a less urgent request is preempted, so the most urgent one with a row always gets its blocks; every request fits
  into the pool alone (`max_tokens_capacity`); and one that lacks a block was given all that were free, so nobody is
  admitted past it. Hence all end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import InternalError
from ...ipc.messages import KVCacheGroup, ModelRunnerOutput, SchedulerOutput, kv_capacity
from ...outputs import FinishReason
from .answers import Answers, StepResult
from .block_pool import IdleBlocks
from .crash_quarantine import CrashQuarantine
from .kv_cache_manager import PreemptedKV, private_root, shared_root
from .kv_elsewhere import KVElsewhere
from .parallel_sampling import ParallelSampling
from .planning import StepPlan
from .request import Request, RequestStatus
from .rows import Rows, note_rows
from .step import InFlightStep
from .waiting_queue import ServingOrder

_DECODING = RequestStatus.DECODING


class Scheduler:
    """Owns the requests, the rows and the KV blocks of one worker group.

    ``num_blocks`` pages, which the ``kv_groups`` share; ``max_num_batched_tokens`` in one step. At most
    ``max_num_seqs`` requests have a row, and no more than the token budget covers, so that a request that decodes is in
    every step.
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
        rope_border: int | None = None,
        computes_whole_prompts: bool = False,
        least_awaited_prefix: int = 128,
        prompt_limit: Callable[[int, int], int | None] = lambda num_decoding, num_left: None,
        num_batches: int = 1,
        preempted: PreemptedKV | None = None,
        new_idle: Callable[[int], IdleBlocks] = IdleBlocks,
        elsewhere: KVElsewhere | None = None,
    ) -> None:
        """
        Args:
            rope_border: a request of more tokens than that has other KV for all of them (longrope)
            computes_whole_prompts: each prompt in one step
            least_awaited_prefix: tokens that another request must be computing for one to wait for them; a GPU computes
                fewer in no more time than the step that the waiting may cost
            prompt_limit: returns how many prompt tokens a step may have beside so many requests that decode, if the
                last step had no room for so many others; None: no fewer than ``max_num_batched_tokens`` allows
            num_batches: the requests with a row are divided among so many, whose steps follow each other: as many as
                ranks compute a step one after the other, so that a request's next token is not due before its last one
                has come through all of them
            preempted: what keeps the KV of preempted requests; None: nothing does
            new_idle: makes what says which idle block is given away first, for a pool of so many blocks
            elsewhere: what keeps KV beyond the pool, for whoever begins with it; None: nothing does
        """
        self.num_rows = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = ServingOrder().new_queue()
        limits = self.num_rows, num_blocks, kv_groups, max_num_batched_tokens
        kept, wait = (preempted, new_idle, elsewhere), lambda request: self.waiting.add(request)
        self.rows = Rows(*limits, wait, rope_border, least_awaited_prefix, num_batches, *kept)
        self.max_tokens_capacity = kv_capacity(kv_groups, num_blocks, max_model_len, max_num_batched_tokens)
        """Most tokens, prompt and completion, that one request may have; admission sees to it."""
        self.enable_prefix_caching = enable_prefix_caching
        self.max_in_flight_steps = max_in_flight_steps
        self._vocab_size = vocab_size  # an answer with an id of this or more is an error
        self._computes_whole_prompts = computes_whole_prompts
        self._prompt_limit = prompt_limit
        self._num_left = 0  # requests with prompt tokens for which the last step had no room

        self.parallel_sampling = ParallelSampling()
        self.quarantine = CrashQuarantine()
        self.answers = Answers(self.rows, self.quarantine, self.finish, self._release_dependents)
        self._num_added = 0
        self.num_constrained = 0  # unfinished requests with a grammar; preempted ones may still get tokens
        self._next_step_id = 0
        self.prefix_cache_queries = 0  # prompt tokens looked up in the prefix cache
        self.prefix_cache_hits = 0  # prompt tokens found in the prefix cache

    def drop_tables(self) -> None:
        """Free the state of blocks and steps, when nothing will be scheduled any more."""
        self.rows.begin_worker(0)
        self.rows.elsewhere.close()

    @property
    def oldest_step(self) -> InFlightStep | None:
        """The step whose answer comes next."""
        return self.rows.steps[0] if self.rows.steps else None

    @property
    def newest_step(self) -> InFlightStep | None:
        return self.rows.steps[-1] if self.rows.steps else None

    @property
    def num_running(self) -> int:
        return self.rows.num_running

    @property
    def num_waiting(self) -> int:
        rows = self.rows
        apart = len(rows.prefixes.waiting) + len(rows.elsewhere.waiting)
        return len(self.waiting) + len(self.parallel_sampling.waiting) + rows.num_held + apart

    @property
    def num_blocks(self) -> int:
        return self.rows.kv.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.rows.kv.pool.num_free

    # -- coming and going

    def add_request(self, request: Request) -> None:
        """Queue a request. Completions 1 .. n-1 of a call are added after index 0, whose prompt they share."""
        assert request.status is RequestStatus.NEW, f"{request} was added before"
        num_tokens = request.max_num_tokens - (not request.samples)  # a result needs no place in the KV cache
        assert num_tokens <= self.max_tokens_capacity, f"{request} does not fit into the KV cache"
        self._num_added += 1
        self.num_constrained += request.grammar is not None
        request.sort_key = (request.priority, request.arrival_time, self._num_added)
        name_prefix(self, request)
        if request.params.n > 1 and self.rows.kv.shares_prompt(request):
            if request.index == 0:
                self.parallel_sampling.add_first(request)
                if not self.enable_prefix_caching:
                    request.root_hash = private_root(self._num_added)
            elif self.parallel_sampling.wait_for_first(request):
                return
        self.waiting.add(request)
        self.rows.prefixes.announce(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state. Idempotent: the first reason counts."""
        if request.finish_reason is not None:
            return
        status = request.status
        request.finish_reason = reason
        if status is not RequestStatus.NEW:
            self.num_constrained -= request.grammar is not None
        request.status = RequestStatus.FINISHED
        self.quarantine.discard(request)
        self.rows.preempted.drop(request)
        if status is RequestStatus.WAITING:
            self.waiting.discard(request)
        elif status is RequestStatus.WAITING_FOR_PROMPT:
            self.parallel_sampling.discard(request)
        elif status is not RequestStatus.NEW:
            self.rows.leave(request, status)
        self._release_dependents(request)

    def _release_dependents(self, first: Request) -> None:
        for request in self.parallel_sampling.release(first):
            if request.root_hash == first.root_hash:  # hashing a long prompt once for each completion would take long
                request.block_hashes = first.block_hashes[: request.num_prompt_tokens // self.rows.kv.block_size]
            self.waiting.add(request)

    def pause(self, request: Request) -> None:
        """Leave a request that decodes out of the steps to come, until `resume`. It keeps its row and its blocks.
        Nothing happens if its last token is in flight."""
        if request.status is _DECODING and request.num_computed_tokens < request.max_num_tokens - 1:
            request.is_paused = True
            request.num_pauses += 1
            self.rows.stop_decoding(request)

    @staticmethod
    def resume(request: Request) -> None:
        request.is_paused = False

    def preempt_all(self, exception: str = "") -> list[Request]:
        """Begin anew with a new worker, which has no rows and no KV: every request will be computed again.
        ``exception``: what the last one raised, if it could say.

        Returns the unfinished requests that have killed the worker before, and others before it, as far as can be said.
        They should be finished.
        """
        in_flight = {request: None for step in self.rows.steps for request in step.batch}
        at_fault = self.quarantine.note_death(
            (request for request in in_flight if request.finish_reason is None), exception
        )
        self.rows.preempt_all()
        return at_fault

    # -- steps

    @property
    def is_steady(self) -> bool:
        """Whether the next step would only continue requests that decode: such a step can be undone."""
        rows = self.rows
        waiting = len(self.waiting) or rows.prefixes.waiting or self.parallel_sampling.waiting
        others = waiting or rows.elsewhere.waiting or rows.num_catching_up or rows.num_held or self.num_constrained
        return not others and rows.num_spare_blocks >= 0

    def schedule(self, *, can_be_undone: bool = False) -> SchedulerOutput | None:
        """Make the next step; None when there is nothing to compute before more answers or requests come.

        ``can_be_undone``: it changes nothing that can't be taken back. Only while `is_steady`.
        """
        rows = self.rows
        assert len(rows.steps) < self.max_in_flight_steps, "too many steps in flight"
        for _ in rows.batches:
            rows.batches.take_turns()
            output = self._schedule_batch(can_be_undone)
            if output is not None:
                return output
        return None

    def _schedule_batch(self, can_be_undone: bool) -> SchedulerOutput | None:
        """Make the next step of the current batch. None: it has nothing to compute."""
        rows = self.rows
        rows.order.begin_step()
        decoding = rows.batches.current.refresh()
        budget = prompt_budget = self.max_num_batched_tokens - len(decoding)
        num_waiting, num_catching_up = len(self.waiting), rows.num_catching_up
        if (num_waiting or num_catching_up) and decoding:
            limit = self._prompt_limit(len(decoding), self._num_left)
            if limit is not None:
                prompt_budget = limit
        plan = StepPlan(rows, budget, num_waiting, prompt_budget, can_be_undone=can_be_undone)
        due = [request for request in decoding if request.num_computed_tokens == request.limit]
        if due or num_catching_up:
            plan.serve_rows(due)
            decoding = rows.batches.current.refresh()
            num_waiting = len(self.waiting)  # preempted requests may have joined the queue
        for request in decoding:
            request.num_computed_tokens += 1
        if num_waiting:
            plan.admit(self.waiting, self.quarantine, whole_prompts=self._computes_whole_prompts)
            self.prefix_cache_queries += plan.num_cache_queries
            self.prefix_cache_hits += plan.num_cache_hits
        if not decoding and not plan.catching_up:
            return None
        step_id = self._next_step_id
        self._next_step_id = step_id + 1
        output = plan.make(step_id, has_grammars=self.num_constrained > 0)
        self._num_left = len(self.waiting) + rows.num_catching_up if plan.is_full else 0
        return output

    def update(self, output: ModelRunnerOutput) -> StepResult:
        """Apply the answer to the oldest step in flight. Requests that ended have their ``finish_reason`` set.

        Raises:
            InternalError: it is not the answer to that step. Then nothing was committed.
        """
        in_flight = self.rows.steps
        if not in_flight or in_flight[0].step_id != output.step_id:
            wanted = f"step {in_flight[0].step_id}" if in_flight else "none"
            raise InternalError(f"the worker answered step {output.step_id}, but {wanted} is due")
        token_ids = output.token_ids.tolist()  # converted once: a list is read faster than a column
        in_flight[0].check(output, token_ids, self._vocab_size)
        return self.answers.apply(in_flight.popleft(), output, token_ids)


def name_prefix(scheduler: Scheduler, request: Request) -> None:
    """Set the root of the request's block hashes, by which others find its prefix, if it shares it. Idempotent."""
    if scheduler.enable_prefix_caching and request.root_hash is None:
        request.root_hash = shared_root(request.cache_key)


def serve_by(scheduler: Scheduler, order: ServingOrder) -> None:
    """Serve the scheduler's requests by another order from now on."""
    note_rows(scheduler.rows, order)
    waiting, scheduler.waiting = scheduler.waiting, order.new_queue()
    for request in waiting:
        scheduler.waiting.add(request)
