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
- Before a mask the library writes out all that must follow: endlessly for some grammars of a caller (grammar.py),
  and millions of letters for literals that are repeated (cost.py), of 270 bytes each.
- A schema can carry ``x-guidance``, options for the compiler: taken out.
- Some grammars take it seconds and gigabytes, whatever the limits, and nothing can stop it. So those that may (cost.py)
  are tried first in a process that can be killed (trial.py).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Sequence

import llguidance

from ....errors import GrammarError
from ....limits.cgroups import num_usable_cpus
from ..backend import OnWait, address_of
from ..parts import Json, Part
from ..spec import GrammarSpec, specs_by_origin
from ..vocabulary import Vocabulary
from .cost import is_quick
from .faults import grammar_error, too_complex
from .grammar import NO_FORCING, grammar_of
from .json_schema import left_out_of
from .matcher import LLGuidanceMatcher, Root, forced_tokens
from .tokenizer import tables_of
from .trial import TrialError, Trials

logger = logging.getLogger("aengine.structured")

_MAX_FORCED = 256
"""Tokens that the first masks follow."""
_MAX_FIRST_MASKS = 4
"""Forced tokens with a mask each: the library goes through all that is forced for each mask, 26 ms for 90,000 bytes."""
_RISKY_MASK_SECONDS = 0.02
"""Assumed of the masks of a grammar that may be slow, until some of them were not."""
_MOST_MASK_SECONDS = 1.0
"""A grammar with slower masks near its start is refused."""
_COPIES_PER_ROOT = 4
_MOST_ROOT_SECONDS = 0.02
"""Grammars that take longer to make are made once, and their requests' masks are computed one after the other."""
_BYTES_PER_GRAMMAR = 256 << 10
"""Measured: 0.35 MB on average with the lexer's states after a walk, 1.3 MB at most, for 49,152 tokens."""


@functools.cache
def _limits() -> llguidance.LLParserLimits:
    """Return the library's limits for compiles, which hold for the matchers made of them too."""
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


class LLGuidanceBackend:
    """Holds the tokenizer in the library's form (33 MB for 49,152 tokens). See `tables_of` for how long it takes."""

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
        self.tokenizer, self._kept = tables_of(vocabulary)
        self._probes = _probes(vocabulary)
        self._opening = _ids_of((b' "',), vocabulary)
        self._fill_threads = max(1, min(12, num_usable_cpus() * 3 // 4)) if fill_threads is None else fill_threads
        self._trials = Trials(vocabulary, timeout / 2)
        self._executor: llguidance.LLExecutor | None = None
        self._lock = threading.Lock()

    def is_quick(self, spec: GrammarSpec) -> bool:
        return is_quick(spec)

    def compile(self, spec: GrammarSpec, on_wait: OnWait | None = None) -> LLGuidanceCompiled:
        """Compile in this thread, after a trial if it may take long.

        Raises GrammarError, of a composed grammar with the origin of the part at fault.
        """
        try:
            return self._compile(spec, on_wait)
        except GrammarError as error:
            if spec.root is None:
                raise
            raise self._blamed(spec.root, error, on_wait) from None

    def _compile(self, spec: GrammarSpec, on_wait: OnWait | None) -> LLGuidanceCompiled:
        may_be_slow = not is_quick(spec)
        try:
            grammar = grammar_of(spec)
            if may_be_slow and (refusal := self._trials.run(grammar, on_wait)):
                raise ValueError(refusal)
            root, seconds, mask_seconds = self.try_out(grammar)
            warnings = _left_out(spec) + tuple(root.get_grammar_warnings())
        except TrialError as error:
            raise too_complex(spec, str(error)) from None
        except (GrammarError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # ValueError, and pyo3's PanicException, which is no Exception
            raise grammar_error(spec, str(error), may_search=not may_be_slow) from None
        if mask_seconds > _MOST_MASK_SECONDS:
            raise too_complex(spec, f"it takes {mask_seconds:.1f} s to say which tokens may come next")
        if may_be_slow:
            mask_seconds = max(mask_seconds, _RISKY_MASK_SECONDS)
        may_repeat = seconds < _MOST_ROOT_SECONDS
        return LLGuidanceCompiled(self, spec, warnings, Root(root, grammar), mask_seconds, may_repeat=may_repeat)

    def _blamed(self, root: Part, error: GrammarError, on_wait: OnWait | None) -> GrammarError:
        """Return the error of the part that is at fault when it is compiled by itself, or ``error``."""
        for part, spec in specs_by_origin(root):
            if error.kind == "too_complex" and is_quick(spec):
                continue  # the others are more likely, and there may be many
            try:
                self._compile(spec, on_wait)
            except GrammarError as found:
                tool = part.tool if isinstance(part, Json) else None
                return GrammarError(f"{part.origin}: {found}", kind=found.kind, path=found.path, tool=tool)
        return error

    def try_out(self, grammar: str) -> tuple[llguidance.LLMatcher, float, float]:
        """Return a matcher at the start, the seconds that it took, and the CPU time of a mask near the start.

        Raises ValueError, or pyo3's PanicException, with what the library says.
        """
        begun = time.monotonic()
        root = self.root(grammar)
        seconds = time.monotonic() - begun
        self._check(root)
        return root, seconds, self._first_masks(root, may_force=not grammar.endswith(NO_FORCING))

    def root(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the start, with a lexer of its own; it may be in the error state."""
        return llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=_limits())

    @property
    def max_roots(self) -> int:
        """Return the number of masks of one grammar that can be computed at a time, each with a lexer of its own."""
        return self._fill_threads

    def close(self) -> None:
        self._trials.close()
        with self._lock:
            self._executor = None

    def executor(self) -> llguidance.LLExecutor | None:
        """Return the threads that compute masks, started when first needed; None when there is one core to use."""
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

    def _first_masks(self, root: llguidance.LLMatcher, *, may_force: bool) -> float:
        """Run into the limits now instead of at a request's first tokens. Returns the CPU time of the slowest mask but
        the first, which is computed once for all requests."""
        scratch = memoryview(bytearray(self.row_bytes)).cast("i", (1, self.row_bytes // 4))
        address, _kept = address_of(scratch, (0,), self.row_bytes)
        root.unsafe_compute_mask_ptr(address, self.row_bytes)
        self._check(root)
        slowest = 0.0
        # Follow the forced ids into the first string and to an object's keys, where masks of many keys are largest.
        forced = forced_tokens(root.deep_copy())[:_MAX_FORCED] if may_force else []
        for probe in (forced + self._opening, *self._probes):
            there = root.deep_copy()
            for token_ids in _steps(probe):
                if there.try_consume_tokens(token_ids) != len(token_ids):
                    break
                begun = time.thread_time()
                there.unsafe_compute_mask_ptr(address, self.row_bytes)
                slowest = max(slowest, time.thread_time() - begun)
            self._check(there)
        return slowest

    @staticmethod
    def _check(matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise ValueError(matcher.get_error())


def _steps(token_ids: list[int]) -> list[list[int]]:
    """Return the ids in the steps in which they are tried: a few one by one, the rest up to the last, the last."""
    few = min(_MAX_FIRST_MASKS, max(0, len(token_ids) - 1))
    steps = [[token_id] for token_id in token_ids[:few]] + [token_ids[few:-1], token_ids[-1:]]
    return [step for step in steps if step]


def _probes(vocabulary: Vocabulary) -> list[list[int]]:
    """Return the ids of an object's first two letters, if each is a token."""
    ids = _ids_of((b"{", b'"'), vocabulary)
    return [ids] if len(ids) == 2 else []


def _ids_of(texts: Sequence[bytes], vocabulary: Vocabulary) -> list[int]:
    """Return the first token of each of ``texts``, without those that are no token."""
    return [vocabulary.token_bytes.index(text) for text in texts if text in vocabulary.token_bytes]


def _left_out(spec: GrammarSpec) -> tuple[str, ...]:
    """Return what is left out of relaxed schemas before the library sees them."""
    if spec.root is None:
        return left_out_of(spec.text) if spec.relax and spec.kind == "json_schema" else ()
    parts = [(part.origin, own) for part, own in specs_by_origin(spec.root) if own.relax]
    return tuple(f"{origin}: {text}" for origin, own in parts for text in left_out_of(own.text))


class LLGuidanceCompiled:
    """A compiled grammar. Many requests at a time get several lexers, so that several threads can fill their rows; all
    but the first go with the requests."""

    __slots__ = ("_backend", "_first", "_lock", "_may_repeat", "_more", "mask_seconds", "num_bytes", "spec", "warnings")

    def __init__(
        self,
        backend: LLGuidanceBackend,
        spec: GrammarSpec,
        warnings: tuple[str, ...],
        root: Root,
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
        self._more: weakref.WeakSet[Root] = weakref.WeakSet()

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

    def _new_root(self) -> Root:
        grammar = self._first.grammar
        return Root(self._backend.root(grammar), grammar)
