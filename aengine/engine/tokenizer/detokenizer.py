"""`Detokenizer`: token ids of one completion to its text, piece by piece; ends it at a stop string."""

from __future__ import annotations

from .stop_strings import StopSearch
from .token_text import IncrementalDecoder


class Detokenizer:
    """One completion's text. The joined answers of `put` and `flush` are the completion.

    Whole characters only, and never a part of a stop string: what might still become one is held back. Once a stop
    string is complete, ``stopped`` is True, the text before it has been returned, and nothing comes after. One that is
    complete within the first ``min_tokens`` tokens is text as any.
    """

    __slots__ = ("_decoder", "_markers", "_min_tokens", "_num_passed", "_num_tokens", "_put", "_stops", "stopped")

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        markers: frozenset[int] = frozenset(),
    ) -> None:
        self._decoder = decoder
        self._put = decoder.put
        self._stops = StopSearch(stops, include_stop=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._markers = markers
        self._num_tokens = 0  # tokens so far; counted only if there are stop strings
        self._num_passed = 0  # likely characters of the first `min_tokens` tokens that have not become certain
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text; None: none has."""
        return None if self._stops is None else self._stops.found

    def put(self, token_id: int) -> str:
        """Add a token; return the text that is certain now, "" if none is."""
        text = self._put(token_id)
        if self._stops is None:
            return text
        self._num_tokens += 1
        if text:
            return self._search(text)
        # A stop string may be complete in text that only a later token could change. The completion ends with it, so
        # no later token comes, and the text is certain after all.
        likely = self._decoder.take_likely()
        would_stop = likely and self._stops.would_stop(likely)
        if self._num_tokens <= self._min_tokens:
            self._num_passed += len(likely)
            return ""
        return self.flush() if would_stop else ""

    def flush(self) -> str:
        """End the completion, or cut it here; return what was held back, U+FFFD for an incomplete character."""
        text = self._decoder.flush()
        if self._stops is None:
            return text
        return self._search(text) + self._stops.flush()

    def _search(self, text: str) -> str:
        assert self._stops is not None
        if self.stopped:
            return ""
        num_passed = self._num_passed if self._num_tokens > self._min_tokens else len(text)
        self._num_passed = 0
        passed = self._stops.put(text[:num_passed], may_stop=False) if num_passed else ""
        text = passed + self._stops.put(text[num_passed:])
        self.stopped = self._stops.found is not None
        return text


class MarkedDetokenizer(Detokenizer):
    """A completion that control tokens divide into parts, as tool calls and reasoning do.

    Whatever is held back when a marker comes is returned with it: the bytes and stop strings of one part do not go on
    in the next. So a reader that is given the text, then the marker, has them in their order.
    """

    __slots__ = ()

    def put(self, token_id: int) -> str:
        if token_id not in self._markers:
            return super().put(token_id)
        before = self.flush()
        if self.stopped:
            return before
        self._num_tokens += 1
        name = self._put(token_id)  # "" unless special tokens are shown
        if self._stops is not None and name:
            name = self._search(name) + self._stops.flush()
        return before + name
