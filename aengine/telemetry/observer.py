"""Reports on requests while they run and when they have ended: timings, log records, histograms, the user's hooks.

    Admission ── queued, ended ──> Observer ──> RequestTimes, "aengine.requests", Histograms, on_request_end, listeners
    StepLoop ─── scheduled, answers ──^

A step costs one look at the clock and one count; a request a dozen counts at its end. Records are made for requests
that arrived while the logger showed DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextvars import Context, copy_context
from time import perf_counter, time
from typing import TYPE_CHECKING

from ..outputs import FinishReason, RequestEnd
from .listeners import Kind, Listeners, RequestReports, RequestStart
from .metrics import HistogramCounts
from .request_times import RequestTimes

if TYPE_CHECKING:
    from ..engine.scheduler.request import Request
    from ..params import SamplingParams

logger = logging.getLogger("aengine.requests")

_ID_CHARACTERS = 200  # characters of a request's id that a log record shows


class Observer:
    """Observes the requests of one engine. ``on_request_end``: the user's, called once for each accepted request, as
    are those of ``listeners``."""

    def __init__(
        self, on_request_end: Callable[[RequestEnd], object] | None = None, listeners: Listeners | None = None
    ) -> None:
        self._on_request_end = on_request_end
        self._listeners = listeners or Listeners()
        self.histograms = HistogramCounts()
        self.num_ended = dict.fromkeys(FinishReason, 0)

    def new_times(self) -> RequestTimes:
        """Return the times of a request that arrives now."""
        return RequestTimes(logger.isEnabledFor(logging.DEBUG))

    def note_queued(
        self,
        request_id: str,
        params: SamplingParams,
        priority: int,
        times: RequestTimes,
        *,
        kind: Kind,
        context: Context | None,
    ) -> None:
        """Note that a request was registered. ``context``: the caller's, if somebody listened when it called."""
        if times.is_logged:
            text = "request %s: queued, max_tokens=%s, n=%d, priority=%d"
            _log(request_id, text, params.max_tokens, params.n, priority)
        listeners = self._listeners.all
        if listeners:
            arrived_at = time() - (perf_counter() - times.arrived)
            caller = copy_context() if context is None else context
            start = RequestStart(request_id, kind, params, priority, arrived_at, caller)
            times.reports = RequestReports(start, listeners)
            times.reports.accepted()

    def note_scheduled(self, requests: Iterable[Request]) -> None:
        """Note that the first step of these requests was made."""
        now = perf_counter()
        for request in requests:
            times = request.sink.times
            if times.scheduled is None:  # the first step of any of the n completions
                times.scheduled = now

    def note_answer(self, begun: Collection[Request], num_rows: int, before: float) -> float:
        """Note that a step was answered: ``num_rows`` requests got tokens, and those of ``begun`` their first one.
        ``before``: when the replica's last step was; returns when this was."""
        now = perf_counter()
        gap = now - before
        for request in begun:
            self._note_first_token(request, now)
        num_later = num_rows - len(begun)
        if num_later > 0:
            self.histograms.inter_token_latency.add(gap, num_later)
        return now

    def _note_first_token(self, request: Request, now: float) -> None:
        times = request.sink.times
        if times.first_token is not None:  # another of the n completions has had its first token
            return
        times.first_token = now
        if times.reports is not None:
            times.reports.first_token(times.timings(1))
        if times.is_logged:
            timings = times.timings(1)
            text = "request %s: first token after %.4f s, queued for %.4f s of them, prefilled in %.4f s"
            _log(request.request_id, text, timings.first_token, timings.queued, timings.prefill)

    def note_end(self, end: RequestEnd, times: RequestTimes) -> None:
        """Note that a request has ended, in whatever way."""
        self.num_ended[end.finish_reason] += 1
        self.histograms.add_request(end)
        if times.is_logged:
            _log_end(end)
        if times.reports is not None:
            times.reports.ended(end)
        if self._on_request_end is not None:
            try:
                self._on_request_end(end)
            except Exception:
                logger.exception("on_request_end failed for request %s", end.request_id)


def _log(request_id: str, text: str, *args: object) -> None:
    shown = request_id if request_id.isprintable() else ascii(request_id)[1:-1]  # ids may come out of an HTTP header
    logger.debug(text, shown[:_ID_CHARACTERS], *args, extra={"request_id": request_id})


def _log_end(end: RequestEnd) -> None:
    usage, error = end.usage, end.error
    timings = ", ".join(
        f"{name} {seconds:.4f} s"
        for name in ("queued", "prefill", "first_token", "per_token", "total")
        if (seconds := getattr(end.timings, name)) is not None
    )
    text = "request %s: %s after %d prompt tokens (%d cached) and %d generated; %s%s"
    why = "" if error is None else f"; {type(error).__name__}: {error}"
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    _log(end.request_id, text, end.finish_reason, *counts, timings, why)
