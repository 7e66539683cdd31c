"""Trials: grammars that may take llguidance long are compiled in a process first, which is killed when they do.

What it compiles can't be sent to another process, so a grammar that passes its trial is compiled once more in the host,
where it takes about as long.
"""

from __future__ import annotations

import dataclasses
import resource
import weakref
from collections.abc import Callable
from typing import Any

from ...errors import GrammarError
from ..compile_process import CompilerProcesses, CompilerStartError, CompileTimeoutError, OnWait
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .errors import trial_error

__all__ = ["Trials", "prepare"]

_MAX_BYTES = 1 << 30
"""What a trial may take: a grammar that passes takes as much in the host."""


class Trials:
    """The host's half. Starts no process before the first trial."""

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._seconds = seconds
        self._processes = CompilerProcesses(__name__, lambda: _message_of(vocabulary))
        weakref.finalize(self, self._processes.close)

    def run(self, spec: GrammarSpec, on_wait: OnWait | None) -> None:
        """Blocking. Raises GrammarError: what the library says, or that it takes too long or too much memory."""
        try:
            answer = self._processes.compile(dataclasses.asdict(spec), self._seconds, on_wait)
        except CompileTimeoutError:
            raise trial_error(spec, f"it takes longer than {self._seconds:g} s to compile") from None
        except CompilerStartError as error:
            cause = f"it may take long to compile, and the process to try that in does not start ({error})"
            raise trial_error(spec, cause) from None
        except EOFError as error:
            raise trial_error(spec, f"compiling it takes more than {_MAX_BYTES >> 30} GB ({error})") from None
        if answer:
            raise GrammarError(answer["error"], kind=answer["kind"], path=answer["path"])

    def close(self) -> None:
        self._processes.close()


def _message_of(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary.vocab_size,
        "token_bytes": vocabulary.token_bytes,
        "eos_ids": vocabulary.eos_ids,
        "special_ids": list(vocabulary.special_ids),
    }


# -- the child


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests; ``first`` is the vocabulary. See `compile_process`."""
    from .backend import LLGuidanceBackend

    vocabulary = Vocabulary(
        vocab_size=first["vocab_size"],
        token_bytes=tuple(first["token_bytes"]),
        eos_ids=tuple(first["eos_ids"]),
        special_ids=frozenset(first["special_ids"]),
    )
    backend = LLGuidanceBackend(vocabulary, fill_threads=1)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        _limit_memory()
        try:
            backend.compile_here(GrammarSpec(**request))
        except GrammarError as error:
            return {"error": str(error), "kind": error.kind, "path": error.path}
        return {}

    return answer


def _limit_memory() -> None:
    """From what it has now. Beyond, the library ends the process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
