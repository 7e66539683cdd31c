"""Clients of other libraries over an engine of this process, made by the doors, which import the engine.

The package's face, which may import both, registers a function for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CLIENTS: dict[str, Callable[..., Any]] = {}
"""Name of a client to the function that makes one: of the engine, what else it needs, and that client's options."""
