"""Finding stop strings in a text that comes in pieces, without ever letting out a part of one.

The stop string that is complete first ends the text; of several complete at the same character, the longest. So the
answer does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from bisect import bisect_right


class StopSearch:
    """One text that is searched for stop strings.

    Held back is the longest end of the text that begins a stop string. Most pieces have no character that begins one:
    they are passed on as they are. Others take a few lookups a character, however many stop strings there are.
    """

    __slots__ = ("_firsts", "_held", "_include_stop", "_lasts", "_lengths", "_likely", "_sorted", "_stops", "found")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool) -> None:
        self._stops = frozenset(stops)
        self._sorted = sorted(self._stops)
        self._lengths = sorted(set(map(len, stops)), reverse=True)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._lasts = frozenset(stop[-1] for stop in stops)
        self._include_stop = include_stop
        self._held = ""
        self._likely: str | None = None  # the text's end with what `would_stop` was told; None: nothing since `put`
        self.found: str | None = None  # the stop string that ended the text

    def put(self, text: str, *, may_stop: bool = True) -> str:
        """Add more of the text; return what of it, and of what was held, belongs to no stop string. Not ``may_stop``:
        one that is complete in it is passed over."""
        self._likely = None
        if self.found is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        whole = self._held + text
        end, length = self._first_match(whole, len(text)) if may_stop else (0, 0)
        if end:
            self.found, self._held = whole[end - length : end], ""
            return whole[: end if self._include_stop else end - length]
        certain = self._begin_of_held(whole)
        self._held = whole[certain:]
        return whole[:certain]

    def would_stop(self, text: str) -> bool:
        """Return whether a stop string would end with ``text``; the following call continues from there."""
        before = self._held if self._likely is None else self._likely
        whole = before + text
        self._likely = whole[max(0, len(whole) - self._lengths[0]) :]
        return self._first_match(whole, len(text))[0] > 0

    def flush(self) -> str:
        """End the text; return what was held back, which is no stop string."""
        held, self._held, self._likely = self._held, "", None
        return held

    def _first_match(self, whole: str, num_new: int) -> tuple[int, int]:
        """Return (end, length) of the first stop string that ends in the last ``num_new`` characters; or (0, 0)."""
        for end in range(len(whole) - num_new + 1, len(whole) + 1):
            if whole[end - 1] in self._lasts:
                for length in self._lengths:
                    if length <= end and whole[end - length : end] in self._stops:
                        return end, length
        return 0, 0

    def _begin_of_held(self, whole: str) -> int:
        """Return where the longest end of the text begins that is the beginning of a stop string."""
        for place in range(max(0, len(whole) - self._lengths[0] + 1), len(whole)):
            if whole[place] in self._firsts:
                begun = whole[place:]
                # In sorted order, the strings that begin with a text come right after it.
                following = bisect_right(self._sorted, begun)
                if following < len(self._sorted) and self._sorted[following].startswith(begun):
                    return place
        return len(whole)
