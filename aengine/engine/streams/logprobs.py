"""Log-probabilities of a completion, kept as columns: `Logprob`s are made of them when they are read.

Half a million tuples, of 256 completions of 32 tokens with 64 alternatives each, would hold up the loop whenever the
garbage collector looks at them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import eq
from typing import Any, Generic, TypeVar, overload

from ...outputs import Logprob

T_co = TypeVar("T_co", covariant=True)
TableT = TypeVar("TableT")

TokenLogprobs = tuple[float, "array[int]", "array[float]"]
"""One token's: its own log-probability, the ids of the likeliest, and theirs; likeliest first."""

_SHOWN = 4  # elements of a sequence's repr


class LogprobTable:
    """A row for each token of a completion: the sampled token, then the likeliest. Rows are added, and never change."""

    __slots__ = ("ends", "token_ids", "values")

    def __init__(self, token_ids: Iterable[int] = (), values: Iterable[float] = (), ends: Iterable[int] = (0,)) -> None:
        self.token_ids = array("i", token_ids)
        self.values = array("f", values)  # the log-probability of each, as workers send it
        self.ends = array("q", ends)  # 0, then the end of each row in ``values``

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> TopLogprobs | tuple[()]:
        """Add a row, without entries if there are no log-probabilities. Returns its likeliest."""
        if logprobs is None:
            self.ends.append(self.ends[-1])
            return ()
        value, token_ids, values = logprobs
        self.token_ids.append(token_id)
        self.values.append(value)
        begin, end = len(self.values), len(self.values) + len(values)
        self.token_ids.extend(token_ids)
        self.values.extend(values)
        self.ends.append(end)
        return TopLogprobs(self, range(begin, end))

    def entries(self, places: range) -> Iterator[Logprob]:
        """Make the entries at these places of the columns."""
        return map(Logprob, *self.parts(places))

    def parts(self, places: range) -> tuple[array[int], array[float]]:
        """Return what the columns have at these places."""
        if places.step == 1:
            return self.token_ids[places.start : places.stop], self.values[places.start : places.stop]
        return array("i", [self.token_ids[i] for i in places]), array("f", [self.values[i] for i in places])


class ColumnSequence(Sequence[T_co], Generic[T_co, TableT]):
    """A read-only sequence that equals a tuple or a list of the same elements, over places of a table."""

    __slots__ = ("_places", "_table")

    def __init__(self, table: TableT, places: range) -> None:
        self._table = table
        self._places = places

    def _at(self, place: int) -> T_co:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T_co: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...

    def __getitem__(self, index: int | slice) -> T_co | Sequence[T_co]:
        if isinstance(index, slice):
            return type(self)(self._table, self._places[index])
        return self._at(self._places[index])

    def __iter__(self) -> Iterator[T_co]:
        return map(self._at, self._places)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ColumnSequence | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = [repr(element) for element in self[:_SHOWN]]
        if len(self) > _SHOWN:
            shown.append(f"... {len(self) - _SHOWN} more")
        return f"{type(self).__name__}([{', '.join(shown)}])"


class Logprobs(ColumnSequence[tuple[Logprob, ...], LogprobTable]):
    """The `Logprob`s of a completion, see `Choice.logprobs`."""

    __slots__ = ()

    def _at(self, place: int) -> tuple[Logprob, ...]:
        ends = self._table.ends
        return tuple(self._table.entries(range(ends[place], ends[place + 1])))

    def __reduce__(self) -> tuple[Any, ...]:
        return of_columns, self.columns()

    def columns(self) -> tuple[array[int], array[float], array[int]]:
        """Return the columns of a table that has nothing else: what `of_columns` takes."""
        table, places = self._table, self._places
        if places == range(len(table)):
            return table.token_ids, table.values, table.ends
        copy = LogprobTable()
        for place in places:
            token_ids, values = table.parts(range(table.ends[place], table.ends[place + 1]))
            copy.token_ids += token_ids
            copy.values += values
            copy.ends.append(len(copy.values))
        return copy.token_ids, copy.values, copy.ends


class TopLogprobs(ColumnSequence[Logprob, LogprobTable]):
    """The likeliest at one token's place, see `Token.top_logprobs`."""

    __slots__ = ()

    def _at(self, place: int) -> Logprob:
        return Logprob(self._table.token_ids[place], self._table.values[place])

    def __iter__(self) -> Iterator[Logprob]:
        return self._table.entries(self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        return of_likeliest, self.columns()

    def columns(self) -> tuple[array[int], array[float]]:
        """Return the ids and the log-probabilities: what `of_likeliest` takes."""
        return self._table.parts(self._places)


def of_columns(token_ids: array[int], values: array[float], ends: array[int]) -> Logprobs:
    """Return the sequence that has these columns, see `LogprobTable`."""
    table = LogprobTable(token_ids, values, ends)
    return Logprobs(table, range(len(table)))


def of_likeliest(token_ids: array[int], values: array[float]) -> TopLogprobs:
    """Return the likeliest that have these ids and log-probabilities."""
    return TopLogprobs(LogprobTable(token_ids, values), range(len(values)))
