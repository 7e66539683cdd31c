"""A worker's place among those of one engine: a value that is passed in, never looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import EngineConfig

__all__ = ["Rank", "ranks_of"]


@dataclass(frozen=True, slots=True)
class Rank:
    """Index among all ranks, place in each kind of group, and device. So far only tensor parallel groups exist."""

    index: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: str = "auto"  # as the setting of that name

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def answers(self) -> bool:
        """Whether this rank sends the sampled tokens to the host: the first of the last stage."""
        return self.tp_rank == 0 and self.pp_rank == self.pp_size - 1

    def __str__(self) -> str:
        return f"rank {self.index}"

    def to_wire(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Rank:
        return cls(**wire)


def ranks_of(config: EngineConfig) -> list[Rank]:
    """The ranks that these settings ask for, by index. Of "cuda" each gets a GPU of its own."""
    size = config.tensor_parallel_size
    shares = size == 1 or ":" in config.device or config.device in ("auto", "cpu")
    devices = [config.device if shares else f"{config.device}:{place}" for place in range(size)]
    return [Rank(index=i, tp_rank=i, tp_size=size, device=device) for i, device in enumerate(devices)]
