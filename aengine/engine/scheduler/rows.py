"""Rows on the worker, the requests that have them, and the steps in flight: what planning and answers share.

All of it is as of the newest step made. A row that is left is told as ``removed`` in the next one, and may be given
anew in that same step. Blocks that are left are freed when the newest step made so far has been answered.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

from ...ipc.messages import KVCacheGroup, int32
from .coming_prefixes import ComingPrefixes
from .decode_batches import DecodeBatches
from .kv_cache_manager import KVCacheManager, long_root
from .request import Request, RequestStatus
from .step import NOT_SETTLED, InFlightStep

__all__ = ["Rows"]

_CATCHING_UP, _DECODING, _DRAINING = RequestStatus.CATCHING_UP, RequestStatus.DECODING, RequestStatus.DRAINING


class Rows:
    """The rows of one worker. ``on_free`` gets each unfinished request that has left its row, once no step in flight
    uses its blocks, and those that need not wait for a prefix any more."""

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
    ) -> None:
        self.num_rows = num_rows
        self._num_batches = num_batches
        self.running: set[Request] = set()  # all requests with a row
        self.held: set[Request] = set()
        self.num_preemptions = 0
        self.num_drafts = self.num_drafted = self.num_accepted = 0  # see `ReplicaStatistics`
        self._kv_groups = kv_groups
        self._max_num_batched_tokens = max_num_batched_tokens
        self._on_free = on_free
        self._rope_border = rope_border
        self._least_awaited = least_awaited
        self.begin_worker(num_blocks)

    def begin_worker(self, num_blocks: int) -> None:
        """Reset the state for a new worker: all rows and blocks are free, and no step is in flight."""
        self.kv = KVCacheManager(num_blocks, self._kv_groups, self._max_num_batched_tokens)
        self.prefixes = ComingPrefixes(self.kv, self._on_free, self._least_awaited)
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        self.removed: list[int] = []  # rows that the next step tells the worker to remove
        self.settled = NOT_SETTLED  # rows whose drafts were answered, and how many were rejected: for the next step
        self.batches = DecodeBatches(self._num_batches)
        self.catching_up: list[Request] = []
        self.in_flight: deque[InFlightStep] = deque()

    def choose_rope(self, request: Request) -> None:
        """Note whether the request is longer than the model's rope border, before it gets a row: then its KV differs
        from that of the same tokens in a shorter request."""
        border = self._rope_border
        if border is not None and not request.is_long and len(request.token_ids) > border:
            request.is_long = True
            request.block_hashes = []
            if request.root_hash is not None:
                request.root_hash = long_root(request.root_hash)

    def crossing(self, due: list[Request]) -> list[Request]:
        """Return the requests, of ``due`` and of those that catch up, whose next token is the first beyond the rope
        border. They must be computed anew (`restart`)."""
        border = self._rope_border
        if border is None:
            return []
        return [
            request
            for request in (*due, *self.batches.here(self.catching_up))
            if not request.is_long and not request.is_paused
            if border <= request.num_computed_tokens < request.max_num_tokens - 1
        ]

    def room_for_drafts(self, request: Request) -> int:
        """Return the most drafts that the request's next step may have: its last token must be sampled, and no draft
        may lie beyond the rope border."""
        most = request.max_num_tokens - 1
        if self._rope_border is not None and not request.is_long:
            most = min(most, self._rope_border)
        return max(0, most - 1 - request.num_computed_tokens)

    def take(self, request: Request) -> None:
        """Give the request a row, in the current batch."""
        request.req_idx = self.free_rows.pop()
        self.batches.add(request)
        request.status = _CATCHING_UP
        self.catching_up.append(request)
        self.running.add(request)

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

    def set_limit(self, request: Request) -> None:
        request.limit = min(self.kv.room(request), request.max_num_tokens - 1)
        if self._rope_border is not None and not request.is_long:
            request.limit = min(request.limit, self._rope_border)

    def preempt(self, request: Request) -> None:
        """Take the row and the blocks of a request for another one. It will be computed again."""
        self.num_preemptions += 1
        self.restart(request)

    def restart(self, request: Request) -> None:
        """Take the request's row. After its answers in flight it returns to the queue, and is computed anew in another
        row."""
        status, request.status = request.status, RequestStatus.HELD
        self.held.add(request)
        self.leave(request, status)

    def leave(self, request: Request, status: RequestStatus) -> None:
        """Free the row of a request whose status was ``status``; its blocks are freed after the newest step."""
        self.running.discard(request)
        self.batches.of(request).num_rows -= 1
        if request.is_leading:
            self.prefixes.leave(request)
        self.removed.append(request.req_idx)
        self.free_rows.append(request.req_idx)
        request.req_idx = -1
        if status is _DECODING:
            self.batches.of(request).leave()
        elif status is _CATCHING_UP:
            self.catching_up.remove(request)
        # The newest step, not the request's own last one: a step later than need be at most, and nothing to count.
        if self.in_flight:
            self.in_flight[-1].leavers.append(request)
        else:
            self.release(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a request that no step in flight uses any more."""
        self.kv.release(request)
        request.forget_worker()
        if request.finish_reason is None:
            self.held.discard(request)
            self._on_free(request)

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Count the request's drafts of a step that was answered."""
        request.num_drafted += num_drafted
        request.num_accepted += num_accepted
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def settle(self, request: Request, num_rejected: int) -> None:
        """Note that ``num_rejected`` of the request's drafts were rejected: so many tokens fewer are computed than were
        counted."""
        self.tell_settled(int32([request.req_idx]), int32([num_rejected]))
        request.num_computed_tokens -= num_rejected
        if request.status is _DRAINING and request.num_computed_tokens < request.max_num_tokens - 1:
            self.batches.of(request).refresh()
            self.join([request])

    def tell_settled(self, rows: array[int], num_rejected: array[int]) -> None:
        """Tell the worker in the next step how many drafts of these rows were rejected."""
        self.settled = self.settled[0] + rows, self.settled[1] + num_rejected

    def preempt_all(self) -> None:
        """Put all unfinished requests back into the queue, and reset the state for a new worker."""
        leaving = [request for step in self.in_flight for request in step.leavers]
        unfinished = (*self.running, *self.held, *self.prefixes.waiting)
        for request in (*unfinished, *leaving):
            request.forget_worker()
        self.running.clear()
        self.held.clear()
        self.begin_worker(self.kv.pool.num_blocks)
        for request in unfinished:
            self._on_free(request)
