"""When a step loop may give steps, and who watches the workers that compute them."""

from __future__ import annotations

from typing import Protocol

from ..recovery import Watchdog

__all__ = ["OwnTurn", "Turn"]


class Turn(Protocol):
    """Interface of what a step loop asks before each step: others may depend on its steps (replicas/rounds.py)."""

    @property
    def is_open(self) -> bool:
        """Whether a step may be made now; if not, the loop's ``work`` is set once it may be."""

    @property
    def watchdog(self) -> Watchdog:
        """The one that watches all that compute together."""

    @property
    def generation(self) -> int:
        """A number that grows when these workers have gone, and when there are others."""

    def note_given(self, num_tokens: int) -> None:
        """The loop has made a step of so many tokens."""

    def note_answered(self) -> None:
        """The loop has taken the answer of its oldest step."""

    def rest(self) -> None:
        """The loop gives no step before it gets an answer, or is woken."""


class OwnTurn:
    """The turn of a step loop whose workers compute its steps alone: it is always open."""

    is_open = True
    generation = 0

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def note_given(self, num_tokens: int) -> None:
        self.watchdog.begin(num_tokens)

    def note_answered(self) -> None:
        self.watchdog.end()

    def rest(self) -> None:
        """Nobody waits for it."""
