"""Matchers of llguidance: a request's place in a grammar; many are advanced at a time in the library's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import llguidance

from ..backend import Bitmask, MatcherError, address_of, note_failure, refused
from .faults import matcher_error
from .grammar import NO_FORCING

if TYPE_CHECKING:
    from .backend import LLGuidanceBackend

_MIN_PARALLEL = 8
"""Fewer rows are filled one by one: handing them to threads takes longer."""
_MAX_FORCED_BYTES = 4096
"""Making tokens of a longer run would hold the GIL for more than a millisecond: it is sampled instead."""


class Root:
    """A matcher that stays at the start, for others to be copied from. Its copies share what its lexer has learnt, and
    a lock with it: their masks are computed one after the other. They share its end, too: when one of them exceeds the
    lexer's limits, none can go on."""

    __slots__ = ("__weakref__", "grammar", "inner", "is_spoilt", "may_force", "num_copies")

    def __init__(self, inner: llguidance.LLMatcher, grammar: str) -> None:
        self.inner = inner
        self.grammar = grammar
        self.may_force = not grammar.endswith(NO_FORCING)  # asking for what must follow might never end
        self.num_copies = 0  # copies of this matcher that are in use
        self.is_spoilt = False


class LLGuidanceMatcher:
    """One request's place; see `aengine.engine.structured.backend.Matcher`."""

    __slots__ = ("_backend", "_ended", "_inner", "_is_restarted", "_root", "_token_ids")

    def __init__(self, backend: LLGuidanceBackend, root: Root, inner: llguidance.LLMatcher) -> None:
        root.num_copies += 1
        self._backend = backend
        self._root = root
        self._inner = inner
        self._token_ids: list[int] = []  # ids accepted by the library, without the end-of-sequence token
        self._is_restarted = False
        self._ended = False

    def __del__(self) -> None:
        self._root.num_copies -= 1

    def fill(self, bitmask: Bitmask, row: int) -> None:
        row_bytes = self._backend.row_bytes
        address, view = address_of(bitmask, (row,), row_bytes)
        if self._ended:
            view[row * row_bytes : (row + 1) * row_bytes] = self._backend.eos_row
            return
        self._inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        if self._inner.is_error():
            self._restart()
            self._inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
            self._check()

    @staticmethod
    def advance_group(
        items: Sequence[tuple[int, LLGuidanceMatcher, list[int]]], bitmask: Bitmask, on_fill: Callable[[], None]
    ) -> dict[int, MatcherError]:
        """Accept and fill for several matchers of one backend, in the library's threads; see `advance_batch`."""
        backend = items[0][1]._backend
        executor = backend.executor() if len(items) >= _MIN_PARALLEL else None
        failed: dict[int, MatcherError] = {}
        plain = [item for item in items if item[1]._is_plain(item[2])] if executor is not None else []
        others = items if not plain else [item for item in items if not item[1]._is_plain(item[2])]
        tokens = [(matcher._inner, ids[0]) for _, matcher, ids in plain]
        accepted = executor.consume_token_par(tokens) if executor is not None and tokens else []
        for (row, matcher, ids), is_accepted in zip(plain, accepted, strict=True):
            if is_accepted:
                matcher._token_ids += ids
            else:  # the token was refused, or the lexer is exhausted: a restart tells which
                note_failure(failed, row, matcher.accept_all, ids)
        for row, matcher, ids in others:
            note_failure(failed, row, matcher.accept_all, ids)
        on_fill()
        running = [(matcher._inner, row) for row, matcher, _ in items if row not in failed and not matcher._ended]
        if executor is not None and running:
            address, view = address_of(bitmask, (running[0][1], running[-1][1]), backend.row_bytes)
            executor.unsafe_compute_mask_ptr(running, address, backend.row_bytes, len(view) // backend.row_bytes)
        for row, matcher, _ in items:
            if row not in failed and (executor is None or matcher._ended or matcher._inner.is_error()):
                note_failure(failed, row, matcher.fill, bitmask, row)
        return failed

    def accept_all(self, token_ids: list[int]) -> None:
        """Accept every one of ``token_ids``. Raises MatcherError."""
        accepted = self.accept(token_ids) if token_ids else 0
        if accepted < len(token_ids):
            raise refused(token_ids[accepted])

    def accept(self, token_ids: Sequence[int]) -> int:
        if self._is_plain(token_ids) and self._inner.try_consume_tokens(list(token_ids)):  # the usual case
            self._token_ids.append(token_ids[0])
            return 1
        ids = list(token_ids)
        accepted = self._accept(ids)
        while accepted < len(ids) and not self._ended and self._is_exhausted():
            self._restart()  # raises the second time
            accepted += self._accept(ids[accepted:])
        return accepted

    def rollback(self, num_tokens: int) -> None:
        self._check()
        num_accepted = len(self._token_ids) + self._ended
        if not 0 <= num_tokens <= num_accepted:
            raise MatcherError(f"can't undo {num_tokens} tokens: {num_accepted} were accepted")
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._inner.rollback(num_tokens)
            del self._token_ids[-num_tokens:]
            self._check()

    def forced_tokens(self) -> list[int]:
        if self._ended or not self._root.may_force:
            return []
        forced = forced_tokens(self._inner)
        return [] if self._inner.is_error() else forced  # the next row says why, or starts anew

    @property
    def is_accepting(self) -> bool:
        return self._ended or self._inner.is_accepting()

    @property
    def is_finished(self) -> bool:
        return self._ended or (self._inner.is_stopped() and not self._inner.is_error())

    def _is_plain(self, token_ids: Sequence[int]) -> bool:
        """Return whether the step is one token, and not the end-of-sequence token."""
        if len(token_ids) != 1 or self._ended or token_ids[0] in self._backend.eos_ids:
            return False
        return 0 <= token_ids[0] < self._backend.vocabulary.vocab_size

    def _accept(self, ids: list[int]) -> int:
        """Accept as many of ``ids`` as the library does, and say how many that were."""
        eos_ids, vocab_size = self._backend.eos_ids, self._backend.vocabulary.vocab_size
        accepted = 0
        while accepted < len(ids) and not self._ended:
            if ids[accepted] in eos_ids and self._inner.is_accepting():
                self._ended = True
                return accepted + 1
            end = next((i for i in range(accepted + 1, len(ids)) if ids[i] in eos_ids), len(ids))
            known = next((i for i in range(accepted, end) if not 0 <= ids[i] < vocab_size), end)
            consumed = self._inner.try_consume_tokens(ids[accepted:known]) if accepted < known else 0
            self._token_ids += ids[accepted : accepted + consumed]
            accepted += consumed
            if accepted < end:
                break
        return accepted

    def _is_exhausted(self) -> bool:
        """Return whether the lexer is beyond its limits, maybe by another request's text. It then refuses every token
        as if the grammar did; only a mask tells."""
        if not self._inner.is_error():
            scratch = memoryview(bytearray(self._backend.row_bytes)).cast("i", (1, self._backend.row_bytes // 4))
            address, _kept = address_of(scratch, (0,), self._backend.row_bytes)
            self._inner.unsafe_compute_mask_ptr(address, self._backend.row_bytes)
        return self._inner.is_error()

    def _restart(self) -> None:
        """Make the library's matcher anew with a lexer of its own, once, and advance it as far as it was: the failure
        may be due to another request that shares the lexer; if not, it fails again. Raises MatcherError."""
        self._root.is_spoilt = True
        if self._is_restarted:
            self._check()
        self._is_restarted = True
        root = Root(self._backend.root(self._root.grammar), self._root.grammar)
        inner = root.inner.deep_copy()
        if self._token_ids and inner.try_consume_tokens(self._token_ids) != len(self._token_ids):
            self._check()
        self._root.num_copies -= 1
        root.num_copies += 1
        self._root, self._inner = root, inner

    def _check(self) -> None:
        if self._inner.is_error():
            raise matcher_error(self._inner.get_error())


def forced_tokens(matcher: llguidance.LLMatcher) -> list[int]:
    """Return what must come; best of a matcher whose mask was computed, which then has the bytes and counts them."""
    if len(matcher.compute_ff_bytes()) > _MAX_FORCED_BYTES:
        return []
    return matcher.compute_ff_tokens()
