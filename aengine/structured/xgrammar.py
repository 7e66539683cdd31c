"""The optional backend: xgrammar (``pip install aengine[xgrammar]``), whose masks take half the time.

What it costs: a compile may take seconds, so it runs in a process that is killed at the time limit; and it leaves out
keywords that it can't enforce, saying so only on its stderr, or not at all. So what it says there is read, and schemas
are searched for keywords that it is known to pass over (`xgrammar_schema`): refused, or with ``relax`` a warning.
"""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any

from ..errors import GrammarError
from .backend import Bitmask, MatcherError, address_of
from .compile_process import CompilerProcesses, CompilerStartError, CompileTimeoutError, OnWait
from .spec import GrammarSpec
from .vocabulary import Vocabulary
from .xgrammar_process import load_core, tokenizer_info
from .xgrammar_schema import ignored, without_raw_patterns

__all__ = ["XGrammarBackend", "XGrammarMatcher"]

_NOISE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Warning: )?", re.MULTILINE)
"""A time and a place in its source, before each message."""


class XGrammarBackend:
    """Holds the vocabulary in the library's form, and idle compiler processes."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, *, timeout: float = 2.0) -> None:
        """``timeout``: seconds after which a compile is killed. Raises GrammarError."""
        try:
            self.core = load_core()
        except ImportError as error:
            raise GrammarError(
                f"backend 'xgrammar' needs a package that can't be imported ({error}): pip install aengine[xgrammar], "
                "or use backend='auto'",
                kind="unsupported",
            ) from error
        self.vocabulary = vocabulary
        self.eos_row = vocabulary.eos_row()
        self.last_word = (1 << vocabulary.vocab_size % 32) - 1 if vocabulary.vocab_size % 32 else -1
        self.info = tokenizer_info(self.core, vocabulary.token_bytes, vocabulary.vocab_size, vocabulary.eos_ids)
        self._timeout = timeout
        self._processes = CompilerProcesses(
            f"{__package__}.xgrammar_process", functools.partial(_first_message, vocabulary)
        )
        weakref.finalize(self, self._processes.close)
        try:
            self._processes.start()
        except CompilerStartError as error:
            raise GrammarError(f"xgrammar's compiler process does not start: {error}", kind="unsupported") from error

    def is_quick(self, spec: GrammarSpec) -> bool:
        """Never: any may take as long as its process may live."""
        return False

    def compile(self, spec: GrammarSpec, on_wait: OnWait | None = None) -> XGrammarCompiled:
        passed_over = ignored(json.loads(spec.text)) if spec.kind == "json_schema" else []
        if passed_over and not spec.relax:
            path, what = passed_over[0]
            raise _error(spec, "unsupported", f"at {path}: xgrammar does not enforce {what}", path)
        text = without_raw_patterns(spec.text) if passed_over else spec.text
        request = {"kind": spec.kind, "text": text, "whitespace": spec.whitespace}
        try:
            answer = self._processes.compile(request, self._timeout, on_wait)
        except CompileTimeoutError:
            raise _error(spec, "too_complex", f"xgrammar took longer than {self._timeout:g} s") from None
        except (EOFError, OSError) as error:
            raise _error(spec, "too_complex", f"xgrammar failed: {error}") from None
        if "error" in answer:
            message = _clean(answer["error"])
            raise _error(spec, _kind_of(message), message)
        said = tuple(dict.fromkeys(line for line in _clean(answer["warnings"]).splitlines() if line.strip()))
        if said and not spec.relax:
            raise _error(spec, "unsupported", said[0])
        grammar = self.core.CompiledGrammar.deserialize_json(answer["grammar"], self.info)
        warnings = tuple(f"{path}: {what} is not enforced" for path, what in passed_over) + said
        return XGrammarCompiled(self, spec, warnings, grammar, answer["mask_seconds"])

    def may_accept(self, token_id: int) -> bool:
        """Whether there is such a token, and it is text or an end."""
        words = self.vocabulary
        return 0 <= token_id < words.vocab_size and (bool(words.token_bytes[token_id]) or token_id in words.eos_ids)

    def close(self) -> None:
        self._processes.close()


def _first_message(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token_bytes": list(vocabulary.token_bytes),
        "vocab_size": vocabulary.vocab_size,
        "eos_ids": list(vocabulary.eos_ids),
    }


class XGrammarCompiled:
    """A compiled grammar, shared by its matchers."""

    __slots__ = ("_backend", "_grammar", "mask_seconds", "num_bytes", "spec", "warnings")

    def __init__(
        self,
        backend: XGrammarBackend,
        spec: GrammarSpec,
        warnings: tuple[str, ...],
        grammar: Any,
        mask_seconds: float,
    ) -> None:
        self.spec = spec
        self.warnings = warnings
        self.mask_seconds = mask_seconds
        self.num_bytes = int(grammar.memory_size_bytes()) + 8 * len(spec.text)
        self._backend = backend
        self._grammar = grammar

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._backend, self._backend.core.GrammarMatcher(self._grammar, None, False, -1, None))


class XGrammarMatcher:
    """One request's place; see `aengine.structured.backend.Matcher`. Two threads in one would crash the process."""

    __slots__ = ("_backend", "_inner", "_num_tokens", "_only_end")

    def __init__(self, backend: XGrammarBackend, inner: Any) -> None:
        self._backend = backend
        self._inner = inner
        self._num_tokens = 0
        self._only_end: bool | None = None  # whether only the end can come here; None: not looked at yet

    def fill(self, bitmask: Bitmask, row: int) -> None:
        row_bytes = self._backend.vocabulary.row_bytes
        _, view = address_of(bitmask, (row,), row_bytes)
        target = view[row * row_bytes : (row + 1) * row_bytes]
        if self._inner.is_terminated():
            target[:] = self._backend.eos_row
            return
        import numpy as np

        words = np.frombuffer(target, np.int32).reshape(1, -1)
        try:
            limited = self._inner.fill_next_token_bitmask(words, 0, False)
        except RuntimeError as error:
            raise MatcherError(f"the grammar can't be followed any further: {_clean(str(error))}") from None
        if not limited:
            words[:] = -1
        words[0, -1] &= self._backend.last_word  # it sets the bits beyond the vocabulary
        if not words.any():
            raise MatcherError("the grammar leads nowhere from here: no token can come, and the text may not end")

    def accept(self, token_ids: Sequence[int]) -> int:
        accepted = 0
        for token_id in token_ids:
            if self._inner.is_terminated() or not self._backend.may_accept(token_id):
                break  # the library would refuse it too, and say so on the host's stderr
            if not self._inner.accept_token(token_id, False):
                break
            accepted += 1
        if accepted:
            self._num_tokens += accepted
            self._only_end = None
        return accepted

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise MatcherError(f"can't undo {num_tokens} tokens: {self._num_tokens} were accepted")
        if num_tokens:
            self._inner.rollback(num_tokens)
            self._num_tokens -= num_tokens
            self._only_end = None

    def forced_tokens(self) -> list[int]:
        """None: the library knows forced text, not how the tokenizer would write it."""
        return []

    def clone(self) -> XGrammarMatcher:
        other = XGrammarMatcher(self._backend, self._inner.fork())
        other._num_tokens, other._only_end = self._num_tokens, self._only_end
        return other

    @property
    def is_accepting(self) -> bool:
        return bool(self._inner.is_terminated() or self._inner.is_completed())

    @property
    def is_finished(self) -> bool:
        if self._inner.is_terminated():
            return True
        if self._only_end is None:
            self._only_end = bool(self._inner.is_completed()) and self._only_end_may_come()
        return self._only_end

    def _only_end_may_come(self) -> bool:
        row = bytearray(self._backend.vocabulary.row_bytes)
        self.fill(memoryview(row).cast("i", (1, len(row) // 4)), 0)
        return row == self._backend.eos_row


def _clean(message: str) -> str:
    return _NOISE.sub("", message).strip()


def _kind_of(message: str) -> str:
    if re.search(r"greater than|less than|must not be empty|cannot accept any|unsatisfiable", message, re.IGNORECASE):
        return "unsatisfiable"
    if re.search(r"not supported|unsupported (?!type)", message, re.IGNORECASE):
        return "unsupported"
    if re.search(r"too (many|large|deep|complex)|recursion|limit", message, re.IGNORECASE):
        return "too_complex"
    return "invalid"


def _error(spec: GrammarSpec, kind: Any, message: str, path: str = "") -> GrammarError:
    about = {"json_schema": "the JSON schema", "regex": "the regex", "choice": "choice"}.get(spec.kind, "the grammar")
    text = message.splitlines()[0] if message else "unknown error"
    cure = (
        '; on_unsupported="relax" leaves it out'
        if kind == "unsupported" and spec.kind == "json_schema" and not spec.relax
        else ""
    )
    return GrammarError(f"{about} can't be used: {text[:300]}{cure}", kind=kind, path=path)
