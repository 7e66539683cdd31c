"""When a step loop may give steps, and who watches the workers that compute them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..recovery import Watchdog
from ..scheduler.crash_quarantine import CrashQuarantine


class Peers(Protocol):
    """The other replicas, of which a step loop's workers may need those workers for each step: interface of what it
    asks before a step, and tells of it."""

    @property
    def name(self) -> str:
        """What logs and errors call the workers."""

    @property
    def is_independent(self) -> bool:
        """Whether the workers live and die, and drop steps, without those of other replicas."""

    @property
    def reports_deaths(self) -> bool:
        """Whether this replica counts and logs deaths of the workers; if not, another does."""

    def attach(self, quarantine: CrashQuarantine, work: asyncio.Event, watchdog: Watchdog) -> None:
        """Connect with a step loop. ``quarantine``: of its scheduler; ``work`` wakes it; ``watchdog``: of its workers,
        for whoever watches them alone."""

    @property
    def may_step(self) -> bool:
        """Whether a step may be made now; if not, the loop's ``work`` is set once it may be."""

    @property
    def watchdog(self) -> Watchdog:
        """The watchdog of the workers that compute the step loop's steps."""

    @property
    def generation(self) -> int:
        """A number that changes when the workers have died and when others have started."""

    def note_given(self, num_tokens: int) -> None:
        """Called when the loop has published a step of ``num_tokens`` tokens."""

    def note_answered(self) -> None:
        """Called when the loop has taken the answer of its oldest step."""

    def note_idle(self) -> None:
        """Called when the loop will publish no step before an answer comes or something wakes it."""


class NoPeers:
    """The peers of a step loop whose workers compute its steps alone: there are none, and it may always step."""

    may_step = is_independent = reports_deaths = True
    generation = 0
    watchdog: Watchdog

    def __init__(self, name: str = "the worker") -> None:
        self.name = name

    def attach(self, quarantine: CrashQuarantine, work: asyncio.Event, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def note_given(self, num_tokens: int) -> None:
        self.watchdog.begin(num_tokens)

    def note_answered(self) -> None:
        self.watchdog.end()

    def note_idle(self) -> None:
        """Do nothing: no other step loop waits for this one."""
