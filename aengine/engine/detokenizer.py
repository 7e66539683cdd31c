"""`Detokenizer`: token ids of one completion to its text, piece by piece; ends it at a stop string."""

from __future__ import annotations

from .stop_strings import StopSearch
from .token_text import IncrementalDecoder

__all__ = ["Detokenizer"]


class Detokenizer:
    """One completion's text. The joined answers of `put` and `flush` are the completion.

    Whole characters only, and never a part of a stop string: what might still become one is held back. Once a stop
    string is complete, ``stopped`` is True, the text before it has been returned, and nothing comes after.
    """

    __slots__ = ("_decoder", "_put", "_stops", "stopped")

    def __init__(self, decoder: IncrementalDecoder, stops: tuple[str, ...] = (), *, include_stop: bool = False) -> None:
        self._decoder = decoder
        self._put = decoder.put
        self._stops = StopSearch(stops, include_stop=include_stop) if stops else None
        self.stopped = False

    def put(self, token_id: int) -> str:
        """The text that is certain now; "" if none is."""
        text = self._put(token_id)
        if self._stops is None or not text:
            return text
        return self._search(text)

    def flush(self) -> str:
        """The completion has ended: what was held back, U+FFFD for an incomplete character."""
        text = self._decoder.flush()
        if self._stops is None:
            return text
        return self._search(text) + self._stops.flush()

    def _search(self, text: str) -> str:
        assert self._stops is not None
        if self.stopped:
            return ""
        text = self._stops.put(text)
        self.stopped = self._stops.found
        return text
