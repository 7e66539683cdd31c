"""`Proposing`: before each step guesses for all requests that decode are gathered, and those that pay are drafted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from time import monotonic

from ..delivery import Sampled
from ..pacing.steps_in_flight import StepsInFlight
from ..scheduler.request import Request, RequestStatus
from ..scheduler.scheduler import Scheduler
from ..scheduler.step import InFlightStep
from .budget import DraftBudget
from .drafts import Speculation
from .history import Chances, DraftHistory, Guess, PendingTokens
from .proposer import NewHistory

_MOST_TAKEN_IN = 8192  # tokens that are put into tables before a step, of all requests together: some 500 us
_MOST_VAIN_SHARE = 0.02  # searches for guesses take no more of the time, while none is drafted again and again
_LEAST_OF_A_STEP = (
    0.5  # share of a step's tokens that drafts must be expected to bring, for steps ahead to be taken back
)
_FREE_SEARCHES = 4  # searches in vain in a row, after which steps begin to be made without one
_MOST_DOUBLINGS = 6  # then 64 steps are made without a search: a text that can be guessed is found soon


class Proposing(Speculation):
    """Proposes drafts for requests that decode, from the histories of their tokens."""

    def __init__(
        self, scheduler: Scheduler, in_flight: StepsInFlight, budget: DraftBudget, name: str, new_history: NewHistory
    ) -> None:
        """``name``: under which the drafts are counted; ``new_history`` makes what is kept of a request."""
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._budget = budget
        self._name = name
        self._new_history = new_history
        self._chances = Chances()  # those of all requests
        self._answered_at = 0.0  # when the worker sent the last answer, in monotonic seconds
        self._was_busy = False  # there was more to compute then
        self._changed: dict[Request, None] = {}  # requests that got tokens since guesses were looked for
        self._began_at = 0.0  # when the search for guesses began that waits for queued steps to be cancelled; 0: none
        self._num_vain = 0  # searches in a row by which nothing was drafted
        self._num_to_skip = 0  # steps that are made without a search, but for what `_next_at` says
        self._next_at = 0.0  # after an answer that was sent then, guesses are looked for in any case; monotonic seconds

    def note_answer(self, step: InFlightStep, answered_at: float, sampled: Sampled) -> None:
        # What the host takes between two steps is part of the time, as far as the worker waits for it.
        if self._was_busy:
            self._budget.learn(step, answered_at - self._answered_at)
        self._answered_at, self._was_busy = answered_at, self._scheduler.num_running > 0
        self._changed |= dict.fromkeys(request for request, _, _ in sampled)

    def propose(self) -> bool:
        began_at = self._began_at or monotonic()
        rows = self._scheduler.rows
        # Those that come count as if they were in the step: a burst of them takes the drafts back at once.
        num_rows = rows.num_running + min(rows.num_free, self._scheduler.num_waiting)
        room = self._budget.room(num_rows)
        if room <= 0:
            self._changed, self._began_at = {}, 0.0
            return True
        waits_for_answers = self._budget.waits_for_answers(num_rows)
        may_be_rejected = any(not ahead.are_certain for step in rows.steps for ahead in step.ahead.values())
        if may_be_rejected and (waits_for_answers or self._in_flight.next_is_cancellable):
            return False
        if self._num_to_skip > 0 and self._answered_at < self._next_at:
            self._num_to_skip -= 1
            return True
        changed, self._changed = self._changed, {}
        guesses = self._guesses(changed, room)
        chances = [guess.chances for guess in guesses.values()]
        counts = self._budget.grant(num_rows, chances, is_gated=self._scheduler.num_constrained > 0)
        takes_back = self._in_flight.num_cancellable > 0
        if takes_back and _expected(chances, counts) < _LEAST_OF_A_STEP * num_rows:
            counts = [0] * len(counts)  # it takes the host longer to make the steps ahead once more
        granted = [request for request, count in zip(guesses, counts, strict=True) if count]
        must_wait = waits_for_answers and any(request.num_pending for request in granted)
        if granted and (takes_back or must_wait):
            self._in_flight.cancel_queued()  # steps ahead have one token each, at the places of the drafts
            self._changed, self._began_at = changed, began_at
            return False
        for (request, guess), count in zip(guesses.items(), counts, strict=True):
            if count:
                rows.lookahead.propose(request, guess.token_ids[:count], proposer=self._name)
        self._note_search(began_at, is_in_vain=not granted)
        return True

    def _note_search(self, began_at: float, *, is_in_vain: bool) -> None:
        """Set how many steps are made without a search: none while guesses are drafted, more with each search in vain,
        as long as searches take more than their share of the time. The time in which steps were cancelled counts."""
        ended_at, self._began_at = monotonic(), 0.0
        self._num_vain = self._num_vain + 1 if is_in_vain else 0
        doublings = self._num_vain - _FREE_SEARCHES
        self._num_to_skip = 1 << min(doublings, _MOST_DOUBLINGS) if doublings >= 0 else 0
        self._next_at = self._answered_at + (ended_at - began_at) / _MOST_VAIN_SHARE

    def _guesses(self, changed: dict[Request, None], most: int) -> dict[Request, Guess]:
        """Return what may come next in those of ``changed`` that decode."""
        guesses: dict[Request, Guess] = {}
        num_cancellable = self._in_flight.num_cancellable
        drafts: defaultdict[Request, list[list[int]]] = defaultdict(list)
        for step in self._scheduler.rows.steps:
            for place, ahead in step.ahead.items():
                drafts[step.batch[place]].append(ahead.token_ids)
        budget = _MOST_TAKEN_IN
        for request in changed:
            if request.status is not RequestStatus.DECODING or not request.params.speculation:
                continue
            history: DraftHistory | None = request.history
            if history is None:
                if budget <= 0:  # it gets one with a later token
                    continue
                history = request.history = self._new_history(request, Chances(self._chances))
                budget -= history.size
            budget -= history.take_in(request, budget)
            guess = history.guess(request, most, PendingTokens(drafts.get(request, ()), num_cancellable))
            if guess.token_ids:
                guesses[request] = guess
        return guesses


def _expected(chances: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """Return how many of the drafts are expected to be accepted, of so many of each request's guesses."""
    return sum(sum(accumulate(own[:count], mul)) for own, count in zip(chances, counts, strict=True))
