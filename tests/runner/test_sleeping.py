"""What of a rank's memory goes and comes back: addresses stay, kept contents too, a failure leaves all as it was."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_startup import generate, start
from torch import Tensor

from aengine.config import EngineConfig
from aengine.errors import InternalError
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.platforms.cuda_memory import CudaMemory
from aengine.runner.platforms.virtual_memory import CpuMemory
from aengine.runner.sleeping import arena as arena_module
from aengine.runner.sleeping.arena import Arena
from aengine.runner.sleeping.moving import made_in
from aengine.runner.sleeping.sleeper import ArenaSleeper, Sleeper, choose_sleeper
from aengine.runner.startup import load

CPU = torch.device("cpu")
BOTH = ["weights", "kv_cache"]


class GpuMemory(CpuMemory):
    """The CPU's, which is as full of garbage as a GPU's, and as limited."""

    granularity = 1 << 16

    def __init__(self) -> None:
        super().__init__()
        self.limit = 1 << 40
        self.mapped: dict[int, int] = {}

    def map(self, address: int, size: int) -> None:
        assert address not in self.mapped and size % self.granularity == 0
        if sum(self.mapped.values()) + size > self.limit:
            raise torch.OutOfMemoryError("no memory left")
        self.mapped[address] = size
        self.tensor(address, size).fill_(0xA5)

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        super().unmap(address, size)


class LikeGpu(CpuPlatform):
    is_accelerator = True

    def __init__(self) -> None:
        self.virtual_memory: GpuMemory = GpuMemory()


@pytest.fixture
def gpu() -> LikeGpu:
    return LikeGpu()


class Runner:
    may_prepare = True
    num_settled = 0


def sleeper_of(gpu: LikeGpu) -> tuple[ArenaSleeper, Runner, dict[str, Arena]]:
    arenas = {tag: Arena(gpu.virtual_memory, gpu, keeps=tag == "weights") for tag in BOTH}
    sleeper, runner = ArenaSleeper(gpu, *arenas.values()), Runner()

    def settle() -> None:
        assert all(arena.is_mapped for arena in arenas.values()) or not gpu.virtual_memory.mapped
        runner.num_settled += 1

    sleeper.attach(runner, settle)  # type: ignore[arg-type]
    return sleeper, runner, arenas


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_cycles(gpu: LikeGpu, dtype: torch.dtype) -> None:
    sleeper, runner, arenas = sleeper_of(gpu)
    kept = (
        arenas["weights"].place(3 * 1000 * dtype.itemsize, 1 << 20)[: 3000 * dtype.itemsize].view(dtype).view(3, 1000)
    )
    kept.copy_(torch.arange(3000).view(3, 1000) % 100)
    pages = sleeper.zeros((5, 999), dtype, CPU)
    expected, mapped = kept.clone(), dict(gpu.virtual_memory.mapped)
    assert not pages.view(torch.uint8).any()
    for _ in range(20):
        pages.view(torch.uint8).fill_(7)
        runner.num_settled = 0
        assert sleeper.sleep(BOTH) == sleeper.sleep(BOTH) == ""  # the second time nothing is left to do
        assert not gpu.virtual_memory.mapped and runner.num_settled == 2
        assert sleeper.wake_up(["weights"]) == ""
        assert torch.equal(kept.view(torch.uint8), expected.view(torch.uint8))
        assert not runner.may_prepare
        assert sleeper.wake_up(["kv_cache"]) == sleeper.wake_up(BOTH) == ""
        assert gpu.virtual_memory.mapped == mapped and runner.may_prepare
        assert torch.equal(kept.view(torch.uint8), expected.view(torch.uint8))
        assert not pages.view(torch.uint8).any()


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["kv_cache"]])
def test_waking_without_memory(gpu: LikeGpu, tags: list[str]) -> None:
    """Wherever it runs out, all that was taken is given back, and waking once there is memory is as ever."""
    sleeper, runner, arenas = sleeper_of(gpu)
    for _ in range(3):
        arenas["weights"].zeros((70_000,), torch.uint8, CPU).fill_(3)
        sleeper.zeros((70_000,), torch.uint8, CPU)
    needed = sum(gpu.virtual_memory.mapped[region.address] for tag in tags for region in arenas[tag].regions)
    assert sleeper.sleep(BOTH) == ""
    for gpu.virtual_memory.limit in range(0, needed, gpu.virtual_memory.granularity):
        assert f"{needed} bytes are needed" in sleeper.wake_up(tags)
        assert not gpu.virtual_memory.mapped and not runner.may_prepare
    gpu.virtual_memory.limit = 2 * needed
    assert sleeper.wake_up(tags) == sleeper.wake_up(BOTH) == ""
    assert all(bool((region.memory[:70_000] == 3).all()) for region in arenas["weights"].regions)


def test_no_room_for_what_is_kept(gpu: LikeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper, runner, arenas = sleeper_of(gpu)
    kept, mapped = arenas["weights"].zeros((1000,), torch.uint8, CPU).fill_(3), dict(gpu.virtual_memory.mapped)
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "free_memory", lambda: 1000)
        assert "1000 of the host's memory are free" in sleeper.sleep(BOTH)
    assert gpu.virtual_memory.mapped == mapped and bool((kept == 3).all())
    assert runner.may_prepare
    assert sleeper.sleep(BOTH) == "" and not gpu.virtual_memory.mapped


def test_what_is_made_moves_with_all_who_hold_it(gpu: LikeGpu) -> None:
    """Views, what they were made of, and what a closure holds; what was there before, and what is on another device,
    stay."""
    arena = Arena(gpu.virtual_memory, gpu, keeps=True)
    before = torch.randn(100)
    place_before = before.data_ptr()

    def closure_over(tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    with made_in(arena, gpu):
        whole = torch.randn(1000)
        part, turned = whole[100:200], torch.randn(30, 50).to(torch.bfloat16).t()
        of_closure = closure_over(part[7:])
        parameter = torch.nn.Parameter(torch.randn(9), requires_grad=False)
        with torch.inference_mode():
            inferred = torch.randn(64)
            rest = inferred[3:]
        elsewhere = torch.empty(9, device="meta")
        old = weakref.ref(whole.untyped_storage())
        values = [tensor.clone() for tensor in (whole, part, turned, of_closure(), parameter, inferred, rest)]
    moved = [whole, part, turned, of_closure(), parameter, inferred, rest]
    assert all(map(torch.equal, moved, values)) and elsewhere.device.type == "meta"
    spans = [(region.address, region.address + len(region.memory)) for region in arena.regions]
    assert all(any(first <= one.data_ptr() < last for first, last in spans) for one in moved)
    assert before.data_ptr() == place_before and old() is None
    assert (turned.stride(), parameter.requires_grad, type(parameter)) == ((1, 50), False, torch.nn.Parameter)
    whole.fill_(5)  # as a load into the same memory does
    assert bool((of_closure() == 5).all()) and bool((part == 5).all())
    with torch.inference_mode():
        inferred.fill_(6)
    assert bool((rest == 6).all())
    assert not before.eq(5).any()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 5000, 300 << 20])
def test_places(gpu: LikeGpu, size: int) -> None:
    arena = Arena(gpu.virtual_memory, gpu, keeps=True)
    places = [arena.place(one, 1 << 20) for one in (100, size, 100)]
    assert all(len(place) >= one for place, one in zip(places, (100, size, 100), strict=True))
    assert all(place.data_ptr() % 512 == 0 for place in places if len(place))
    ends = sorted((place.data_ptr(), place.data_ptr() + len(place)) for place in places if len(place))
    assert all(first[1] <= second[0] for first, second in zip(ends, ends[1:], strict=False))


class Driver:
    """libcuda, as far as it is called: refuses what a driver would, and the call named ``fails``."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.has_virtual_memory = 1
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        own = getattr(type(self), f"_{name}", lambda *args: 0)

        def call(*args: Any) -> int:
            return self.fails.get(name) or own(self, *args) or 0

        return self.__dict__["calls"].setdefault(name, call)

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        assert (attribute, device) == (102, 1)
        value.contents.value = self.has_virtual_memory

    def _cuMemGetAllocationGranularity(self, value: Any, properties: Any, flags: int) -> None:
        p = properties.contents
        assert (p.type, p.handle_types, p.location.type, p.location.id, ctypes.sizeof(p)) == (1, 0, 1, 1, 32)
        value.contents.value = 2 << 20

    def _cuMemAddressReserve(self, address: Any, size: int, *rest: int) -> None:
        address.contents.value = (1 << 40) + (len(self.reserved) << 32)
        self.reserved[address.contents.value] = size

    def _cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> None:
        handle.contents.value = random.getrandbits(60)
        self.handles[handle.contents.value] = size

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        if self.reserved.get(address) != size or address in self.mapped or self.handles.get(handle) != size:
            return 1
        self.mapped[address] = size
        return 0

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:
        one = access.contents
        assert (one.location.type, one.location.id, one.flags, count, ctypes.sizeof(one)) == (1, 1, 3, 1, 12)
        self.readable.add(address)
        return 0

    def _cuMemUnmap(self, address: int, size: int) -> int:
        return 0 if self.mapped.pop(address, None) == size else 1

    def _cuMemRelease(self, handle: int) -> int:
        return 0 if self.handles.pop(handle, None) else 1


def test_the_driver_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    memory = CudaMemory(torch.device("cuda", 1))
    memory.open()
    size = 3 * memory.granularity
    first, second = memory.reserve(size), memory.reserve(size)
    for _ in range(3):
        memory.map(first, size)
        memory.map(second, size)
        assert memory.mapped_bytes == 2 * size and driver.readable >= driver.mapped.keys() == {first, second}
        memory.unmap(first, size)
        memory.unmap(second, size)
        assert not memory.mapped_bytes and not driver.mapped and not driver.handles
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        for code, error in ((2, torch.OutOfMemoryError), (1, InternalError)):
            driver.fails = {name: code}
            with pytest.raises(error, match=f"{name}.*cuda:1"):
                memory.map(first, size)
            assert not memory.mapped_bytes and not driver.mapped and not driver.handles
    driver.fails = {}
    memory.map(first, size)
    driver.has_virtual_memory = 0
    with pytest.raises(InternalError, match="no virtual memory"):
        CudaMemory(torch.device("cuda", 1)).open()


def test_the_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Nothing(GpuMemory):
        def open(self) -> None:
            raise InternalError("cuda:0 has no virtual memory")

    without = LikeGpu()
    without.virtual_memory = Nothing()
    plain, asks = (EngineConfig(model="m", enable_sleep_mode=one) for one in (False, True))
    assert not choose_sleeper(plain, LikeGpu()).can_sleep
    assert choose_sleeper(asks, LikeGpu()).can_sleep and choose_sleeper(plain, CpuPlatform()).can_sleep
    assert not caplog.messages and type(choose_sleeper(asks, without)) is Sleeper
    assert "will end the worker" in caplog.text


def test_a_runner_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as on a GPU whose memory goes: its rows live on, its KV is computed again, the tokens are the same."""
    gpu = LikeGpu()
    sleepers: list[ArenaSleeper] = []

    def choose(config: EngineConfig, platform: object) -> ArenaSleeper:
        sleepers.append(sleeper_of(gpu)[0])
        return sleepers[-1]

    monkeypatch.setattr(load, "choose_sleeper", choose)
    runner, _ = start(max_num_seqs=4, kv_cache_memory_bytes=10**6)
    expected = generate(runner, [5, 6, 7, 8, 9], range(8))
    for _ in range(2):
        assert sleepers[0].sleep(BOTH) == "" and not gpu.virtual_memory.mapped and runner.prepares_after is None
        assert sleepers[0].wake_up(BOTH) == ""
        assert generate(runner, [5, 6, 7, 8, 9], range(8)) == expected
