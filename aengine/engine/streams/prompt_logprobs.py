"""Log-probabilities of a prompt's tokens: the worker's numbers as they came, of which `Logprob`s are made when they are
read.

    a piece, int32 or the bits of float32:   position of its first token, number of tokens, k
    then of each of the tokens:              id, log-probability, ids of the k likeliest, theirs
"""

from __future__ import annotations

from array import array
from typing import Any

from ...outputs import Logprob
from .logprobs import ColumnSequence

_HEAD = 3


class PromptTable:
    """The rows of the tokens from position ``begin`` on, ``2 + 2 * num_top`` words each, of a prompt of ``length``."""

    __slots__ = ("begin", "floats", "ints", "length", "num_top")

    def __init__(self, length: int, begin: int, num_top: int, words: bytes | bytearray) -> None:
        self.length, self.begin, self.num_top = length, begin, num_top
        self.ints, self.floats = memoryview(words).cast("i"), memoryview(words).cast("f")

    def row(self, place: int) -> tuple[Logprob, ...] | None:
        """Return the entry of the token at a place of the prompt. None: it has none."""
        k, start = self.num_top, (place - self.begin) * (2 + 2 * self.num_top)
        if not 0 <= start < len(self.ints):
            return None
        ids, values = self.ints[start + 2 : start + 2 + k], self.floats[start + 2 + k : start + 2 + 2 * k]
        return Logprob(self.ints[start], self.floats[start + 1]), *map(Logprob, ids, values)


class PromptLogprobs(ColumnSequence[tuple[Logprob, ...] | None, PromptTable]):
    """See `Completion.prompt_logprobs`."""

    __slots__ = ()

    def _at(self, place: int) -> tuple[Logprob, ...] | None:
        return self._table.row(place)

    def __reduce__(self) -> tuple[Any, ...]:
        return of_words, self.columns()

    def columns(self) -> tuple[int, int, int, bytes, tuple[int, int, int]]:
        """Return what `of_words` takes."""
        table, places = self._table, self._places
        return table.length, table.begin, table.num_top, bytes(table.ints), (places.start, places.stop, places.step)


def of_words(length: int, begin: int, num_top: int, words: bytes, places: tuple[int, int, int]) -> PromptLogprobs:
    """Return the sequence of these places of a prompt, see `PromptTable`."""
    return PromptLogprobs(PromptTable(length, begin, num_top, words), range(*places))


def of_pieces(numbers: array[float], length: int) -> PromptLogprobs:
    """Return the entries of a prompt of ``length`` tokens, of the pieces that have come, one after the other."""
    first, num_top, words = joined(numbers)
    return PromptLogprobs(PromptTable(length, first, num_top, words), range(length))


def joined(numbers: array[float]) -> tuple[int, int, bytearray]:
    """Return the position of the first token of all pieces, k, and the rows."""
    source = memoryview(numbers).cast("B")
    heads = source.cast("i")
    words, at, first, num_top = bytearray(), 0, -1, 0
    while at < len(heads):
        position, count, num_top = heads[at : at + _HEAD]
        first = position if first < 0 else first
        size = count * (2 + 2 * num_top)
        begin, at = at + _HEAD, at + _HEAD + size
        # What a piece has of tokens that another had is the same.
        del words[4 * (position - first) * (2 + 2 * num_top) :]
        words += source[4 * begin : 4 * at]
    return first, num_top, words
