"""The opening of a rank's device and groups: where ranks meet, and what they then exchange tensors by.

The host makes a file without a name (an anonymous one in memory) for each start of its workers, who inherit it: torch's
`FileStore` in it is where ranks tell each other their addresses, or NCCL's id. No port is needed for that, and nothing
is left behind. Only pipeline stages on several machines meet at a port, of the first one's machine. None of torch's
global groups is made, except where its symmetric memory insists on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import ModelLoadError
from ...workers.rank import Rank
from ..platforms.choice import choose_platform
from ..platforms.platform import Platform
from .experts_group import ExpertsGroup
from .group import ALONE, TensorGroup
from .pipeline import GlooLink, PipelineLink, StepSizes
from .stage import PipelineStage
from .symmetric_memory import NoPeers

_FOREVER = timedelta(days=365)
"""No wait for another rank ends by itself: the host sees a rank that dies or hangs, and then ends all of them."""


def open_device(rank: Rank) -> Platform:
    """Return the platform of the rank's device, checked to run kernels.

    Raises ModelLoadError: see `choose_platform`; of several ranks it says that each needs a device.
    """
    try:
        return choose_platform(rank.device)
    except ModelLoadError as error:
        if rank.world_size == 1:
            raise
        raise ModelLoadError(
            f"{rank} of {rank.world_size} ({_sizes(rank)}, a GPU each): {error}; or lower that, and see whether "
            f"CUDA_VISIBLE_DEVICES hides GPUs"
        ) from error


def open_group(rank: Rank, platform: Platform) -> TensorGroup:
    """Meet the ranks that share each layer with this one, all of which call this at the same point of their start.

    Waits for ever for a rank that does not come: ending this process is up to the host.

    Raises:
        ModelLoadError: the ranks' devices can't work together.
        RuntimeError: a rank has died meanwhile.
    """
    if rank.tp_size == 1:
        return ALONE
    setting = f"tensor_parallel_size={rank.tp_size}"
    store = _open_store(rank, f"tensor-{rank.dp_rank}-{rank.pp_rank}")
    return _open_tensor_group(store, platform, setting, rank.tp_rank, rank.tp_size)


def open_experts_group(rank: Rank, platform: Platform, tensor_group: TensorGroup) -> ExpertsGroup | None:
    """Meet all ranks, among which experts are divided over data parallel replicas; None: each replica has all experts.
    ``tensor_group``: what `open_group` returned. Waits and raises as that does."""
    if not rank.shares_experts:
        return None
    setting = f"enable_expert_parallel with data_parallel_size={rank.dp_size}"
    group = _open_tensor_group(_open_store(rank, "experts"), platform, setting, rank.index, rank.world_size)
    return ExpertsGroup(group, rank.dp_rank, rank.dp_size, tensor_group)


def _open_tensor_group(store: dist.Store, platform: Platform, setting: str, own: int, size: int) -> TensorGroup:
    _check_devices(store, platform, setting, own, size)
    if platform.device.type == "cuda":
        from .cuda_group import CudaGroup

        with _peers_explained(setting):
            return CudaGroup(store, own, size, platform.device, _FOREVER)
    from .gloo_group import GlooGroup

    return GlooGroup(store, own, size, _FOREVER)


def open_link(rank: Rank, platform: Platform, sizes: StepSizes) -> PipelineLink | None:
    """Meet the ranks at this one's place in the other pipeline stages; None: there is one stage. As `open_group`."""
    if rank.pp_size == 1:
        return None
    stage, setting = stage_of(rank), f"pipeline_parallel_size={rank.pp_size}"
    prefix = f"pipeline-{rank.dp_rank}-{rank.tp_rank}"
    is_one_machine = not rank.stages_meet_at
    store = _open_store(rank, prefix) if is_one_machine else _meeting_of_stages(rank, prefix)
    _check_devices(store, platform, setting, stage.index, stage.size, is_one_machine=is_one_machine)
    if platform.device.type != "cuda":
        return GlooLink(store, stage, sizes, _FOREVER, rank.address)
    if is_one_machine:
        from .cuda_link import open_cuda_link

        with _peers_explained(setting):
            return open_cuda_link(store, stage, sizes, platform.device, _FOREVER)
    with _network_explained(setting):
        from .nccl_link import NcclLink

        return NcclLink(store, stage, sizes, platform, _FOREVER)


def stage_of(rank: Rank) -> PipelineStage:
    """Return the pipeline stage of the rank: which of the model's layers it has."""
    return PipelineStage(rank.pp_rank, rank.pp_size)


def _sizes(rank: Rank) -> str:
    sizes = {
        "tensor_parallel_size": rank.tp_size,
        "pipeline_parallel_size": rank.pp_size,
        "data_parallel_size": rank.num_sharing,
    }
    return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _open_store(rank: Rank, prefix: str) -> dist.Store:
    store = dist.PrefixStore(prefix, dist.FileStore(rank.rendezvous, rank.world_size))
    store.set_timeout(_FOREVER)
    return store


def _meeting_of_stages(rank: Rank, prefix: str) -> dist.Store:
    """Return the store by which stages on several machines meet. The first rank serves it, by a descriptor that listens
    already; the server ends with its process."""
    host, _, port = rank.stages_meet_at.rpartition(":")
    serves = rank.meeting_fd >= 0
    store = dist.TCPStore(
        host,
        int(port),
        is_master=serves,
        timeout=_FOREVER,
        wait_for_workers=False,
        master_listen_fd=rank.meeting_fd if serves else None,
    )
    return dist.PrefixStore(prefix, store)


@contextmanager
def _peers_explained(setting: str) -> Iterator[None]:
    try:
        yield
    except NoPeers as error:
        raise ModelLoadError(
            f"{setting}: the ranks' GPUs can't reach each other's memory ({error}): name GPUs that can, "
            f"device='cuda:0,1' say; in a virtual machine or container pass them through together"
        ) from error


@contextmanager
def _network_explained(setting: str) -> Iterator[None]:
    if not dist.is_nccl_available():
        raise ModelLoadError(
            f"{setting}: stages on GPUs of several machines exchange by NCCL, which torch {torch.__version__} was "
            f"built without: install another torch on all machines"
        )
    try:
        yield
    except dist.DistBackendError as error:
        reason = " ".join(str(error).split())[:500]
        raise ModelLoadError(
            f"{setting}: NCCL could not connect the stages' machines ({reason}): a firewall must let them connect to "
            f"each other; NCCL_SOCKET_IFNAME names the network interface where there are several, and NCCL_DEBUG=INFO "
            f"has NCCL say what it tries"
        ) from error


def _check_devices(
    store: dist.Store, platform: Platform, setting: str, own: int, size: int, *, is_one_machine: bool = True
) -> None:
    """Raise ModelLoadError unless all ranks that meet at ``store``, ``size`` of them, have devices of one kind; on one
    machine also if two have the same GPU, or different ones, or such as can't read each other's memory."""
    device = platform.device
    store.set(f"device-{own}", f"{device} {platform.name}")
    for other in range(size):
        if other == own:
            continue
        place, _, name = store.get(f"device-{other}").decode().partition(" ")
        its = torch.device(place)
        if its.type != device.type:
            raise ModelLoadError(
                f"{setting}: rank {own} is on {device} and rank {other} on {its}: give all of them the same "
                f"kind of device, device='cpu' or as many GPUs"
            )
        if not platform.is_accelerator or not is_one_machine:
            continue
        if its == device:
            raise ModelLoadError(f"{setting}: ranks {own} and {other} are both on {device}: name other GPUs")
        if name != platform.name:
            raise ModelLoadError(
                f"{setting}: {device} is a {platform.name} and {its} a {name}: ranks need equal GPUs, which "
                f"device='cuda:0,2' names, say"
            )
        if not platform.can_read(its):
            raise ModelLoadError(
                f"{setting}: {device} can't read the memory of {its} (no peer access, see `nvidia-smi topo -p2p r`): "
                f"name GPUs that can, device='cuda:0,1' say; in a virtual machine or container pass them through "
                f"together"
            )
