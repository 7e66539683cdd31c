"""One engine for several processes: an `AsyncLLM` behind a Unix socket, and one that is its client.

    the engine's process                             app processes, each with a loop of its own
    AsyncLLM <── serve_engine <══ Unix socket ══> connect() ──> AsyncLLM ──> create_app, or code of yours
                     │ tokens, deltas: all of a turn of the loop in one write
                     │ requests, and how much may be read ahead

A connection that breaks, in whatever way, ends its requests, and no others. Messages are frames of msgpack.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..async_llm import AsyncLLM
from .handle import connect
from .serving import serve_engine

if TYPE_CHECKING:
    RemoteEngine = AsyncLLM

__all__ = ["RemoteEngine", "connect", "serve_engine"]


def __getattr__(name: str) -> Any:
    if name == "RemoteEngine":
        message = "aengine.remote.RemoteEngine is AsyncLLM: connect() returns one; take aengine.AsyncLLM for its type"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
