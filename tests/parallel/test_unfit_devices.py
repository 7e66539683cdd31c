"""Devices that ranks can't share a model on: each is one typed error with its cure, on every rank, and nobody waits."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aengine import AsyncLLM, InvalidRequestError, ModelLoadError
from aengine.checkpoint import early_checks
from aengine.config import EngineConfig
from aengine.runner.distributed.opening import _check_devices, open_device, open_group, open_link
from aengine.runner.distributed.pipeline import StepSizes
from aengine.runner.distributed.symmetric_memory import NoPeers, check_writes
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.platforms.cuda import CudaPlatform
from aengine.runner.platforms.platform import Unavailable
from aengine.workers.rank import Rank, ranks_of


class FakeGpu(NamedTuple):
    device: torch.device
    name: str = "NVIDIA H200"
    readable: tuple[str, ...] = ("cuda:0", "cuda:1")
    is_accelerator: bool = True

    def can_read(self, other: torch.device) -> bool:
        return str(other) in self.readable


def gpu(index: int, **options: Any) -> FakeGpu:
    return FakeGpu(torch.device("cuda", index), **options)


SIZES = StepSizes(8, torch.float32, 16, 4, 3)


def fault(folder: Path, setting: str, *platforms: Any) -> str:
    """The error of all ranks, as of rank 0."""
    size, rendezvous = len(platforms), str(folder / "meeting")
    places: list[dict[str, int]] = [{"tp_rank": i, "tp_size": size} for i in range(size)]
    if setting == "pipeline_parallel_size":
        places = [{"pp_rank": i, "pp_size": size} for i in range(size)]
    ranks = [Rank(i, **place, rendezvous=rendezvous) for i, place in enumerate(places)]

    def open_any(rank: Rank, platform: Any) -> None:
        open_group(rank, platform)
        open_link(rank, platform, SIZES)

    with ThreadPoolExecutor(size) as pool:
        opened = [pool.submit(open_any, *each) for each in zip(ranks, platforms, strict=True)]
        errors = [one.exception() for one in opened]
    assert all(isinstance(error, ModelLoadError) for error in errors), errors
    return str(errors[0])


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    ("platforms", "text"),
    [
        ((gpu(0), CpuPlatform()), "rank 0 is on cuda:0 and rank 1 on cpu: give all of them the same kind of device"),
        ((gpu(1), gpu(1)), "ranks 0 and 1 are both on cuda:1: name other GPUs"),
        (
            (gpu(0), gpu(1, name="NVIDIA A100")),
            "cuda:0 is a NVIDIA H200 and cuda:1 a NVIDIA A100: ranks need equal GPUs",
        ),
        ((gpu(0, readable=()), gpu(1, readable=())), "cuda:0 can't read the memory of cuda:1 .*name GPUs that can"),
    ],
)
def test_devices_that_do_not_fit(tmp_path: Path, platforms: tuple[Any, ...], text: str, setting: str) -> None:
    assert re.match(f"{setting}=2: {text}", fault(tmp_path, setting, *platforms))


def test_gpus_of_several_machines_have_the_same_numbers(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "meeting"), 2)
    _check_devices(store, gpu(0), "", 0, 0)  # tells the other one
    _check_devices(store, gpu(0), "", 1, 1, is_one_machine=False)
    with pytest.raises(ModelLoadError, match="rank 1 is on cpu and rank 0 on cuda:0"):
        _check_devices(store, CpuPlatform(), "", 1, 1, is_one_machine=False)


@pytest.mark.parametrize("lost", [None, (0, 2), (2, 1)])
def test_writes_that_do_not_arrive(tmp_path: Path, lost: tuple[int, int] | None) -> None:
    """``lost``: who writes, and into whose memory."""
    size = 3
    memories = [torch.randint(0, 255, (8 * size,), dtype=torch.uint8) for _ in range(size)]

    def check(rank: int) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "meeting"), size)
        parts = list(memories)
        if lost is not None and rank == lost[0]:
            parts[lost[1]] = torch.zeros_like(parts[0])
        check_writes(parts, store, rank)

    with ThreadPoolExecutor(size) as pool:
        errors = [one.exception() for one in [pool.submit(check, rank) for rank in range(size)]]
    for rank, error in enumerate(errors):
        if lost is None or rank != lost[1]:
            assert error is None
        else:
            assert isinstance(error, NoPeers)
            assert f"what rank {lost[0]} writes into the memory of rank {rank} does not arrive" in str(error)


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(setting: str) -> Any:
        index = int(setting.partition(":")[2] or 0)
        return gpu(index) if index < 2 else Unavailable("there are 2 GPUs, 'cuda:0' to 'cuda:1' here: use one of them")

    monkeypatch.setattr(CudaPlatform, "find", find)
    monkeypatch.setattr(FakeGpu, "check", lambda self: None, raising=False)
    for device in ("cuda", "auto"):
        ranks = ranks_of(EngineConfig.create("m", {"device": device, "tensor_parallel_size": 4}))
        assert [open_device(rank).device.index for rank in ranks[:2]] == [0, 1]
        for rank in ranks[2:]:
            with pytest.raises(ModelLoadError, match=r"of 4 \(tensor_parallel_size=4, a GPU each\).*2 GPUs") as caught:
                open_device(rank)
            assert "lower that, and see whether CUDA_VISIBLE_DEVICES hides GPUs" in str(caught.value)
    with pytest.raises(ModelLoadError) as alone:
        open_device(Rank(device="cuda:5"))
    assert "rank" not in str(alone.value)


@pytest.mark.slow
async def test_the_start_fails_at_once_though_other_ranks_could_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here, where the host finds a driver: rank 1 waits for nobody."""
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    monkeypatch.setattr(early_checks, "_DRIVERS", ("/proc/self",))
    settings: dict[str, Any] = {"device": "cuda", "tensor_parallel_size": 3, "num_threads": 1}
    with pytest.raises(ModelLoadError, match=r"rank [012] of 3 \(tensor_parallel_size=3, a GPU each\)"):
        await AsyncLLM("smollm2-135m", load_format="dummy", **settings).start()


def test_lists_of_a_wrong_length() -> None:
    for device in ("cuda:0", "cuda:0,1,2", "cuda:1,1"):
        with pytest.raises(InvalidRequestError, match="different devices, and the engine has 2 ranks") as caught:
            AsyncLLM("smollm2-135m", device=device, tensor_parallel_size=2)
        assert caught.value.param == "device"
