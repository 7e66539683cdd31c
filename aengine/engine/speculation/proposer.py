"""`Proposer`: the interface of what guesses tokens, and the names by which the setting ``speculation`` chooses one.

A package adds a proposer by an entry point, which names what makes one, a class or a function of (vocab_size):

    [project.entry-points."aengine.proposers"]
    mine = "mine.drafts:MyProposer"

``AsyncLLM(model, speculation="mine")`` then asks it. Whatever it returns, the output is the same. One that raises an
exception, returns what can't be, or takes long, is not asked any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from operator import index
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from ...errors import ModelLoadError
from ...limits.registry import PROPOSERS, target_of
from ...limits.speculation import NEEDS_MODEL, SpeculationSettings
from ..scheduler.request import Request
from .history import MOST_DRAFTS, NO_GUESS, NONE_CANCELLABLE, Chances, DraftHistory, Guess, PendingTokens, num_coming
from .suffix import PastTexts, SuffixHistory

logger = logging.getLogger("aengine")

_MOST_SECONDS = 0.002  # a proposer may take on average, on the engine's event loop
_NUM_AVERAGED = 16  # calls, of which that is the average
_NUM_LEFT_OUT = 2  # the slowest of these: a page fault, or another thread's turn, is not the proposer's


class Proposer(Protocol):
    """Guesses what comes next in texts. One object a replica of the model, called on the engine's event loop: the steps
    and whatever else runs there wait for it."""

    def begin(self, token_ids: list[int]) -> Any:
        """Return what is to be kept of a request. ``token_ids``: its prompt, and what it has got by now."""

    def propose(self, kept: Any, new_token_ids: list[int], most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may follow all that a request has; none: nothing is guessed.
        ``new_token_ids``: what it has got since the last call."""


class GuardedProposer:
    """A proposer of another package, as long as what it returns can be used."""

    def __init__(self, name: str, vocab_size: int, proposer: Proposer) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._proposer: Proposer | None = proposer
        self._seconds: deque[float] = deque(maxlen=_NUM_AVERAGED)  # what the last calls took

    def begin(self, token_ids: list[int]) -> Any:
        return self._ask(lambda proposer: proposer.begin(token_ids))

    def propose(self, kept: Any, new_token_ids: list[int], most: int) -> list[int]:
        return self._ask(lambda proposer: self._checked(proposer.propose(kept, new_token_ids, most), most)) or []

    def _checked(self, guess: Any, most: int) -> list[int]:
        if not isinstance(guess, Sequence | np.ndarray) or len(guess) > most:
            raise ValueError(f"it returned no list of at most {most} tokens")
        return [self._token(one) for one in guess]

    def _token(self, one: Any) -> int:
        token_id = index(one) if hasattr(one, "__index__") and not isinstance(one, bool) else -1
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"it returned {one!r:.80}, which is no token of the model")
        return token_id

    def _ask(self, question: Callable[[Proposer], Any]) -> Any:
        if self._proposer is None:
            return None
        begun = perf_counter()
        try:
            answer = question(self._proposer)
        except KeyboardInterrupt:  # it comes from outside, whatever runs
            raise
        except BaseException as error:  # a SystemExit would end the loop of the application
            self._give_up(f"{type(error).__name__}: {error!s:.200}")
            return None
        self._seconds.append(perf_counter() - begun)
        if self._seconds[-1] > _MOST_SECONDS:
            counted = sorted(self._seconds)[:-_NUM_LEFT_OUT]
            if counted and (mean := sum(counted) / len(counted)) > _MOST_SECONDS:
                self._give_up(f"it takes {1e3 * mean:.1f} ms a call on the event loop")
        return answer

    def _give_up(self, reason: str) -> None:
        self._proposer = None
        logger.warning("The proposer of drafts %r is not asked any more: %s", self._name, reason)


class ProposedHistory(DraftHistory):
    """What a proposer of another package keeps of one request."""

    __slots__ = ("_expected", "_kept", "_num_seen", "_proposer")

    def __init__(self, request: Request, chances: Chances, proposer: GuardedProposer) -> None:
        super().__init__(request, chances)
        self._proposer = proposer
        self._kept = proposer.begin(list(request.token_ids))
        self._num_seen = len(request.token_ids)
        self._expected: list[int] = []  # the guess of what follows the tokens seen

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: all guesses are compared when more tokens are known, also those that were drafted."""

    def guess(self, request: Request, most: int, pending: PendingTokens = NONE_CANCELLABLE) -> Guess:
        new, most = request.token_ids[self._num_seen :], min(most, MOST_DRAFTS)
        pairs = list(zip(self._expected, new, strict=False))
        num_right = next((i for i, (first, second) in enumerate(pairs) if first != second), len(pairs))
        self.chances.note(MOST_DRAFTS, num_right, num_right < len(pairs))
        self._num_seen = len(request.token_ids)
        self._expected = self._proposer.propose(self._kept, new, request.num_pending + most)
        ahead = num_coming(request, pending, self._expected)
        following = self._expected[ahead : ahead + most]
        if not following:
            return NO_GUESS
        chance = self.chances.of(MOST_DRAFTS)
        return Guess(following, [chance ** (1 + ahead), *[chance] * (len(following) - 1)])


NewHistory = Callable[[Request, Chances], DraftHistory]
"""Makes what is kept of a request."""

_HISTORIES: dict[str, Callable[[SpeculationSettings], NewHistory]] = {
    **dict.fromkeys(("ngram", "suffix"), lambda chosen: SuffixHistory),
    "suffix_past": lambda chosen: partial(SuffixHistory, past=PastTexts()),
    "ngram_worker": lambda chosen: DraftHistory,
    **dict.fromkeys(NEEDS_MODEL, lambda chosen: partial(DraftHistory, most=chosen.tokens)),
}
"""What each method of ours makes the histories of requests with; any other name is an entry point."""


def import_proposer(name: str) -> None:
    """Import what `new_history` needs, so that it can be called on a loop. Blocking. Raises ModelLoadError."""
    if target := target_of(PROPOSERS, name):
        _made(name, EntryPoint(name, target, PROPOSERS).load)


def new_history(chosen: SpeculationSettings, vocab_size: int) -> NewHistory:
    """Return what makes the histories of requests for the setting ``speculation``. Raises ModelLoadError when another
    package's proposer can't be made."""
    name = chosen.method
    if make := _HISTORIES.get(name):
        return make(chosen)
    entry = EntryPoint(name, target_of(PROPOSERS, name) or "", PROPOSERS)
    proposer = _made(name, lambda: entry.load()(vocab_size))
    return partial(ProposedHistory, proposer=GuardedProposer(name, vocab_size, proposer))


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever another package may raise: a SystemExit would end the application
        message = f"the proposer of drafts {name!r} can't be made: {type(error).__name__}: {error!s:.300}"
        raise ModelLoadError(message) from error
