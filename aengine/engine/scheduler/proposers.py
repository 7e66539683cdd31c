"""Proposers of drafts: guesses of the tokens that a request gets next.

A guess costs its computation and changes no token: the worker samples after each drafted token, and keeps those that
agree with what it sampled (`Scheduler.propose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Request

__all__ = ["ForcedTokens", "Proposer"]


class Proposer(Protocol):
    def propose(self, request: Request) -> Sequence[int]:
        """Return ids that may follow what ``request`` has sampled, steps in flight included; an empty sequence: no
        guess."""


class ForcedTokens:
    """Proposes tokens that a request's grammar forces. They are always accepted."""

    def propose(self, request: Request) -> Sequence[int]:
        """Return the tokens found to be forced when the request's last bitmask was filled; each is proposed once."""
        grammar = request.grammar
        if grammar is None or not grammar.forced:
            return ()
        # The step in flight samples the first, as its bitmask allows nothing else.
        (_, *following), grammar.forced = grammar.forced, []
        return following
