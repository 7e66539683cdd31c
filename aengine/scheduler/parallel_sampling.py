"""The n completions of one call: 1 .. n-1 wait until the prompt of index 0 is computed, then hit its blocks.

    index 0   prompt ................ first token committed (or gone)
                                       │ its full prompt blocks are in the prefix cache
    index 1   FOLLOWING .............. └> WAITING -> finds them there, computes the tail of the prompt, samples

Where prefix caching is off, the call has a root hash of its own, so that it shares with itself and nobody else.
"""

from __future__ import annotations

from .request import Request, RequestStatus

__all__ = ["Siblings"]


class Siblings:
    """Who follows whom."""

    __slots__ = ("_leaders", "following")

    def __init__(self) -> None:
        self.following: set[Request] = set()
        self._leaders: dict[str, Request] = {}  # by request_id; until its prompt is computed

    def lead(self, request: Request) -> None:
        self._leaders[request.request_id] = request

    def follow(self, request: Request) -> bool:
        """Let it wait for its index 0. False: that one's prompt is computed already, or it is gone."""
        leader = self._leaders.get(request.request_id)
        if leader is None:
            return False
        request.root_hash = leader.root_hash
        request.status = RequestStatus.FOLLOWING
        leader.followers.append(request)
        self.following.add(request)
        return True

    def drop(self, follower: Request) -> None:
        """It ended while it waited."""
        self.following.discard(follower)
        self._leaders[follower.request_id].followers.remove(follower)

    def release(self, leader: Request) -> list[Request]:
        """Nobody need wait for this one any more. Returns those that did."""
        if self._leaders.get(leader.request_id) is not leader:
            return []
        del self._leaders[leader.request_id]
        followers, leader.followers = leader.followers, []
        self.following.difference_update(followers)
        return followers

    def check(self) -> None:
        """Assert that the two views agree."""
        followers = [follower for leader in self._leaders.values() for follower in leader.followers]
        assert len(followers) == len(self.following) and self.following == set(followers)
        assert all(follower.status is RequestStatus.FOLLOWING for follower in followers)
