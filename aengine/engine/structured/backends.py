"""Finds and builds grammar backends: llguidance, and those that packages add by an entry point.

A package's pyproject.toml names what makes a `Backend`, a class or a function of (vocabulary, timeout):

    [project.entry-points."aengine.grammar_backends"]
    mine = "mine.grammar:MyBackend"

``StructuredOutput(backend="mine")`` then asks for it. It is looked for, imported and built when first asked for, in a
thread of the compile pool.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections import defaultdict
from collections.abc import Callable

from ...errors import EngineClosedError, GrammarError
from ..threads.futures import error_for_waiter
from .backend import Backend
from .vocabulary import Vocabulary

ENTRY_POINTS = "aengine.grammar_backends"
_DEFAULT = "llguidance"


def load_backend(name: str, vocabulary: Vocabulary, timeout: float = 2.0) -> Backend:
    """Build the backend ``name`` for ``vocabulary``. Blocking: 0.3 to 2 s, by the vocabulary.

    ``timeout``: seconds for a compile, after which one that runs in a process of its own is killed. Raises
    GrammarError when there is no such backend, it can't be built, or it can't serve the vocabulary.
    """
    if name == _DEFAULT:
        from .llguidance.backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary, timeout=timeout)
    found = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(map(repr, (_DEFAULT, *sorted(found))))
        raise GrammarError(
            f"there is no grammar backend {name!r:.80}: there is {known}; a package adds one by an entry point of the "
            f"group {ENTRY_POINTS!r}",
            kind="unsupported",
        )
    try:
        backend: Backend = found[name].load()(vocabulary, timeout)
    except GrammarError:
        raise
    except Exception as error:
        owner = found[name].dist
        raise GrammarError(
            f"the grammar backend {name!r} of the package {owner.name if owner else '?'!r} can't be built: "
            f"{type(error).__name__}: {error}",
            kind="unsupported",
        ) from error
    return backend


Load = Callable[[str, Vocabulary, float], Backend]
"""Makes a backend, as `load_backend` does."""


class Backends:
    """Builds the vocabulary, and each backend for it, once, in the first thread that needs it."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], timeout: float, load: Load = load_backend) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._timeout = timeout
        self._load = load
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # a lock a library
        self._built: dict[str, Backend | GrammarError] = {}
        self._closed = False

    def get(self, name: str) -> Backend:
        """Return the backend. Raises GrammarError when it can't serve this model, and EngineClosedError."""
        with self._locks[name]:
            if self._closed:
                raise EngineClosedError("the engine is closed: it compiles no more grammars")
            if name not in self._built:
                try:
                    self._built[name] = self._load(name, self._known_vocabulary(), self._timeout)
                except GrammarError as error:
                    self._built[name] = error
            found = self._built[name]
        if isinstance(found, GrammarError):
            raise error_for_waiter(found)
        return found

    def _known_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def close(self) -> None:
        """Close all that are built. Does not wait for one that is being built; that one is never used."""
        self._closed = True
        for backend in list(self._built.values()):
            if not isinstance(backend, GrammarError):
                backend.close()
