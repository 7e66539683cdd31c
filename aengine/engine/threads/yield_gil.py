"""Lets other threads have the GIL, in the midst of much Python.

A thread that computes keeps the GIL from the host's loop for 5 ms at a time, each time that the loop wants it.
"""

from __future__ import annotations

import asyncio
import time


def yield_gil() -> None:
    """Let other threads run. Does nothing on a loop's own thread, which would only wait for threads that compute."""
    if asyncio._get_running_loop() is None:
        time.sleep(0)
