"""Prefixes that rows are computing, and the requests that wait for them rather than compute the same again.

    leader     cached | being computed .................... |
    follower   cached | the same tokens ........ | its own  |     WAITING_FOR_PREFIX
                      | at least `least`         ^ awaited: offered to others, the follower returns to the queue

A follower has no row and no blocks, so nobody is held up behind it. It returns to its place in the queue when an answer
has brought the tokens that it awaits, or when its leader leaves its row, for whatever reason; then it finds what is
cached by then, and may lead others itself. Prompts with a row come before the waiting in each step, so what it awaits
is all in flight: it waits for two steps, where computing the same tokens again would delay everybody.

With states a follower can go on only from a border at which its leader keeps them: the leader does so where the two
begin to differ, if its chunks have not passed that yet. So this is asked of the next request in the queue when a prompt
gets a row, and of each request that joins the queue meanwhile (`expect`).

A leader is found by the hash of the first blocks that it has not offered yet, which is computed when the next request
that might follow is to get a row. How far the two agree beyond these is seen from their tokens. A hash begins with its
root (see kv_cache_manager.py), so nobody waits for another tenant.
"""

from __future__ import annotations

from collections.abc import Callable

from ..kv_cache_manager import KVCacheManager, extend_hashes
from ..request import Request, RequestStatus


class ComingPrefixes:
    """Knows which prefixes the rows are computing, and which requests wait for them: only for ``least`` tokens or more.
    ``wake`` is called with each follower when it need not wait any longer."""

    def __init__(self, kv: KVCacheManager, wake: Callable[[Request], None], least: int) -> None:
        self.waiting: dict[Request, tuple[Request, int]] = {}  # leader of each follower, and tokens it awaits
        self._followers: dict[Request, list[Request]] = {}  # the followers of each leader
        self._leaders: dict[bytes, Request] = {}  # leaders by the hash of the tokens that they compute next
        self._names: dict[Request, bytes] = {}  # the hash under which each leader is found
        self._unnamed: dict[Request, None] = {}  # requests with a row and without a name (a dict, for its order)
        self._kv = kv
        self._hash_size = kv.block_size
        self._unit = kv.prefix_unit  # tokens; prefixes are shared in multiples of it; 0: they are not shared
        self._least = -(-least // self._unit) * self._unit if self._unit else 0
        self._wake = wake

    def lead(self, request: Request) -> None:
        """Note that the request has a row and computes its uncached tokens, for which others may wait."""
        if self._unit and len(request.token_ids) - self._num_found(request) >= self._least:
            self._unnamed[request] = None
            request.is_leading = True

    def _num_found(self, request: Request) -> int:
        """Return how many tokens of a prompt that is being computed others can take over already."""
        return request.states.num_found if self._kv.has_states else request.num_offered_tokens

    def _find_leaders(self) -> None:
        """Give the new leaders their names. If two have the same name, only the first one is followed."""
        for request in self._unnamed:
            found = self._num_found(request)
            name = self._name(request, found - found % self._unit + self._least)
            if name is not None and self._leaders.setdefault(name, request) is request:
                self._names[request] = name
        self._unnamed.clear()

    def follow(self, request: Request, num_cached: int) -> bool:
        """Make a request that is in no queue wait for a leader, if one computes enough of what comes after its
        ``num_cached`` tokens. False: it should compute them itself."""
        if request.num_reusable < num_cached + self._least:
            return False
        if self._unnamed:
            self._find_leaders()
        if not self._leaders:
            return False
        name = self._name(request, num_cached + self._least)
        leader = None if name is None else self._leaders.get(name)
        if leader is None:
            return False
        awaited = self._kv.num_coming(leader, _num_common(leader, request))
        if awaited < num_cached + self._least:  # the leader keeps its states before that (a model with states)
            return False
        request.status = RequestStatus.WAITING_FOR_PREFIX
        self.waiting[request] = leader, awaited
        self._followers.setdefault(leader, []).append(request)
        return True

    def announce(self, request: Request) -> None:
        """Note that the request joins the queue; with states, leaders plan to keep theirs where it begins to differ."""
        if self._kv.has_states:
            for leader in (*self._names, *self._unnamed):
                self.expect(leader, request)

    def expect(self, leader: Request, later: Request) -> None:
        """Have a request with a row keep its states where ``later``, which has none yet, begins to differ. Without
        states nothing needs to be known ahead."""
        if not self._unit or leader.root_hash is None or leader.root_hash != later.root_hash:
            return
        if leader.token_ids[: self._least] == later.token_ids[: self._least]:
            common = _num_common(leader, later)
            if common >= self._num_found(leader) + self._least:
                self._kv.num_coming(leader, common)

    def advance(self, request: Request) -> None:
        """Note that a chunk of the request's prompt was answered."""
        self._forget(request)
        if request in self._followers:
            self._wake_followers(request, self._num_found(request))
        if request.req_idx >= 0:
            self.lead(request)

    def leave(self, request: Request) -> None:
        """Note that a request which `is_leading` leaves its row, or that all of its prompt was answered."""
        request.is_leading = False
        self._forget(request)
        if request in self._followers:
            self._wake_followers(request, len(request.token_ids))

    def _wake_followers(self, leader: Request, num_tokens: int) -> None:
        """Wake the leader's followers that await at most its first ``num_tokens`` tokens."""
        for follower in self._followers.pop(leader):
            _, awaited = self.waiting[follower]
            if awaited <= num_tokens:
                del self.waiting[follower]
                self._wake(follower)
            else:
                self._followers.setdefault(leader, []).append(follower)

    def discard(self, request: Request) -> None:
        """Drop a request that ended while it waited."""
        leader, _ = self.waiting.pop(request)
        followers = self._followers[leader]
        followers.remove(request)
        if not followers:
            del self._followers[leader]

    def _forget(self, request: Request) -> None:
        if request in self._unnamed:
            del self._unnamed[request]
        elif request in self._names:
            del self._leaders[self._names.pop(request)]

    def _name(self, request: Request, end: int) -> bytes | None:
        """Return the hash of the request's first ``end`` tokens. None: it has fewer, or does not share them."""
        if request.root_hash is None or len(request.token_ids) < end:
            return None
        extend_hashes(request, end // self._hash_size, self._hash_size)
        return request.block_hashes[end // self._hash_size - 1]

    def check(self) -> None:
        """Assert that the dictionaries agree, and that every leader has a row."""
        assert {name: request for request, name in self._names.items()} == self._leaders
        leading = (*self._names, *self._unnamed, *self._followers)
        assert all(request.req_idx >= 0 and request.is_leading for request in leading)
        assert not self._names.keys() & self._unnamed.keys()
        pairs = {(request, leader) for leader, requests in self._followers.items() for request in requests}
        assert pairs == {(request, leader) for request, (leader, _) in self.waiting.items()}
        assert all(request.status is RequestStatus.WAITING_FOR_PREFIX for request in self.waiting)


def _num_common(leader: Request, later: Request) -> int:
    """Return how many leading tokens, but for the last of ``later``, have equal KV in requests of the same root."""
    one, other = leader.token_ids, later.token_ids
    low, high = 0, min(len(one), len(other) - 1)
    if leader.cache_key.placed != later.cache_key.placed:
        differing = set(leader.cache_key.placed) ^ set(later.cache_key.placed)
        high = min([high, *(position for position, _ in differing)])
    while low < high:  # invariant: the first ``low`` are equal, and no more than ``high`` are
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
