"""Rows on the worker, the requests that have them, and the steps in flight: what planning and answers share.

All of it is as of the newest step made. A row that is left is told as ``removed`` in the next one, and may be given
anew in that same step. Blocks that are left are freed when the newest step made so far has been answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...ipc.messages import KVCacheGroup
from .block_pool import IdleBlocks
from .decode_batches import DecodeBatches
from .kv_cache_manager import KVCacheManager, PreemptedKV, long_root, retired_root
from .kv_elsewhere import KVElsewhere
from .prefixes.coming_prefixes import ComingPrefixes
from .request import Request, RequestStatus
from .step import Lookahead, UnansweredSteps
from .waiting_queue import ServingOrder

_CATCHING_UP, _DECODING, _DRAINING = RequestStatus.CATCHING_UP, RequestStatus.DECODING, RequestStatus.DRAINING


class RopeBorder:
    """The number of tokens beyond which a request has other KV for all of them (longrope). None: no such border."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens

    def choose(self, request: Request) -> None:
        """Note whether the request is beyond the border, before it gets a row: then it shares no prefix with shorter
        ones."""
        border = self._num_tokens
        if border is not None and not request.is_long and len(request.token_ids) > border:
            request.is_long = True
            request.block_hashes = []
            if request.root_hash is not None:
                request.root_hash = long_root(request.root_hash)

    def crossing(self, requests: Iterable[Request]) -> list[Request]:
        """Return those whose next token is the first beyond the border. They must be computed anew (`Rows.restart`)."""
        border = self._num_tokens
        if border is None:
            return []
        return [r for r in requests if not r.is_long and border <= r.num_computed_tokens < r.max_num_tokens - 1]

    def limit(self, request: Request) -> int:
        """Return how many tokens the request may have computed before it ends or crosses the border."""
        most = request.max_num_tokens - 1
        return most if self._num_tokens is None or request.is_long else min(most, self._num_tokens)


class Rows:
    """The rows of one worker and the requests that have them. ``on_free`` gets each unfinished request that has left
    its row, once no step in flight uses its blocks, and those that need not wait for a prefix any more.

    Its parts have verbs of their own: ``kv``, ``prefixes``, ``batches``, ``steps``, ``rope``. Which request has which
    row, and which of them catch up, only the methods here change.
    """

    def __init__(
        self,
        num_rows: int,
        num_blocks: int,
        kv_groups: Sequence[KVCacheGroup],
        max_num_batched_tokens: int,
        on_free: Callable[[Request], None],
        rope_border: int | None = None,
        least_awaited: int = 128,
        num_batches: int = 1,
        preempted: PreemptedKV | None = None,
        new_idle: Callable[[int], IdleBlocks] = IdleBlocks,
        elsewhere: KVElsewhere | None = None,
    ) -> None:
        self.num_rows = num_rows
        self._num_batches = num_batches
        self.preempted = preempted or PreemptedKV()
        self.elsewhere = elsewhere or KVElsewhere()
        self.lookahead = Lookahead()
        self.order = ServingOrder()
        self.running: set[Request] = set()  # all requests with a row
        self.held: set[Request] = set()  # preempted requests whose blocks a step in flight uses
        self.num_preemptions = 0
        self._kv_groups = kv_groups
        self._new_idle = new_idle
        self._max_num_batched_tokens = max_num_batched_tokens
        self._on_free = on_free
        self.rope = RopeBorder(rope_border)
        self._least_awaited = least_awaited
        self.begin_worker(num_blocks)

    def begin_worker(self, num_blocks: int) -> None:
        """Reset the state for a new worker: all rows and blocks are free, and no step is in flight."""
        self.kv = KVCacheManager(num_blocks, self._kv_groups, self._max_num_batched_tokens, self._new_idle)
        self.preempted.begin_worker(num_blocks)
        self.elsewhere.begin_worker(self.kv, self._on_free)
        self.prefixes = ComingPrefixes(self.kv, self._on_free, self._least_awaited)
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        self.steps = UnansweredSteps()
        self.batches = DecodeBatches(self._num_batches)
        self.catching_up: list[Request] = []

    @property
    def num_running(self) -> int:
        """Number of requests with a row."""
        return len(self.running)

    @property
    def num_free(self) -> int:
        """Number of rows that nobody has."""
        return len(self.free_rows)

    @property
    def num_held(self) -> int:
        """Number of preempted requests that wait for answers before they can be computed again."""
        return len(self.held)

    @property
    def num_catching_up(self) -> int:
        return len(self.catching_up)

    @property
    def num_spare_blocks(self) -> int:
        """Number of free blocks beside those that all requests with a row need to grow by one each; perhaps < 0."""
        return self.kv.pool.num_free - len(self.running) * self.kv.num_growing

    def catching_up_now(self) -> list[Request]:
        """Return the requests that catch up in the current batch, but for paused and unsettled ones."""
        here = self.batches.here(self.catching_up)
        return [request for request in here if not request.is_paused and not request.is_unsettled]

    def take(self, request: Request) -> None:
        """Give the request a row, in the current batch."""
        request.req_idx = self.free_rows.pop()
        self.batches.add(request)
        request.status = _CATCHING_UP
        self.catching_up.append(request)
        self.running.add(request)
        self.order.note_row(request)

    def stop_decoding(self, request: Request) -> None:
        """Move a decoding request to those that catch up. It keeps its row and its blocks."""
        request.status = _CATCHING_UP
        self.catching_up.append(request)
        self.batches.of(request).leave()

    def drain(self, request: Request) -> None:
        """Take the request out of later steps: its last token is in flight."""
        request.status = _DRAINING
        self.batches.of(request).leave()

    def join(self, requests: list[Request]) -> None:
        """Let the requests, which are of one batch, decode from its next step on."""
        for request in requests:
            request.status = _DECODING
            self.set_limit(request)
        if requests:
            self.batches.of(requests[0]).join(requests)

    def caught_up(self, decoding: list[Request], draining: list[Request]) -> None:
        """Let requests whose known tokens are all computed go on: ``decoding`` sample their next token, ``draining``
        await their result."""
        for request in draining:
            self.drain(request)
        self.join(decoding)
        if decoding or draining:
            self.catching_up = [request for request in self.catching_up if request.status is _CATCHING_UP]

    def set_limit(self, request: Request) -> None:
        request.limit = min(self.kv.room(request), self.rope.limit(request))

    def preempt_for(self, request: Request) -> Request | None:
        """Take the row and the blocks of the last request in order; what is not kept of it will be computed again.
        None: that is ``request`` itself."""
        victim = self.order.last(r for r in self.running if r.status is not _DRAINING)
        if victim is request:
            return None
        self.num_preemptions += 1
        self.preempted.keep(victim)
        self.restart(victim)
        return victim

    def num_blocks_coming(self) -> int:
        """Return the most blocks that the answers in flight will free."""
        kv, running = self.kv, self.running
        leaving = [request for step in self.steps for request in step.leavers]
        leaving += [request for request in running if request.status is _DRAINING]
        coming = sum(map(kv.num_held, leaving))
        if self.steps and kv.has_windows:
            coming += sum(kv.num_leaving(request) for request in self.catching_up if not request.is_paused)
        if self.steps and kv.has_states:
            coming += sum(request.states.num_copied for request in running if request.status is not _DRAINING)
        return coming

    def restart(self, request: Request) -> None:
        """Take the request's row. After its answers in flight it returns to the queue, and is computed anew in another
        row."""
        status, request.status = request.status, RequestStatus.HELD
        self.held.add(request)
        self.leave(request, status)

    def leave(self, request: Request, status: RequestStatus) -> None:
        """Free the row of a request whose status was ``status``, if it has one; its blocks are freed after the newest
        step."""
        if status is RequestStatus.HELD:
            self.held.discard(request)
            return
        if status is RequestStatus.WAITING_FOR_PREFIX:
            self.prefixes.discard(request)
            return
        if status is RequestStatus.WAITING_FOR_PAGES:
            self.elsewhere.discard(request)
            return
        self.running.discard(request)
        self.order.note_left(request)
        self.batches.of(request).num_rows -= 1
        if request.is_leading:
            self.prefixes.leave(request)
        self.steps.remove_row(request.req_idx)
        self.free_rows.append(request.req_idx)
        request.req_idx = -1
        if status is _DECODING:
            self.batches.of(request).leave()
        elif status is _CATCHING_UP:
            self.catching_up.remove(request)
        # The newest step, not the request's own last one: a step later than need be at most, and nothing to count.
        if self.steps:
            self.steps[-1].leavers.append(request)
        else:
            self.release(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a request that no step in flight uses any more."""
        self.kv.release(request)
        self.lookahead.drop(request)
        request.forget_worker()
        if request.finish_reason is None:
            self.held.discard(request)
            self._on_free(request)

    def settle(self, request: Request, num_rejected: int) -> None:
        """Note that ``num_rejected`` tokens of the request fewer are computed than were counted. Where steps pass
        through several ranks, not all of which see what is sampled, the request's next step has waited for this."""
        self.steps.settle_rows((request.req_idx,), (num_rejected,))
        request.num_computed_tokens -= num_rejected
        if request.status is _DRAINING and request.num_computed_tokens < request.max_num_tokens - 1:
            self.batches.of(request).refresh()
            self.join([request])
        elif request.is_unsettled:
            request.is_unsettled = False
            self.caught_up([request], [])

    def preempt_all(self) -> None:
        """Put all unfinished requests back into the queue, and reset the state for a new worker."""
        leaving = [request for step in self.steps for request in step.leavers]
        unfinished = (*self.running, *self.held, *self.prefixes.waiting, *self.elsewhere.waiting)
        for request in self.running:
            self.order.note_left(request)
        for request in (*unfinished, *leaving):
            self.lookahead.drop(request)
            request.forget_worker()
        self.running.clear()
        self.held.clear()
        self.begin_worker(self.kv.pool.num_blocks)
        for request in unfinished:
            self._on_free(request)


def num_to_compute(rows: Rows) -> int:
    """Return how many known tokens those which catch up have yet to compute."""
    return sum(len(request.token_ids) - request.num_computed_tokens for request in rows.catching_up)


def note_rows(rows: Rows, order: ServingOrder) -> None:
    """Serve those with a row by another order."""
    rows.order = order
    for request in rows.running:
        order.note_row(request)


def forget_prefixes(rows: Rows, *, everywhere: bool = True) -> int:
    """Forget all cached prefixes; requests that are being computed go on, and nobody takes over what they compute.
    ``everywhere``: not in the pool alone. Returns how many blocks were known there."""
    for request in rows.running | rows.steps.requests():
        if request.is_leading:
            rows.prefixes.leave(request)
        if request.root_hash is not None:
            request.root_hash = retired_root(request.root_hash)
            request.block_hashes = []
            request.states.offered.clear()
    rows.preempted.drop_all()
    rows.elsewhere.forget(everywhere=everywhere)
    return rows.kv.pool.forget_all()


def recompute_all(rows: Rows) -> None:
    """Drop the KV of all requests that are computed, while no step is in flight; they return to the queue, and are
    computed again from their known ids."""
    assert not rows.steps, "steps are in flight"
    for request in list(rows.running):
        rows.restart(request)
