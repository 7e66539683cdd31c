"""The process in which grammars are tried: what `CompilerProcess` is told to import."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

from ..vocabulary import Vocabulary
from .backend import LLGuidanceBackend
from .process import MAX_BYTES

__all__ = ["prepare"]


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what answers requests; ``first`` is the vocabulary. See `compile_process`."""
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
            backend.try_out(request["grammar"])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # ValueError, and pyo3's PanicException, which is no Exception
            return {"error": str(error)}
        return {}

    return answer


def _limit_memory() -> None:
    """From what it has now. Beyond, the library ends the process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
