"""The interface of a grammar library, and the one place that names the libraries.

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
    from .spec import GrammarSpec

OnWait = Callable[[bool], None]
"""Told True when a compile begins to wait for a process to start, and False when it waits no more."""

Bitmask = Any
"""int32 [rows, ceil(vocab_size / 32)], C-contiguous, writable, on the host."""


class MatcherError(RuntimeError):
    """The matcher of one request failed; that request ends, nothing else."""


class MatcherLimitError(MatcherError):
    """The grammar needs more than a mask may take. The request ends with a GrammarError of kind "too_complex"."""


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
        """Return the ids that must come next, as the tokenizer would encode them; empty if none are certain."""


class Compiled(Protocol):
    """A grammar that is ready for any number of requests, in any thread."""

    @property
    def spec(self) -> GrammarSpec: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """The parts of the schema that are not enforced; only with ``relax``."""

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory it holds."""

    @property
    def mask_seconds(self) -> float:
        """CPU time of a mask near the start, as far as is known."""

    def matcher(self) -> Matcher:
        """Return a new matcher at the grammar's start. Takes under 0.1 ms, or some milliseconds when many are in
        use."""


class Backend(Protocol):
    """A grammar library for one vocabulary. Its methods may be called from any thread."""

    @property
    def name(self) -> str: ...

    def is_quick(self, spec: GrammarSpec) -> bool:
        """Return whether it is sure to be compiled, or refused, in no time; told without compiling it."""

    def compile(self, spec: GrammarSpec, on_wait: OnWait | None = None) -> Compiled:
        """Compile a grammar; blocks, for a thread of a pool. ``on_wait`` is called while time passes that is not the
        grammar's. Raises GrammarError."""

    def close(self) -> None:
        """End the threads and processes of this backend. A compile in progress may fail; matchers stay usable."""


def advance_batch(
    items: Sequence[tuple[Matcher, list[int]]], bitmask: Bitmask, on_fill: Callable[[], None] = lambda: None
) -> dict[int, MatcherError]:
    """Advance each matcher by its tokens, then fill its row: ``bitmask[i]`` for ``items[i]``.

    A class of matchers may have a static method ``advance_group(items, bitmask, on_fill)``, whose items are (row,
    matcher, token ids), to do so in threads. ``on_fill`` is called in between: what is left is mostly done without the
    GIL. Returns the rows that failed, with why; one whose tokens the grammar does not allow, too.
    """
    numbered: list[tuple[int, Any, list[int]]] = [(row, *item) for row, item in enumerate(items)]
    kinds = [*{type(matcher) for matcher, _ in items}]
    failed: dict[int, MatcherError] = {}
    for kind in kinds:
        group = numbered if len(kinds) == 1 else [item for item in numbered if type(item[1]) is kind]
        advance_group = getattr(kind, "advance_group", _one_by_one)
        failed |= advance_group(group, bitmask, on_fill if kind is kinds[-1] else lambda: None)
    return failed


def _one_by_one(
    items: Sequence[tuple[int, Matcher, list[int]]], bitmask: Bitmask, on_fill: Callable[[], None]
) -> dict[int, MatcherError]:
    def advance(row: int, matcher: Matcher, token_ids: list[int]) -> None:
        accepted = matcher.accept(token_ids)
        if accepted < len(token_ids):
            raise refused(token_ids[accepted])
        matcher.fill(bitmask, row)

    on_fill()
    failed: dict[int, MatcherError] = {}
    for row, matcher, token_ids in items:
        note_failure(failed, row, advance, row, matcher, token_ids)
    return failed


def note_failure(failed: dict[int, MatcherError], row: int, function: Callable[..., object], *args: Any) -> None:
    """Call ``function``, and note under ``row`` what it raises: a plug-in may raise anything."""
    try:
        function(*args)
    except MatcherError as error:
        failed[row] = error
    except Exception as error:
        failed[row] = MatcherError(f"{type(error).__name__}: {error}")


def refused(token_id: int) -> MatcherError:
    """Return the error of a token that the grammar does not allow."""
    return MatcherError(f"token {token_id} was sampled, which it does not allow here")


def address_of(bitmask: Bitmask, rows: Sequence[int], row_bytes: int) -> tuple[int, memoryview]:
    """Return the address of ``bitmask`` in memory, and its bytes, which must be kept while the address is used.

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
