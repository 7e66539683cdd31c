"""One engine for several processes: an `AsyncLLM` behind a Unix socket, and `RemoteEngine`, its client.

    the engine's process                             app processes, each with a loop of its own
    AsyncLLM <── serve_engine <══ Unix socket ══> connect() ──> RemoteEngine ──> create_app, or code of yours
                     │ tokens, deltas: all of a turn of the loop in one write
                     │ requests, and how much may be read ahead

A connection that breaks, in whatever way, ends its requests, and no others. Messages are frames of msgpack.
"""

from __future__ import annotations

from .engine import RemoteEngine, connect
from .serving import serve_engine

__all__ = ["RemoteEngine", "connect", "serve_engine"]
