"""`Liveness`: what workers show of themselves in memory that the host reads, without being asked."""

from __future__ import annotations

from typing import NamedTuple


class Liveness(NamedTuple):
    """Signs of life of all workers of an executor, taken together."""

    num_heartbeats: int  # heartbeats of the whole group; grows when each worker has sent one
    overdue_seconds: float = 0.0  # seconds that the devices have worked on a step beyond what it can take
    slowest: str = "the worker"  # the name that an error gives to the worker that hangs
