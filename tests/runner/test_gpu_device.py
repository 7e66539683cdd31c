"""Every GPU that can't be used, and what is said of it. CUDA itself is replaced, so that it runs anywhere."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.runner.platforms import cuda as gpu_module
from aengine.runner.platforms import probe
from aengine.runner.platforms.choice import choose_platform
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.platforms.cuda import CudaPlatform
from aengine.runner.platforms.platform import DeviceMemory

Patch = pytest.MonkeyPatch


def refuse(device: str = "cuda") -> str:
    """The error, which is one line that names the CPU as a way out."""
    with pytest.raises(ModelLoadError) as caught:
        choose_platform(device)
    text = str(caught.value)
    assert "\n" not in text and "device='cpu'" in text
    return text


@pytest.fixture
def driver(monkeypatch: Patch, tmp_path: Path) -> Path:
    """What the kernel's module says of itself."""
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 13\n"
    )
    monkeypatch.setattr(gpu_module, "_DRIVER_VERSION", path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return path


@pytest.fixture
def no_cuda(monkeypatch: Patch, driver: Path) -> Callable[[str], None]:
    """torch has CUDA and finds no GPU, with the warning that the test names."""

    def be(warning: str = "") -> None:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=1)
            return False

        monkeypatch.setattr(torch.cuda, "is_available", is_available)

    return be


class FakeCuda:
    """Two GPUs alike; the test may change what they are."""

    def __init__(self) -> None:
        self.name, self.capability = "NVIDIA H200", (9, 0)
        self.failure: Exception | None = None

    def empty(self, size: int, *, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        if self.failure is not None:
            raise self.failure
        return torch.zeros(size)

    def properties(self, device: torch.device) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(name=self.name, major=major, minor=minor)


@pytest.fixture
def cuda(monkeypatch: Patch, driver: Path) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fake.properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: fake.name)
    monkeypatch.setattr(gpu_module, "torch", SimpleNamespace(**{**vars(torch), "empty": fake.empty}))
    return fake


class FakeTriton:
    __version__ = "3.6.0"

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.knobs = SimpleNamespace(build=SimpleNamespace(impl=None, cc=None))
        active = SimpleNamespace(get_current_target=self._target)
        self.runtime = SimpleNamespace(driver=SimpleNamespace(active=active))

    def _target(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "cuda:90"


@pytest.fixture
def triton(monkeypatch: Patch) -> FakeTriton:
    fake = FakeTriton()
    monkeypatch.setitem(sys.modules, "triton", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    return fake


# -- none


def test_the_cpu_asks_nothing_of_cuda(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
    assert isinstance(choose_platform("cpu"), CpuPlatform)


def test_torch_without_cuda(no_cuda: Callable[..., None], monkeypatch: Patch) -> None:
    no_cuda()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA" in refuse()


def test_no_driver(no_cuda: Callable[..., None], driver: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_cuda("CUDA initialization: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")
    driver.unlink()
    assert "no NVIDIA driver" in refuse()
    assert isinstance(choose_platform("auto"), CpuPlatform)
    assert not caplog.records, "a machine without a GPU is nothing to warn of"


@pytest.mark.parametrize("known", [True, False])
def test_a_driver_too_old(no_cuda: Callable[..., None], driver: Path, known: bool, caplog: Any) -> None:
    no_cuda("CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update")
    if not known:
        driver.unlink()
    text = refuse("cuda:0")
    assert "too old" in text and "CUDA 13.0" in text and torch.__version__ in text and "update the driver" in text
    assert ("580.159.03" in text) is known
    with caplog.at_level(logging.WARNING, logger="aengine"):
        assert isinstance(choose_platform("auto"), CpuPlatform)
    assert ("running on the CPU: the NVIDIA driver 580.159.03 is too old" in caplog.text) is known


def test_another_failure_is_quoted(no_cuda: Callable[..., None]) -> None:
    no_cuda("CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment.\nmore")
    text = refuse()
    assert "CUDA unknown error" in text and "580.159.03" in text and "nvidia-smi" in text


def test_hidden(no_cuda: Callable[..., None]) -> None:
    no_cuda()
    assert "CUDA_VISIBLE_DEVICES" in refuse()


def test_an_odd_driver_file(no_cuda: Callable[..., None], driver: Path) -> None:
    no_cuda("too old")
    driver.write_text("")
    assert "of unknown version" in refuse()


# -- found


def test_a_good_one(cuda: FakeCuda, triton: FakeTriton) -> None:
    for setting, index in (("auto", 0), ("cuda", 0), ("cuda:1", 1)):
        gpu = choose_platform(setting)
        assert gpu == CudaPlatform(torch.device("cuda", index), "NVIDIA H200", (9, 0))
        assert isinstance(gpu, CudaPlatform) and gpu.supports_bf16


def test_an_index_out_of_range(cuda: FakeCuda, triton: FakeTriton, monkeypatch: Patch) -> None:
    text = refuse("cuda:2")
    assert "'cuda:2'" in text and "2 GPUs, 'cuda:0' to 'cuda:1'" in text
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "'cuda:0' is the only GPU" in refuse("cuda:1")


@pytest.mark.parametrize("capability", [(3, 5), (7, 0), (7, 2)])
def test_too_old(cuda: FakeCuda, triton: FakeTriton, capability: tuple[int, int], caplog: Any) -> None:
    cuda.name, cuda.capability = "Tesla V100", capability
    text = refuse()
    assert f"Tesla V100 (compute capability {capability[0]}.{capability[1]}) is too old" in text and "7.5" in text
    with caplog.at_level(logging.WARNING, logger="aengine"):
        assert isinstance(choose_platform("auto"), CpuPlatform)
    assert "running on the CPU: Tesla V100" in caplog.text


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
def test_what_generations_have(cuda: FakeCuda, triton: FakeTriton, capability: tuple[int, int]) -> None:
    cuda.capability = capability
    gpu = choose_platform("cuda")
    assert isinstance(gpu, CudaPlatform)
    assert gpu.supports_bf16 is (capability >= (8, 0))


def test_a_gpu_that_fails(cuda: FakeCuda, triton: FakeTriton) -> None:
    cuda.failure = RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with DSA")
    text = refuse()
    assert "busy or unavailable" in text and "DSA" not in text
    cuda.failure = torch.OutOfMemoryError("no")
    assert "no free memory" in refuse()


# -- dtypes


def device(capability: tuple[int, int]) -> CudaPlatform:
    return CudaPlatform(torch.device("cuda", 0), "G", capability)


@pytest.mark.parametrize("own", ["", "float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_auto_dtype(own: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = "float16" if own == "float16" else "bfloat16"
    with caplog.at_level(logging.WARNING, logger="aengine"):
        assert device((8, 0)).choose_dtype("auto", own) == wanted
        assert not caplog.records
        assert device((7, 5)).choose_dtype("auto", own) == "float16"
    assert ("has no bfloat16" in caplog.text) is (wanted == "bfloat16")


def test_explicit_dtype() -> None:
    for dtype in ("float32", "float16"):
        assert device((7, 5)).choose_dtype(dtype, "bfloat16") == dtype
    assert device((8, 0)).choose_dtype("bfloat16", "float16") == "bfloat16"
    with pytest.raises(ModelLoadError, match=r"compute capability 7\.5.*no bfloat16.*dtype='auto'"):
        device((7, 5)).choose_dtype("bfloat16", "bfloat16")


# -- Triton


@pytest.mark.parametrize("setting", ["cuda", "auto"])
def test_no_triton(cuda: FakeCuda, triton: FakeTriton, setting: str, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    text = refuse(setting)
    assert "can't be imported" in text and "pip install triton" in text


def test_no_compiler(cuda: FakeCuda, triton: FakeTriton, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    text = refuse()
    assert "neither gcc nor clang" in text and "apt install gcc" in text
    triton.knobs.build.cc = "/opt/cc"
    assert "CC='/opt/cc'" in refuse()
    triton.knobs.build.impl = lambda *args: "made otherwise"
    assert isinstance(choose_platform("cuda"), CudaPlatform)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_either_compiler_does(cuda: FakeCuda, triton: FakeTriton, name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda wanted: f"/bin/{name}" if wanted == name else None)
    assert isinstance(choose_platform("cuda"), CudaPlatform)


def test_triton_that_fails(cuda: FakeCuda, triton: FakeTriton) -> None:
    triton.failure = RuntimeError("Command '['/usr/bin/gcc', 'main.c']' returned non-zero exit status 1.\ntrace")
    text = refuse()
    assert "exit status 1" in text and "python3-dev" in text and "trace" not in text


@pytest.mark.gpu
def test_the_gpu_of_this_machine() -> None:
    gpu = choose_platform("cuda")
    assert gpu.device == torch.device("cuda", 0)
    assert "GPUs" in refuse("cuda:99") or "only GPU" in refuse("cuda:99")


def test_what_is_reported_of_several(monkeypatch: Patch) -> None:
    """cuda:2 can't be read by the others, though it can read them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H{index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: other != 2)
    gpu = CudaPlatform(torch.device("cuda", 0), "NVIDIA H0", (9, 0))
    monkeypatch.setattr(gpu, "memory", lambda: DeviceMemory(total=100, free=40, allocated=0, reserved=0))
    monkeypatch.setattr(gpu, "check", lambda: None)
    report: dict[str, Any] = {"triton_problem": ""}
    choices = probe._gpu_choices(EngineConfig(model="-"), gpu, report)
    assert report == {
        "gpu": {"name": "NVIDIA H0", "capability": "9.0", "free_memory": 40, "total_memory": 100},
        "gpu_names": ["NVIDIA H0", "NVIDIA H1", "NVIDIA H2"],
        "gpus_apart": [[0, 2], [1, 2]],
        "triton_problem": "",
    }
    assert choices["kv_cache_bytes"] == 30 and choices["dtype"] == "bfloat16"
