"""A worker's place among those of one engine: a value that is passed in, never looked up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import EngineConfig
from ..errors import ModelLoadError

LOOPBACK = "127.0.0.1"
_MOST_RANKS = 1024


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


def check_division(config: EngineConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError where config.json says that the model has not the heads or layers for so many ranks, which
    each would find out after its start; what else does not divide, they find out."""
    num_ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    heads, layers = hf_config.get("num_attention_heads"), hf_config.get("num_hidden_layers")
    if isinstance(layers, int) and 0 < layers < stages:
        raise ModelLoadError(
            f"pipeline_parallel_size={stages}: the model has {layers} layers, one a stage at least: use "
            f"{layers} or less"
        )
    if stages > 1 and config.data_parallel_size > 1:  # only ranks that share experts know of their replicas
        raise ModelLoadError(
            f"pipeline_parallel_size={stages} with data_parallel_size={config.data_parallel_size}: experts can't be "
            f"divided among replicas that are pipelines: leave enable_expert_parallel out, or use tensor_parallel_size"
        )
    if config.executor == "ray" and config.data_parallel_size > 1:  # only ranks that share experts know of replicas
        raise ModelLoadError(
            f"executor='ray' with data_parallel_size={config.data_parallel_size}: experts can be divided among "
            f"replicas on one machine only: leave enable_expert_parallel out"
        )
    if num_ranks > 1 and config.model_impl == "transformers":
        raise ModelLoadError(
            f"tensor_parallel_size={num_ranks}: layers that are computed by transformers (model_impl='transformers' "
            f"was asked for) can't be divided among ranks: use model_impl='auto', or data_parallel_size"
        )
    if isinstance(heads, int) and heads > 0:
        kv_heads = hf_config.get("num_key_value_heads")
        kv_heads = kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads

        def fits(size: int) -> bool:
            return not heads % size and (not kv_heads % size or not size % kv_heads)

        if not fits(num_ranks):
            raise ModelLoadError(
                f"tensor_parallel_size={num_ranks}: the model has {heads} attention heads and {kv_heads} key-value "
                f"heads, which can't be divided by it; it can be {sizes_that(fits, heads)}"
            )


def sizes_that(fits: Callable[[int], bool], most: int) -> str:
    """Return in words the tensor parallel sizes from 1 to ``most`` that fit, as far as there are machines for them."""
    usable = [size for size in range(1, min(most, _MOST_RANKS) + 1) if fits(size)]
    return ", ".join(map(str, usable[:-1])) + f" or {usable[-1]}" if len(usable) > 1 else "1"
