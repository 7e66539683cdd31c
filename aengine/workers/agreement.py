"""Agreement of an engine's ranks at start: of each limit the least; everything else must be equal.

    worker                                    host
    load, profile ──PROFILED: its offer──>    agree: a plan for all, or ModelLoadError
    allocate      <──ALLOCATE: the plan───
    capture       ──READY: its own facts─>    merge: what the engine gets

No rank takes memory before the offers of all have come, since all use the same block ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelLoadError
from ..ipc.messages import PLAN_LIMITS
from .rank import Rank

__all__ = ["agree", "merge"]

_SUMS = ("num_parameters", "kv_cache_bytes", "device_memory_total_bytes")


def agree(ranks: Sequence[Rank], offers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The plan that every rank can keep: the least of each limit.

    Raises ModelLoadError, which names both ranks, where anything else of two offers differs.
    """
    for rank, offer in zip(ranks, offers, strict=True):
        for name in sorted((offer.keys() | offers[0].keys()) - set(PLAN_LIMITS)):
            _check_equal(name, ranks[0], offers[0].get(name), rank, offer.get(name))
    return {name: min(offer[name] for offer in offers) for name in PLAN_LIMITS}


def merge(ranks: Sequence[Rank], agreed: Mapping[str, Any], readies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what was agreed with the ranks' READYs: sums, for the rest those of rank 0; and under "ranks" each
    rank's own."""
    sums = {name: sum(ready[name] for ready in readies) for name in _SUMS if all(name in ready for ready in readies)}
    own = [{"rank": rank.index, **ready} for rank, ready in zip(ranks, readies, strict=True)]
    return {**readies[0], **agreed, **sums, "ranks": own}


def _check_equal(name: str, first: Rank, its: object, second: Rank, others: object) -> None:
    if its != others:
        raise ModelLoadError(
            f"{first} has {name}={its!r} and {second} has {name}={others!r}, but ranks of one engine must have the "
            f"same: use GPUs of one kind, and the same files and package versions for all"
        )
