"""Finding stop strings in a text that comes in pieces, without ever letting out a part of one.

An Aho-Corasick automaton over characters. A state is the longest end of the text so far that begins some stop string;
its depth is the number of characters that must be held back. Stops ("ab", "b!"), states drawn as what they stand for:

    ""  --a-->  "a"  --b-->  "ab"*          * completes a stop string
    ""  --b-->  "b"  --!-->  "b!"*

The match that is complete first wins; of several complete at the same character, the longest. So the answer does not
depend on how the text was cut into tokens.
"""

from __future__ import annotations

from collections import deque

__all__ = ["StopSearch", "StopStrings"]


class StopStrings:
    """The automaton; immutable. A few microseconds to build for stop strings of the usual length."""

    __slots__ = ("depths", "first_chars", "matches", "moves")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert stops and all(stops), "stop strings must not be empty"
        self.moves: list[dict[str, int]] = [{}]  # state -> character -> state; a character not named leads to 0
        self.depths = [0]
        self.matches = [0]  # length of the longest stop string that ends in this state; 0: none
        for stop in stops:
            self._add(stop)
        self.first_chars = frozenset(self.moves[0])
        self._complete()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.moves[state].get(char)
            if following is None:
                following = self.moves[state][char] = len(self.moves)
                self.moves.append({})
                self.depths.append(self.depths[state] + 1)
                self.matches.append(0)
            state = following
        self.matches[state] = len(stop)

    def _complete(self) -> None:
        """Breadth first: give each state the moves of its fallback, the longest state that is a proper end of it."""
        fallback = [0] * len(self.moves)
        queue = deque(self.moves[0].values())
        while queue:
            state = queue.popleft()
            inherited = self.moves[fallback[state]]
            own = self.moves[state]
            for char, following in own.items():
                fallback[following] = inherited.get(char, 0)
                queue.append(following)
            self.moves[state] = {**inherited, **own}
            self.matches[state] = self.matches[state] or self.matches[fallback[state]]


class StopSearch:
    """One text on its way through the automaton."""

    __slots__ = ("_held", "_include_stop", "_likely_state", "_state", "_stops", "found")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool) -> None:
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""  # as long as the state is deep
        self._likely_state: int | None = None  # after what `would_stop` was told; None: nothing since `put`
        self.found = False

    def put(self, text: str) -> str:
        """More of the text; returns what of it, and of what was held, belongs to no stop string."""
        self._likely_state = None
        stops, state = self._stops, self._state
        if not state and stops.first_chars.isdisjoint(text):
            return text
        if self.found:
            return ""
        moves, matches = stops.moves, stops.matches
        whole = self._held + text
        position = len(self._held)
        for char in text:
            position += 1
            state = moves[state].get(char, 0)
            if matches[state]:
                self.found = True
                self._state, self._held = state, ""
                return whole[: position if self._include_stop else position - matches[state]]
        self._state = state
        certain = len(whole) - stops.depths[state]
        self._held = whole[certain:]
        return whole[:certain]

    def would_stop(self, text: str) -> bool:
        """Whether a stop string would be complete if ``text`` came next; the following call goes on from there."""
        stops = self._stops
        state = self._state if self._likely_state is None else self._likely_state
        for char in text:
            state = stops.moves[state].get(char, 0)
            if stops.matches[state]:
                return True
        self._likely_state = state
        return False

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string."""
        held, self._held, self._state, self._likely_state = self._held, "", 0, None
        return held
