"""`SaidTokens`: the tokens that each session's last turn had, so that the next one begins with the very same.

A chat's prompt is its messages as a text, encoded. What a model generates, encoded again, are mostly but not always the
tokens that it has generated: " wor" and "ld" come back as " world". From there on nothing of what was computed could be
taken over. So where both say the same, the prompt gets the tokens of the turn before:

    encoded     <|im_start|> assist ant \\n Hello  world   <|im_end|> \\n <|im_start|> user ...
    said        <|im_start|> assist ant \\n Hello  wor ld  <|im_end|>
    the prompt  <|im_start|> assist ant \\n Hello  wor ld  <|im_end|> \\n <|im_start|> user ...
"""

from __future__ import annotations

import secrets
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ...limits.bounds import MAX_KEEP, MAX_NAME_CHARACTERS, MAX_SAID_SESSIONS, MAX_SAID_TOKENS
from ...params import CallOptions
from ..tokenizer.known_text import NOTHING, KnownText
from ..tokenizer.tokenizer import Tokenizer
from ..tokenizer.traced_text import TracedText

_CHUNK = 1024
_FORK = "/"
"""What stands between the id of a session and what a fork of it adds."""

Session = tuple[bytes, str]
"""The salt and the id of a session."""


def session_of(options: CallOptions) -> Session | None:
    """Return the session whose turn a request is."""
    return None if options.session_id is None else ((options.cache_salt or "").encode(), options.session_id)


class Turn:
    """A turn of no session: of what was said before it nothing is known, and nothing is remembered of it."""

    def encode(self, tokenizer: Tokenizer, text: TracedText) -> list[int]:
        """Return the tokens of the turn's prompt. In a thread."""
        return NOTHING.encode(tokenizer, text)

    def begin(self, answer: Sequence[int]) -> None:
        """Remember what `encode` has encoded, and ``answer``, a list that grows with the answer."""


class SaidTurn(Turn):
    """A turn of a session."""

    def __init__(self, said: SaidTokens, session: Session, before: Said) -> None:
        self._said, self._session, self._before = said, session, before
        self._known, self._prompt = NOTHING, array("i")

    def encode(self, tokenizer: Tokenizer, text: TracedText) -> list[int]:
        before = self._before
        ids = before.known.encode(tokenizer, text)
        ids = with_tokens_of([*before.prompt, *before.answer], ids, tokenizer.token_bytes, tokenizer.special_ids)
        self._prompt, self._known = array("i", ids), KnownText.of(tokenizer, text, ids)
        return ids

    def begin(self, answer: Sequence[int]) -> None:
        self._said.note(self._session, Said(self._prompt, answer, self._known))


@dataclass(frozen=True, slots=True)
class Said:
    """What a session's turn has said."""

    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    known: KnownText = NOTHING
    has_ended: bool = False
    noted_at: float = 0.0  # seconds of the clock

    @property
    def num_tokens(self) -> int:
        """Those that are counted: an answer under way is also the request's own."""
        return len(self.prompt) + (len(self.answer) if self.has_ended else 0)


_NOTHING = Said()


class SaidTokens:
    """Remembers what the sessions have said that had a turn last, for no longer than KV can be kept for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns: OrderedDict[Session, Said] = OrderedDict()
        self._num_tokens = 0

    def turn(self, session: Session | None) -> Turn:
        """Return a turn that comes now."""
        return Turn() if session is None else SaidTurn(self, session, self.before(session))

    def before(self, session: Session) -> Said:
        """Return the last turn, as far as it has come; of a fork without a turn that of the session that it was made
        of."""
        salt, name = session
        found = self._turns.get(session) or self._turns.get((salt, name.rpartition(_FORK)[0]))
        return _NOTHING if found is None else found

    def note(self, session: Session, said: Said) -> None:
        """Remember a turn that begins or has ended, and forget those that nobody comes back to."""
        self.forget(session)
        now = self._clock()
        self._turns[session] = replace(said, noted_at=now)
        self._num_tokens += said.num_tokens
        while self._num_tokens > MAX_SAID_TOKENS or len(self._turns) > MAX_SAID_SESSIONS:
            self.forget(next(iter(self._turns)))
        for oldest in list(takewhile(lambda one: self._turns[one].noted_at < now - MAX_KEEP, self._turns)):
            self.forget(oldest)

    def end(self, session: Session | None, answer: Sequence[int]) -> None:
        """Count the ``answer`` of a request that has ended, and keep it compactly, if it is of the last turn."""
        if session is not None and (said := self._turns.get(session, _NOTHING)).answer is answer:
            self.note(session, replace(said, answer=array("i", answer), has_ended=True))

    def forget(self, session: Session) -> None:
        """Forget what a session has said."""
        if (said := self._turns.pop(session, None)) is not None:
            self._num_tokens -= said.num_tokens


def new_id() -> str:
    """Return the id of a new session, which nobody can guess."""
    return f"session-{uuid.uuid4().hex}"


def fork_of(session_id: str) -> str:
    """Return the id of a fork, by which the session is found that it was made of."""
    fork = f"{session_id}{_FORK}{secrets.token_hex(4)}"
    return fork if len(fork) <= MAX_NAME_CHARACTERS else new_id()


def with_tokens_of(
    said: Sequence[int], ids: list[int], bytes_of: Callable[[int], bytes], special_ids: Collection[int]
) -> list[int]:
    """Return the tokens ``ids`` with those of ``said`` in the place of others that say the same, from the beginning on,
    as far as the two agree.

    Special tokens are never replaced, nor put in another's place.
    """
    place = place_said = 0
    while True:
        common = _num_common(ids, said, place, place_said)
        place, place_said = place + common, place_said + common
        end, end_said = _end_of_same_text(ids, said, place, place_said, bytes_of, special_ids)
        if end == place:
            return [*said[:place_said], *ids[place:]]
        place, place_said = end, end_said


def _num_common(ids: Sequence[int], said: Sequence[int], place: int, place_said: int) -> int:
    """Return how many tokens are the same from these places on."""
    most, num = min(len(ids) - place, len(said) - place_said), 0
    while num + _CHUNK <= most:
        if ids[place + num : place + num + _CHUNK] != said[place_said + num : place_said + num + _CHUNK]:
            break
        num += _CHUNK
    while num < most and ids[place + num] == said[place_said + num]:
        num += 1
    return num


def _end_of_same_text(
    ids: Sequence[int],
    said: Sequence[int],
    place: int,
    place_said: int,
    bytes_of: Callable[[int], bytes],
    special_ids: Collection[int],
) -> tuple[int, int]:
    """Return the last places up to which both have the same text from these on."""
    ends = i, j = place, place_said
    text = other = b""
    while True:
        if not text:
            if i == len(ids) or ids[i] in special_ids:
                return ends
            text, i = bytes_of(ids[i]), i + 1
        if not other:
            if j == len(said) or said[j] in special_ids:
                return ends
            other, j = bytes_of(said[j]), j + 1
        common = min(len(text), len(other))
        if not common or text[:common] != other[:common]:
            return ends
        text, other = text[common:], other[common:]
        if not text and not other:
            ends = i, j
