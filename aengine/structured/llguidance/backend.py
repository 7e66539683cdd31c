"""The default backend: llguidance, which compiles in milliseconds and refuses what it can't enforce.

The library's traps, and what is done about each (measured; versions 1.9):

- `consume_token` of a wrong token or a rollback too far makes its matcher useless for ever, and masks of such a matcher
  say "only the end", silently. So tokens are tried, rollbacks are counted, and the error state is looked at after each
  call.
- End of sequence is counted by ``rollback`` in some states and not in others. So it is never given to the library: it
  is a flag here.
- Constructors don't raise, and limits may only be noticed by the first masks. So those are computed at compile time.
- Consuming several tokens without masks between them runs out of the default lexer fuel, and so rejects right texts.
  Hence the higher `_limits`.
- A schema can carry ``x-guidance``, options for the compiler: taken out.
- Some grammars take it seconds and gigabytes, whatever the limits, and nothing can stop it. So those that may are tried
  first: with small limits, or in a process that can be killed (`compile_risk`, `llguidance_process`).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import llguidance

from ...errors import GrammarError
from ...system.cgroups import num_usable_cpus
from ..backend import Bitmask, MatcherError, accept_one, address_of, refused
from ..compile_process import OnWait
from ..compile_risk import is_hopeless, risk_of
from ..parts import Part
from ..spec import GrammarSpec, specs_by_origin
from ..vocabulary import Vocabulary
from .errors import grammar_error, matcher_message, trial_error
from .grammar import grammar_of
from .json_schema import left_out_of
from .process import Trials
from .tokenizer import tokenizer_of

__all__ = ["LLGuidanceBackend", "LLGuidanceMatcher"]

logger = logging.getLogger("aengine.structured")

_MIN_PARALLEL = 8
"""Fewer rows are filled one by one: handing them to threads takes longer."""
_LONG = 200_000
"""Letters of a grammar that is not even read twice in the host: that would hold the GIL for some milliseconds more."""
_MAX_FORCED = 256
"""Tokens that the first masks follow."""
_MAX_FIRST_MASKS = 4
"""Of those with a mask each: the library goes through all that is forced for each mask, 26 ms for 90,000 bytes."""
_MAX_FORCED_BYTES = 4096
"""Making tokens of a longer run would hold the GIL for more than a millisecond: it is sampled instead."""
_RISKY_MASK_SECONDS = 0.02
"""Assumed of the masks of a grammar that may be slow, until some of them were not."""
_COPIES_PER_ROOT = 4
_MOST_ROOT_SECONDS = 0.02
"""Grammars that take longer to make are made once, and their requests' masks are computed one after the other."""
_BYTES_PER_GRAMMAR = 256 << 10
"""Measured: 0.35 MB on average with the lexer's states after a walk, 1.3 MB at most, for 49,152 tokens."""


@functools.cache
def _limits() -> llguidance.LLParserLimits:
    """For requests, too: those of a compile are those of its matchers."""
    return llguidance.LLParserLimits(
        max_items_in_row=5000,  # about 1,250 optional properties, whose masks take 5 ms; the default refuses 500
        initial_lexer_fuel=4_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


@functools.cache
def _small_limits() -> llguidance.LLParserLimits:
    """Compiles that stay within these take 0.3 s at most (measured); none of 500 schemas of MaskBench needs more."""
    return llguidance.LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=20_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        max_grammar_size=20_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


class LLGuidanceBackend:
    """Holds the tokenizer in the library's form (33 MB for 49,152 tokens). See `tokenizer_of` for how long it takes."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary, *, timeout: float = 2.0, fill_threads: int | None = None) -> None:
        """``timeout``: seconds for a compile; one that is tried in a process is killed after half of them, as it is
        then repeated here. ``fill_threads``: for `fill_batch`; None: three of four cores, 12 at most.

        Raises GrammarError.
        """
        self.vocabulary = vocabulary
        self.row_bytes = vocabulary.row_bytes
        self.eos_ids = frozenset(vocabulary.eos_ids)
        self.eos_row = vocabulary.eos_row()
        self.tokenizer = tokenizer_of(vocabulary)
        self._probes = _probes(vocabulary)
        self._opening = [i for i, text in enumerate(vocabulary.token_bytes) if text == b' "'][:1]
        self._fill_threads = max(1, min(12, num_usable_cpus() * 3 // 4)) if fill_threads is None else fill_threads
        self._trials = Trials(vocabulary, timeout / 2)
        self._executor: llguidance.LLExecutor | None = None
        self._lock = threading.Lock()

    def is_quick(self, spec: GrammarSpec) -> bool:
        return risk_of(spec) == "safe"

    def compile(self, spec: GrammarSpec, on_wait: OnWait | None = None) -> LLGuidanceCompiled:
        """Raises GrammarError, of a composed grammar with the origin of the part at fault."""
        try:
            return self._compile(spec, on_wait)
        except GrammarError as error:
            if spec.root is None:
                raise
            raise self._blamed(spec.root, error, on_wait) from None

    def _blamed(self, root: Part, error: GrammarError, on_wait: OnWait | None) -> GrammarError:
        """Return the error of the part that is at fault when it is compiled by itself, or ``error``."""
        for origin, spec in specs_by_origin(root):
            if error.kind == "too_complex" and risk_of(spec) == "safe":
                continue  # the others are more likely, and there may be many
            try:
                self._compile(spec, on_wait)
            except GrammarError as found:
                return GrammarError(f"{origin}: {found}", kind=found.kind, path=found.path)
        return error

    def _compile(self, spec: GrammarSpec, on_wait: OnWait | None) -> LLGuidanceCompiled:
        risk = risk_of(spec)
        if risk == "wild" or (risk == "costly" and (len(spec.text) > _LONG or not self._is_small(spec))):
            if risk == "costly" and is_hopeless(spec):
                raise trial_error(spec, "its counted repeats come to more than ten million letters")
            self._trials.run(spec, on_wait)
        compiled = self.compile_here(spec)
        if risk != "safe":
            compiled.mask_seconds = max(compiled.mask_seconds, _RISKY_MASK_SECONDS)
        return compiled

    def compile_here(self, spec: GrammarSpec, limits: llguidance.LLParserLimits | None = None) -> LLGuidanceCompiled:
        """In this thread, however long it takes."""
        try:
            grammar = grammar_of(spec)
            root, seconds, mask_seconds = self.try_out(grammar, limits)
            warnings = _left_out(spec) + tuple(root.get_grammar_warnings())
        except GrammarError:
            raise
        except BaseException as error:  # ValueError, and pyo3's PanicException, which is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise grammar_error(spec, str(error)) from None
        may_repeat = seconds < _MOST_ROOT_SECONDS
        return LLGuidanceCompiled(self, spec, warnings, _Root(root, grammar), mask_seconds, may_repeat=may_repeat)

    def try_out(
        self, grammar: str, limits: llguidance.LLParserLimits | None = None
    ) -> tuple[llguidance.LLMatcher, float, float]:
        """Return a matcher at the start, the seconds that it took, and the CPU time of a mask near the start.

        Raises ValueError, or pyo3's PanicException, with what the library says.
        """
        begun = time.monotonic()
        root = self.root(grammar, limits)
        seconds = time.monotonic() - begun
        self._check(root)
        return root, seconds, self._first_masks(root)

    def root(self, grammar: str, limits: llguidance.LLParserLimits | None = None) -> llguidance.LLMatcher:
        """Return a matcher at the start, with a lexer of its own; it may be in the error state."""
        return llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits or _limits())

    @property
    def max_roots(self) -> int:
        """How many masks of one grammar can be computed at a time, if each has a lexer of its own."""
        return self._fill_threads

    def close(self) -> None:
        self._trials.close()
        with self._lock:
            self._executor = None

    def executor(self) -> llguidance.LLExecutor | None:
        """Threads that compute masks, started when first needed; None when there is one core to use."""
        if self._fill_threads < 2:
            return None
        with self._lock:
            if self._executor is None:
                try:
                    self._executor = llguidance.LLExecutor(self._fill_threads)
                except ValueError as error:
                    logger.warning("bitmasks are filled in one thread: no others can be started (%s)", error)
                    self._fill_threads = 1
            return self._executor

    def _first_masks(self, root: llguidance.LLMatcher) -> float:
        """Run into the limits now instead of at a request's first tokens. Returns the CPU time of the slowest mask but
        the first, which is computed once for all requests."""
        scratch = memoryview(bytearray(self.row_bytes)).cast("i", (1, self.row_bytes // 4))
        address, _kept = address_of(scratch, (0,), self.row_bytes)
        root.unsafe_compute_mask_ptr(address, self.row_bytes)
        self._check(root)
        slowest = 0.0
        # into the first string that must come, and to an object's keys, where a schema with many of them is largest
        for probe in (_forced_tokens(root.deep_copy())[:_MAX_FORCED] + self._opening, *self._probes):
            there = root.deep_copy()
            for token_ids in _steps(probe):
                if there.try_consume_tokens(token_ids) != len(token_ids):
                    break
                begun = time.thread_time()
                there.unsafe_compute_mask_ptr(address, self.row_bytes)
                slowest = max(slowest, time.thread_time() - begun)
            self._check(there)
        return slowest

    def _is_small(self, spec: GrammarSpec) -> bool:
        """Whether it compiles within small limits; then it does so within the larger ones, in the same time. Raises
        GrammarError when it is at fault in another way."""
        try:
            start = self.compile_here(spec, _small_limits()).matcher()
        except GrammarError as error:
            if error.kind != "too_complex":
                raise
            return False
        return start.num_forced_bytes <= _MAX_FORCED_BYTES  # the limits cut a run short, without an error

    @staticmethod
    def _check(matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise ValueError(matcher.get_error())


def _steps(token_ids: list[int]) -> list[list[int]]:
    """The first few one by one, then all up to the last, and that."""
    few = min(_MAX_FIRST_MASKS, max(0, len(token_ids) - 1))
    steps = [[token_id] for token_id in token_ids[:few]] + [token_ids[few:-1], token_ids[-1:]]
    return [step for step in steps if step]


def _forced_tokens(matcher: llguidance.LLMatcher) -> list[int]:
    """Best of a matcher whose mask was computed: then the bytes are there, and counted in no time."""
    if len(matcher.compute_ff_bytes()) > _MAX_FORCED_BYTES:
        return []
    return matcher.compute_ff_tokens()


def _probes(vocabulary: Vocabulary) -> list[list[int]]:
    ids = {text: i for i, text in reversed(list(enumerate(vocabulary.token_bytes))) if text in (b"{", b'"')}
    return [[ids[b"{"], ids[b'"']]] if len(ids) == 2 else []


def _left_out(spec: GrammarSpec) -> tuple[str, ...]:
    """Return what is left out of relaxed schemas before the library sees them."""
    if spec.root is None:
        return left_out_of(spec.text) if spec.relax and spec.kind == "json_schema" else ()
    parts = [(origin, part) for origin, part in specs_by_origin(spec.root) if part.relax]
    return tuple(f"{origin}: {text}" for origin, part in parts for text in left_out_of(part.text))


class _Root:
    """A matcher that stays at the start, for others to be copied from. Its copies share what its lexer has learnt, and
    a lock with it: their masks are computed one after the other. They share its end, too: when one of them exceeds the
    lexer's limits, none can go on."""

    __slots__ = ("__weakref__", "grammar", "inner", "is_spoilt", "num_copies")

    def __init__(self, inner: llguidance.LLMatcher, grammar: str) -> None:
        self.inner = inner
        self.grammar = grammar
        self.num_copies = 0  # alive
        self.is_spoilt = False


class LLGuidanceCompiled:
    """A compiled grammar. Many requests at a time get several lexers, so that several threads can fill their rows; all
    but the first go with the requests."""

    __slots__ = ("_backend", "_first", "_lock", "_may_repeat", "_more", "mask_seconds", "num_bytes", "spec", "warnings")

    def __init__(
        self,
        backend: LLGuidanceBackend,
        spec: GrammarSpec,
        warnings: tuple[str, ...],
        root: _Root,
        mask_seconds: float,
        *,
        may_repeat: bool,
    ) -> None:
        """``may_repeat``: the root was made so fast that it may be made again for more requests."""
        self.spec = spec
        self.warnings = warnings
        self.mask_seconds = mask_seconds
        self.num_bytes = _BYTES_PER_GRAMMAR + 8 * len(root.grammar)
        self._backend = backend
        self._may_repeat = may_repeat
        self._lock = threading.Lock()
        self._first = root
        self._more: weakref.WeakSet[_Root] = weakref.WeakSet()

    def matcher(self) -> LLGuidanceMatcher:
        with self._lock:
            if self._first.is_spoilt:
                self._first = self._new_root()
            roots = [self._first, *(root for root in self._more if not root.is_spoilt)]
            root = min(roots, key=lambda root: root.num_copies)
            if root.num_copies >= _COPIES_PER_ROOT and self._may_repeat and len(roots) < self._backend.max_roots:
                root = self._new_root()
                self._more.add(root)
            return LLGuidanceMatcher(self._backend, root, root.inner.deep_copy())

    def _new_root(self) -> _Root:
        grammar = self._first.grammar
        return _Root(self._backend.root(grammar), grammar)


class LLGuidanceMatcher:
    """One request's place; see `aengine.structured.backend.Matcher`."""

    __slots__ = ("_backend", "_ended", "_inner", "_is_revived", "_root", "_token_ids")

    def __init__(self, backend: LLGuidanceBackend, root: _Root, inner: llguidance.LLMatcher) -> None:
        root.num_copies += 1
        self._backend = backend
        self._root = root
        self._inner = inner
        self._token_ids: list[int] = []  # accepted by the library: without the end
        self._is_revived = False
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
            self._revive()
            self._inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
            self._check()

    @staticmethod
    def accept_group(items: Sequence[tuple[LLGuidanceMatcher, list[int]]]) -> list[int | MatcherError]:
        """`accept` of several matchers of one backend; single tokens in the library's threads.

        Other than `accept`, a token that is refused there spoils its matcher.
        """
        plain = [(i, matcher, ids[0]) for i, (matcher, ids) in enumerate(items) if matcher._is_plain(ids)]
        executor = items[0][0]._backend.executor() if len(plain) >= _MIN_PARALLEL else None
        if executor is None:
            return [accept_one(matcher, ids) for matcher, ids in items]
        results: list[int | MatcherError] = [0] * len(items)
        accepted = executor.consume_token_par([(matcher._inner, token_id) for _, matcher, token_id in plain])
        for (i, matcher, token_id), is_accepted in zip(plain, accepted, strict=True):
            if is_accepted:
                matcher._token_ids.append(token_id)
                results[i] = 1
            else:  # refused, or its lexer has come to its end: which of both is found out
                results[i] = accept_one(matcher, [token_id])
        if len(plain) < len(items):
            seen = {i for i, _, _ in plain}
            for i, (matcher, ids) in enumerate(items):
                if i not in seen:
                    results[i] = accept_one(matcher, ids)
        return results

    @staticmethod
    def fill_group(items: Sequence[tuple[LLGuidanceMatcher, int]], bitmask: Bitmask) -> dict[int, MatcherError]:
        """`fill` of several matchers of one backend, in the library's threads."""
        running = [(matcher, row) for matcher, row in items if not matcher._ended]
        backend = items[0][0]._backend
        executor = backend.executor() if len(running) >= _MIN_PARALLEL else None
        if executor is not None:
            address, view = address_of(bitmask, [row for _, row in running], backend.row_bytes)
            inner = [(matcher._inner, row) for matcher, row in running]
            executor.unsafe_compute_mask_ptr(inner, address, backend.row_bytes, len(view) // backend.row_bytes)
        failed: dict[int, MatcherError] = {}
        for matcher, row in items:
            try:
                if executor is None or matcher._ended or matcher._inner.is_error():
                    matcher.fill(bitmask, row)
            except MatcherError as error:
                failed[row] = error
        return failed

    @staticmethod
    def advance_group(
        items: Sequence[tuple[LLGuidanceMatcher, list[int]]], bitmask: Bitmask, on_fill: Callable[[], None]
    ) -> dict[int, MatcherError] | None:
        """`advance_batch` for a token each, in the library's threads. None if it is something else that is due."""
        backend = items[0][0]._backend
        executor = backend.executor() if len(items) >= _MIN_PARALLEL else None
        if executor is None or any(matcher._ended or len(ids) != 1 for matcher, ids in items):
            return None
        tokens = [(matcher._inner, ids[0]) for matcher, ids in items]
        ids_only = [token_id for _, token_id in tokens]
        if min(ids_only) < 0 or max(ids_only) >= backend.vocabulary.vocab_size:
            return None
        if not backend.eos_ids.isdisjoint(ids_only):
            return None
        rows = [(inner, row) for row, (inner, _) in enumerate(tokens)]
        address, view = address_of(bitmask, (len(rows) - 1,), backend.row_bytes)
        accepted = executor.consume_token_par(tokens)
        on_fill()
        executor.unsafe_compute_mask_ptr(rows, address, backend.row_bytes, len(view) // backend.row_bytes)
        failed: dict[int, MatcherError] = {}
        for row, ((matcher, ids), is_accepted) in enumerate(zip(items, accepted, strict=True)):
            if is_accepted:
                matcher._token_ids += ids
                if not matcher._inner.is_error():
                    continue
            try:
                if not is_accepted and matcher.accept(ids) < 1:
                    raise refused(ids[0])
                matcher.fill(bitmask, row)
            except MatcherError as error:
                failed[row] = error
        return failed

    def accept(self, token_ids: Sequence[int]) -> int:
        if self._is_plain(token_ids) and self._inner.try_consume_tokens(list(token_ids)):  # as in most steps
            self._token_ids.append(token_ids[0])
            return 1
        if self._inner.is_error():
            self._revive()
        eos_ids = self._backend.eos_ids
        ids = list(token_ids)
        accepted = 0
        while accepted < len(ids) and not self._ended:
            if ids[accepted] in eos_ids and self._inner.is_accepting():
                self._ended = True
                return accepted + 1
            end = next((i for i in range(accepted + 1, len(ids)) if ids[i] in eos_ids), len(ids))
            consumed = self._consume(ids[accepted:end])
            accepted += consumed
            if accepted < end:
                break
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

    @property
    def num_forced_bytes(self) -> int:
        return len(self._inner.compute_ff_bytes())

    def forced_tokens(self) -> list[int]:
        if self._ended:
            return []
        forced = _forced_tokens(self._inner)
        self._check()
        return forced

    def clone(self) -> LLGuidanceMatcher:
        other = LLGuidanceMatcher(self._backend, self._root, self._inner.deep_copy())
        other._token_ids, other._ended = self._token_ids.copy(), self._ended
        return other

    @property
    def is_accepting(self) -> bool:
        return self._ended or self._inner.is_accepting()

    @property
    def is_finished(self) -> bool:
        return self._ended or (self._inner.is_stopped() and not self._inner.is_error())

    def _is_plain(self, token_ids: Sequence[int]) -> bool:
        """One token, and not the end."""
        return (
            len(token_ids) == 1
            and 0 <= token_ids[0] < self._backend.vocabulary.vocab_size
            and token_ids[0] not in self._backend.eos_ids
            and not self._ended
        )

    def _consume(self, token_ids: list[int]) -> int:
        vocab_size = self._backend.vocabulary.vocab_size
        known = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size), len(token_ids))
        consumed = self._inner.try_consume_tokens(token_ids[:known]) if known else 0  # stops before the first wrong one
        self._token_ids += token_ids[:consumed]
        if self._inner.is_error():
            self._revive()
            more = self._inner.try_consume_tokens(token_ids[consumed:known])
            self._token_ids += token_ids[consumed : consumed + more]
            consumed += more
            self._check()
        return consumed

    def _revive(self) -> None:
        """The library can't go on: perhaps for what another request did, whose lexer this one shares. So it gets one of
        its own, once, and comes as far as it was; if it is to blame itself, it fails again. Raises MatcherError."""
        self._root.is_spoilt = True
        if self._is_revived:
            self._check()
        self._is_revived = True
        root = _Root(self._backend.root(self._root.grammar), self._root.grammar)
        inner = root.inner.deep_copy()
        if self._token_ids and inner.try_consume_tokens(self._token_ids) != len(self._token_ids):
            self._check()
        self._root.num_copies -= 1
        root.num_copies += 1
        self._root, self._inner = root, inner

    def _check(self) -> None:
        if self._inner.is_error():
            raise MatcherError(f"the grammar can't be followed any further: {matcher_message(self._inner.get_error())}")
