"""The frames that a worker has taken and not handled yet, oldest first.

    ring ──> queue of frames ──> launched, at most max_in_flight_steps ──> answered
                   └── REVOKE, when it arrives: leased steps in the queue are dropped

Steps wait here, not on the device, which could not drop them: so what the host sends next comes soon, however many
steps it had leased before. Of several ranks the first leads, see `Lead`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

from ..ipc.lead import Lead
from ..ipc.messages import Kind


class Queued(NamedTuple):
    """A frame in the queue."""

    kind: Kind
    step_id: int
    message: Any


class StepQueue:
    """The queue of frames of one rank. Leased steps wait in it until the leading rank has begun them."""

    def __init__(self) -> None:
        self._frames: deque[Queued] = deque()
        self.lead: Lead | None = None
        """How far the first rank is; None: there are no other ranks."""
        self.leads = True
        """Whether this is the first rank."""

    def __len__(self) -> int:
        return len(self._frames)

    def look(self) -> bool:
        """Read how far the leading rank is. Frames that the host has published by then must be put here before the next
        frame is taken out. False: there are no other ranks."""
        if self.lead is None:
            return False
        self.lead.look()
        return True

    def put(self, frame: Queued) -> None:
        """Add a frame."""
        self._frames.append(frame)

    def next_frame(self, *, may_step: bool) -> Queued | None:
        """Return the oldest frame; None: there is none, or it is a step and ``may_step`` is False or the leading rank
        has not begun it."""
        if not self._frames:
            return None
        frame = self._frames[0]
        if frame.kind is Kind.STEP and (not may_step or not self._may_begin(frame)):
            return None
        return frame

    def _may_begin(self, step: Queued) -> bool:
        """Return whether the step can't be revoked any more, or this rank is the one that decides it."""
        return self.leads or self.lead is None or not step.message.is_leased or self.lead.has_begun(step.step_id)

    def pop(self) -> Queued:
        """Take out the oldest frame."""
        return self._frames.popleft()

    def note_begun(self, step_id: int) -> None:
        """Publish that this rank begins a step, if it leads."""
        if self.lead is not None and self.leads:
            self.lead.note_begun(step_id)

    def note_over(self) -> None:
        """Publish that this rank begins no other step, if it leads."""
        if self.lead is not None and self.leads:
            self.lead.note_over()

    @property
    def is_over(self) -> bool:
        """Whether steps are in the queue that the leading rank will never begin."""
        return bool(self._frames) and self.lead is not None and self.lead.is_over

    def revoke(self, dropped: list[int] | None) -> int:
        """Drop the leased steps that have not begun, and return their number. The host makes no other steps after them
        until it is answered.

        ``dropped``: the first and the last of those that the first rank has dropped; None: this is the first rank.
        """
        first, last = (0, math.inf) if dropped is None else dropped
        frames = self._frames
        kept = [f for f in frames if not (f.kind is Kind.STEP and f.message.is_leased and first <= f.step_id <= last)]
        self._frames = deque(kept)
        return len(frames) - len(kept)
