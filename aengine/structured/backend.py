"""What a grammar library must be able to do, and the one place that names them.

    GrammarSpec ──Backend.compile──> Compiled ──matcher()──> Matcher      one request's place in the grammar
     (text)      (slow, in a pool)   (cached)   (< 0.1 ms)     ├─ fill     which tokens may come next: one row of bits
                                                               └─ accept   this one came

A bitmask is int32, [rows, ceil(vocab_size / 32)], C-contiguous; bit ``id % 32`` of word ``id // 32`` says whether the
token ``id`` may come. It is anything with a writable buffer: a numpy array, a memoryview over shared memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .compile_process import OnWait
    from .spec import GrammarSpec

__all__ = [
    "Backend",
    "Bitmask",
    "Compiled",
    "Matcher",
    "MatcherError",
    "address_of",
    "advance_batch",
    "fill_batch",
]

Bitmask = Any
"""int32 [rows, ceil(vocab_size / 32)], C-contiguous, writable, on the host."""


class MatcherError(RuntimeError):
    """The matcher of one request failed; that request ends, nothing else."""


class Matcher(Protocol):
    """One request's place in a grammar. Not for two threads at once."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write which tokens may come next into ``bitmask[row]``; once finished, only end-of-sequence ids may.

        Lets go of the GIL. Raises MatcherError, and then the row means nothing.
        """

    def accept(self, token_ids: Sequence[int]) -> int:
        """Move on by as many of ``token_ids`` as the grammar allows, and say how many that were.

        A token that is refused leaves the matcher as it was. An end-of-sequence id counts as one token. Raises
        MatcherError.
        """

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted. Raises MatcherError if there were fewer."""

    def forced_tokens(self) -> list[int]:
        """What must come next, if it is certain, as the tokenizer would write it; may be empty."""

    def clone(self) -> Matcher:
        """Another matcher at the same place."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    @property
    def is_finished(self) -> bool:
        """Whether end-of-sequence was accepted, or nothing else can come."""


class Compiled(Protocol):
    """A grammar that is ready for any number of requests, in any thread."""

    @property
    def spec(self) -> GrammarSpec: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the schema is not enforced; only with ``relax``."""

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory it holds."""

    @property
    def mask_seconds(self) -> float:
        """CPU time of a mask near the start, as far as is known."""

    def matcher(self) -> Matcher:
        """A matcher at the start; takes under 0.1 ms, or some milliseconds when many are in use."""


class Backend(Protocol):
    """A grammar library for one vocabulary. Its methods may be called from any thread."""

    @property
    def name(self) -> str: ...

    def is_quick(self, spec: GrammarSpec) -> bool:
        """Whether it is sure to be compiled, or refused, in no time; told without compiling it."""

    def compile(self, spec: GrammarSpec, on_wait: OnWait | None = None) -> Compiled:
        """Blocking, for a thread of a pool. ``on_wait``: told while time passes that is not the grammar's. Raises
        GrammarError."""

    def close(self) -> None:
        """Ends what it started. A compile in progress may fail; matchers stay usable."""


def accept_one(matcher: Matcher, token_ids: Sequence[int]) -> int | MatcherError:
    """`Matcher.accept`, whose error is returned."""
    try:
        return matcher.accept(token_ids)
    except Exception as error:
        return _matcher_error(error)


def _matcher_error(error: Exception) -> MatcherError:
    """Return ``error`` as what ends one request: a plug-in may raise anything."""
    return error if isinstance(error, MatcherError) else MatcherError(f"{type(error).__name__}: {error}")


def accept_batch(items: Sequence[tuple[Matcher, list[int]]]) -> list[int | MatcherError]:
    """`Matcher.accept` for several requests, in several threads where the library can. A matcher that has refused a
    token may be spoilt by it."""
    kinds = {type(matcher) for matcher, _ in items}
    accept_group = getattr(next(iter(kinds)), "accept_group", None) if len(kinds) == 1 else None
    if accept_group is not None:
        done: list[int | MatcherError] = accept_group(items)
        return done
    return [accept_one(matcher, token_ids) for matcher, token_ids in items]


def fill_batch(items: Sequence[tuple[Matcher, int]], bitmask: Bitmask) -> dict[int, MatcherError]:
    """`Matcher.fill` for several requests, in several threads where the library can.

    Each item is a matcher and the row that is its own. Returns the rows that failed, with why; the others are filled.
    Rows that are not listed stay as they were.
    """
    failed: dict[int, MatcherError] = {}
    groups: dict[type, list[tuple[Any, int]]] = {}
    for matcher, row in items:
        groups.setdefault(type(matcher), []).append((matcher, row))
    for kind, group in groups.items():
        fill_group = getattr(kind, "fill_group", _one_by_one)
        failed |= fill_group(group, bitmask)
    return failed


def advance_batch(
    items: Sequence[tuple[Matcher, list[int]]], bitmask: Bitmask, on_fill: Callable[[], None] = lambda: None
) -> dict[int, MatcherError]:
    """Each matcher accepts its tokens, and then its row is filled, ``bitmask[i]`` for ``items[i]``.

    ``on_fill`` is called in between: what is left is mostly done without the GIL. Returns the rows that failed, with
    why: one whose tokens the grammar does not allow, too. The others are filled.
    """
    kinds = {type(matcher) for matcher, _ in items}
    advance_group = getattr(next(iter(kinds)), "advance_group", None) if len(kinds) == 1 else None
    if advance_group is not None:
        done: dict[int, MatcherError] | None = advance_group(items, bitmask, on_fill)
        if done is not None:
            return done
    failed: dict[int, MatcherError] = {}
    due: list[tuple[Matcher, int]] = []
    for row, ((matcher, token_ids), result) in enumerate(zip(items, accept_batch(items), strict=True)):
        if isinstance(result, MatcherError):
            failed[row] = result
        elif result < len(token_ids):
            failed[row] = refused(token_ids[result])
        else:
            due.append((matcher, row))
    on_fill()
    return failed | fill_batch(due, bitmask)


def refused(token_id: int) -> MatcherError:
    return MatcherError(f"token {token_id} was sampled, which it does not allow here")


def _one_by_one(items: Sequence[tuple[Matcher, int]], bitmask: Bitmask) -> dict[int, MatcherError]:
    failed: dict[int, MatcherError] = {}
    for matcher, row in items:
        try:
            matcher.fill(bitmask, row)
        except Exception as error:
            failed[row] = _matcher_error(error)
    return failed


def address_of(bitmask: Bitmask, rows: Sequence[int], row_bytes: int) -> tuple[int, memoryview]:
    """Where ``bitmask`` lies in memory, and its bytes, which must be kept while the address is used.

    Raises ValueError if it has not the shape that the libraries write blindly, or lacks one of ``rows``.
    """
    view = memoryview(bitmask)
    fits = view.ndim == 2 and view.itemsize == 4 and view.shape is not None and view.shape[1] * 4 == row_bytes
    if not fits or view.readonly or not view.c_contiguous:
        raise ValueError(
            f"a bitmask must be a writable, C-contiguous int32 [rows, {row_bytes // 4}], not {view.format} {view.shape}"
        )
    assert view.shape is not None
    for row in rows:
        if not 0 <= row < view.shape[0]:
            raise ValueError(f"the bitmask has no row {row}: it has {view.shape[0]}")
    flat = view.cast("B")
    return ctypes.addressof(ctypes.c_char.from_buffer(flat)), flat
