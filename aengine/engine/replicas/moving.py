"""Moves requests from one scheduler to another: what the prefix cache of another has of them, and how they leave.

A request that moves is computed again from the ids that the host holds, as after a worker's death; so its tokens are
those that it would have got where it was. Only requests without a row move: all of them when a worker has died, else
those that no step of this replica has had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..scheduler.request import Request, RequestStatus
from ..scheduler.scheduler import Scheduler, name_prefix

_MOVABLE = (RequestStatus.NEW, RequestStatus.WAITING, RequestStatus.WAITING_FOR_PROMPT, RequestStatus.FINISHED)


_BEGUN_ELSEWHERE = -1
"""The `next_check_len` of a request that was moved after it had had steps, until its next one."""


def num_cached(scheduler: Scheduler, request: Request) -> int:
    """Return how many leading tokens of a request, which is in no scheduler, this one has cached."""
    name_prefix(scheduler, request)
    scheduler.rows.rope.choose(request)
    return scheduler.rows.kv.match(request).length


def can_move(scheduler: Scheduler, requests: Iterable[Request]) -> bool:
    """Return whether all completions of a call can be taken out. Those stay that workers may have died of: they are
    tried one at a time, and where they have been all along."""
    return all(one.status in _MOVABLE and one not in scheduler.quarantine for one in requests)


def is_untouched(requests: Iterable[Request]) -> bool:
    """Return whether no step of their replica has had any completion of a call: of those that were in one, tokens may
    be on their way to their readers."""
    return all(one.next_check_len in (0, _BEGUN_ELSEWHERE) for one in requests if one.finish_reason is None)


def take_out(scheduler: Scheduler, requests: Sequence[Request]) -> list[Request]:
    """Take the completions of a call, which can be moved, out of their scheduler. Returns those that have not ended, as
    new to another one."""
    left = [request for request in requests if request.finish_reason is None]
    for request in reversed(left):  # the first completion is added last here, since the others wait for it
        if request.status is RequestStatus.WAITING:
            scheduler.waiting.discard(request)
        elif request.status is RequestStatus.WAITING_FOR_PROMPT:
            scheduler.parallel_sampling.discard(request)
        if request.status is not RequestStatus.NEW:
            scheduler.num_constrained -= request.grammar is not None
        scheduler.quarantine.discard(request)
        scheduler.rows.preempted.drop(request)
        scheduler.parallel_sampling.release(request)
        request.status = RequestStatus.NEW
        if request.has_begun:
            request.next_check_len = _BEGUN_ELSEWHERE
        request.root_hash, request.block_hashes, request.is_long = None, [], False
    return left


def waits_for_room(scheduler: Scheduler) -> bool:
    """Return whether the next request waits for others to end: for a row, or for blocks."""
    rows = scheduler.rows
    if not scheduler.waiting:
        return False
    needed = -(-len(scheduler.waiting.peek().token_ids) // rows.kv.block_size)
    return not rows.num_free or rows.num_spare_blocks < needed
