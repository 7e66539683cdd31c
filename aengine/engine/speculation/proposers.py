"""Proposers of drafts: guesses of the tokens that a request gets next.

A guess costs its computation and changes no token: the worker samples after each drafted token, and keeps those that
agree with what it sampled (`Scheduler.propose`).

    answer of step N ──> note_tokens ──> propose ──> Scheduler.propose ──> drafts of step N + 2
                                            step N + 1 is in flight: a draft follows the tokens that it samples
"""

from __future__ import annotations

from collections.abc import Sequence

from ..delivery import Sampled
from ..scheduler.request import Request

__all__ = ["ForcedTokens", "Speculation"]


class Speculation:
    """Drafts nothing. What does has the same verbs, which the step loop calls."""

    def note_tokens(self, sampled: Sampled) -> None:
        """Called with the tokens of each answer."""

    def propose(self) -> bool:
        """Called before a step is made: propose drafts for it to the scheduler. What a grammar forces was proposed
        before, and stays. False: no step can be made now, as some in flight are being taken back for drafts."""
        return True


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
