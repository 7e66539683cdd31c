"""Requests that workers may have died of, and their trials.

A worker's death says nothing of who caused it: all that were in its steps may have. Who was so at several deaths, and
hardly got a token in between, is a suspect. Suspects are let in first, and one at a time, until each has got a few
tokens; then it runs on beside the next. Of whom the worker dies again and again on trial, is condemned.

Workers may also be killed by something that has nothing to do with any request, and often. So only a death before the
second token counts (who kills by a prefill gets none in each life, who kills by a decode one), and a death without the
one on trial in a step speaks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .request import Request

__all__ = ["Suspects"]

_SUSPICIOUS_DEATHS = 2
_MOST_TRIALS = 4
_FEW_TOKENS = 4
"""Who gets so many has passed a prefill and some decode steps, and is no suspect any more."""
_DAMNING_TOKENS = 1
"""A death on trial after more than so many says nothing."""


class Suspects:
    """The first is, or comes next, on trial."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def first(self) -> Request:
        return self._queue[0]

    def note_death(self, in_flight: Iterable[Request]) -> list[Request]:
        """A worker died with these unfinished requests in its steps. Returns the condemned."""
        on_trial = self._queue[0] if self._queue else None
        present = list(in_flight)
        if on_trial is not None and on_trial not in present:
            on_trial.num_trials = 0
        for request in present:
            gained = len(request.token_ids) - request.num_tokens_at_death
            if gained >= _FEW_TOKENS:
                request.num_deaths = request.num_trials = 0
            request.num_tokens_at_death = len(request.token_ids)
            request.num_deaths += 1
            request.num_trials += request is on_trial and gained <= _DAMNING_TOKENS
            if request.num_deaths >= _SUSPICIOUS_DEATHS and request not in self._queue:
                self._queue.append(request)
        return [request for request in self._queue if request.num_trials >= _MOST_TRIALS]

    def is_on_trial(self, request: Request) -> bool:
        """Whether it is, still. It is not any more once it has got a few tokens."""
        if request not in self._queue:
            return False
        if len(request.token_ids) >= request.num_tokens_at_death + _FEW_TOKENS:
            self._queue.remove(request)
        return request in self._queue

    def drop(self, request: Request) -> None:
        """It has ended."""
        if request in self._queue:
            self._queue.remove(request)
