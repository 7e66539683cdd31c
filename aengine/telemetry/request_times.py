"""Times at which a request arrived, ran, had its first token and ended."""

from __future__ import annotations

from time import perf_counter

from ..outputs import Timings
from .listeners import RequestReports


class RequestTimes:
    """The moments of one user call, as of `time.perf_counter`; None: not yet.

    ``is_logged``: whether its log records are shown, asked once when it arrived. ``reports``: to its listeners.
    """

    __slots__ = ("arrived", "ended", "first_token", "is_logged", "reports", "scheduled")

    def __init__(self, is_logged: bool = False) -> None:
        self.arrived = perf_counter()
        self.scheduled: float | None = None  # its first step was made
        self.first_token: float | None = None
        self.ended: float | None = None
        self.is_logged = is_logged
        self.reports: RequestReports | None = None

    def end(self) -> None:
        """Note that the request ends now."""
        self.ended = perf_counter()

    def timings(self, num_tokens: int) -> Timings:
        """Return the timings until now, or until its end. ``num_tokens``: of its longest completion."""
        arrived, scheduled, first, ended = self.arrived, self.scheduled, self.first_token, self.ended
        left_queue = ended if scheduled is None else scheduled
        return Timings(
            queued=None if left_queue is None else left_queue - arrived,
            prefill=None if first is None or scheduled is None else first - scheduled,
            first_token=None if first is None else first - arrived,
            per_token=None if first is None or ended is None or num_tokens < 2 else (ended - first) / (num_tokens - 1),
            total=None if ended is None else ended - arrived,
        )
