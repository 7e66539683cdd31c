"""Agreement of an engine's ranks, at start and in each step.

At start of each limit the least counts, and everything else must be equal.

    worker                                    host
    load, profile ──PROFILED: its offer──>    agree: a plan for all, or ModelLoadError
    allocate      <──ALLOCATE: the plan───
    capture       ──READY: its own facts─>    merge: what the engine gets

No rank takes memory before the offers of all have come, since all use the same block ids.

In each step the ranks of the last stage sample the same tokens, and go on from them. One that has sampled others has
computed something else: its part of what they compute together would spoil all later tokens.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InternalError, ModelLoadError
from ..ipc.lead import Lead
from ..ipc.messages import PLAN_LIMITS, ModelRunnerOutput
from .rank import Rank

_LEAST = ("num_swap_pages",)
_SUMS = ("kv_cache_bytes", "device_memory_total_bytes")


def agree(ranks: Sequence[Rank], offers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the plan that every rank can keep: the least of each limit.

    Raises ModelLoadError, which names both ranks, where anything else of two offers differs.
    """
    for rank, offer in zip(ranks, offers, strict=True):
        for name in sorted((offer.keys() | offers[0].keys()) - set(PLAN_LIMITS)):
            _check_equal(name, ranks[0], offers[0].get(name), rank, offer.get(name))
    return {name: min(offer[name] for offer in offers) for name in PLAN_LIMITS}


def merge(ranks: Sequence[Rank], agreed: Mapping[str, Any], readies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what was agreed with the READYs of a replica's ranks: sums over ranks or stages, or the least, for the rest
    those of the first; and under "ranks" each rank's own."""
    sums = {name: sum(ready[name] for ready in readies) for name in _SUMS if all(name in ready for ready in readies)}
    sums |= {name: min(ready[name] for ready in readies) for name in _LEAST if name in readies[0]}
    if "num_parameters" in readies[0]:  # each rank reports the parameters of its whole pipeline stage
        stages = (ready for rank, ready in zip(ranks, readies, strict=True) if rank.tp_rank == 0)
        sums["num_parameters"] = sum(ready["num_parameters"] for ready in stages)
    own = [{"rank": rank.index, **ready} for rank, ready in zip(ranks, readies, strict=True)]
    return {**readies[0], **agreed, **sums, "ranks": own}


def _check_equal(name: str, first: Rank, its: object, second: Rank, others: object) -> None:
    if its != others:
        raise ModelLoadError(
            f"{first} has {name}={its!r} and {second} has {name}={others!r}, but ranks of one engine must have the "
            f"same: use GPUs of one kind, and the same files and package versions for all"
        )


class AnswerCheck:
    """Compares what one rank has sampled with what the rank that answers has."""

    def __init__(self, lead: Lead, rank: Rank) -> None:
        self._lead = lead
        self._rank = rank
        self._unchecked: deque[tuple[int, int]] = deque()  # (step id, checksum) that the lead has not answered

    def note(self, output: ModelRunnerOutput) -> None:
        """Note an answer of this rank. Raises InternalError if it, or one before, is not that of the rank that
        answers."""
        if self._rank.pp_rank != self._rank.pp_size - 1:
            return  # a rank of an earlier pipeline stage samples nothing
        checksum = zlib.crc32(output.token_ids)
        if self._rank.answers:
            self._lead.note_answer(output.step_id, checksum)
            return
        self._unchecked.append((output.step_id, checksum))
        while self._unchecked and (theirs := self._lead.checksum_of(self._unchecked[0][0])) is not None:
            step_id, own = self._unchecked.popleft()
            if own != theirs:
                raise InternalError(
                    f"{self._rank} and the rank that answers have sampled different tokens in step {step_id}: they "
                    f"do not compute the same"
                )
