"""A worker's place among those of one engine: a value that is passed in, never looked up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import EngineConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rank:
    """Index among the ranks that compute together, place in each kind of group, and device.

    Ranks of a tensor parallel group follow each other, then the stages of a pipeline, then replicas that share experts;
    others compute alone.
    """

    index: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0  # index of its replica
    dp_size: int = 1  # number of replicas
    shares_experts: bool = False  # whether replicas divide the experts among themselves
    device: str = "auto"  # the setting of that name, for one device; "auto:N": the N-th of those that it would choose
    rendezvous: str = ""  # path of the file in which the ranks of one machine meet; "": the machine has one rank
    address: str = LOOPBACK  # address by which other machines reach this one
    stages_meet_at: str = ""  # "address:port" at which pipeline stages of several machines meet; "": in the file
    meeting_fd: int = -1  # listening descriptor of the first rank

    @property
    def world_size(self) -> int:
        """Number of ranks that compute together."""
        return self.tp_size * self.pp_size * self.num_sharing

    @property
    def num_sharing(self) -> int:
        """Number of replicas among which experts are divided."""
        return self.dp_size if self.shares_experts else 1

    @property
    def answers(self) -> bool:
        """Whether this rank sends the sampled tokens to the host: the first of the last stage."""
        return self.tp_rank == 0 and self.pp_rank == self.pp_size - 1

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its replica, which the others follow."""
        return self.tp_rank == 0 and self.pp_rank == 0

    def __str__(self) -> str:
        return f"rank {self.index}"

    def to_wire(self) -> dict[str, Any]:
        """Return the rank as plain data."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Rank:
        return cls(**wire)


def ranks_of(config: EngineConfig, dp_rank: int = 0, dp_size: int = 1) -> list[Rank]:
    """Return the ranks that these settings ask for, by index. Each gets a GPU of its own: those that ``device`` lists,
    else the first ones. They are of the replica ``dp_rank``; or, if the settings are not those of one replica, of all
    replicas, which share experts."""
    tp_size, pp_size, num_sharing = (
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.data_parallel_size,
    )
    num_ranks, shares_experts = config.num_ranks * num_sharing, num_sharing > 1
    replicas, dp_size = (range(num_sharing), num_sharing) if shares_experts else (range(dp_rank, dp_rank + 1), dp_size)
    name, colon, listed = config.device.partition(":")
    if name == "cpu" or num_ranks == 1:
        devices = [config.device] * num_ranks
    else:
        devices = [f"{name}:{place}" for place in (listed.split(",") if colon else range(num_ranks))]
    places = itertools.product(replicas, range(pp_size), range(tp_size))
    return [
        Rank(i, tp, tp_size, pp, pp_size, dp, dp_size, shares_experts, device)
        for i, ((dp, pp, tp), device) in enumerate(zip(places, devices, strict=True))
    ]
