"""Trials: grammars that may take llguidance long are compiled in a process first, which is killed when they do.

What it compiles can't be sent to another process, so a grammar that passes its trial is compiled once more in the host,
where it takes about as long.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..compile_process import CompilerProcesses, CompilerStartError, CompileTimeoutError, OnWait
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .errors import grammar_error, trial_error
from .grammar import grammar_of

__all__ = ["MAX_BYTES", "Trials"]

MAX_BYTES = 1 << 30
"""What a trial may take: a grammar that passes takes as much in the host."""


class Trials:
    """The host's half. Starts no process before the first trial."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._seconds = seconds
        self._processes = CompilerProcesses(f"{__package__}.child", lambda: _message_of(vocabulary))
        weakref.finalize(self, self._processes.close)

    def run(self, spec: GrammarSpec, on_wait: OnWait | None) -> None:
        """Blocking. Raises GrammarError: what the library says, or that it takes too long or too much memory."""
        try:
            grammar = grammar_of(spec)
        except ValueError as error:
            raise grammar_error(spec, str(error)) from None
        try:
            answer = self._processes.compile({"grammar": grammar}, self._seconds, on_wait)
        except CompileTimeoutError:
            raise trial_error(spec, f"it takes longer than {self._seconds:g} s to compile") from None
        except CompilerStartError as error:
            cause = f"it may take long to compile, and the process to try that in does not start ({error})"
            raise trial_error(spec, cause) from None
        except EOFError as error:
            raise trial_error(spec, f"compiling it takes more than {MAX_BYTES >> 30} GB ({error})") from None
        if answer:
            raise grammar_error(spec, answer["error"])

    def close(self) -> None:
        self._processes.close()


def _message_of(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary.vocab_size,
        "token_bytes": vocabulary.token_bytes,
        "eos_ids": vocabulary.eos_ids,
        "special_ids": list(vocabulary.special_ids),
    }
