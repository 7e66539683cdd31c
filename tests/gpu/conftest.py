"""Shared by the tests that need a GPU: one event loop, models written once, and no memory left to the next test."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
sys.path.append(str(Path(__file__).parents[1] / "runner"))

from gpu_models import GPU_VARIANTS, SHARED_GPU, Checkpoint

from aengine.engine.replicas import start


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def reference_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own functions: with fla-core there it would call that, whose kernels run on a GPU alone."""
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for function, value in list(vars(module).items()):
            if "gated_delta_rule" in function or "causal_conv1d" in function:
                monkeypatch.setattr(module, function, getattr(value, "__wrapped__", value))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """``checkpoint(arch, dtype="float32", size="tiny")``, written once a session."""
    made: dict[tuple[str, ...], Checkpoint] = {}

    def make(arch: str, dtype: str = "float32", size: str = "tiny") -> Checkpoint:
        key = (arch, dtype, size)
        if key not in made:
            made[key] = Checkpoint(tmp_path_factory.mktemp("-".join(key)), arch, dtype, size)
        return made[key]

    return make


@pytest.fixture(params=list(GPU_VARIANTS))
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def mps_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of a daemon of NVIDIA's Multi-Process Service, by which kernels of several processes run on a GPU at
    the same time. Without it they take turns, and a kernel that waits for another process's keeps that one waiting."""
    daemon = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ['PATH']}:/usr/local/nvidia/bin")
    if daemon is None:
        pytest.skip("there is one GPU, and no nvidia-cuda-mps-control with which processes share it")
    folder = str(tmp_path_factory.mktemp("mps"))
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run([daemon, "-d"], env=environment, check=True)
    yield folder
    subprocess.run([daemon], env=environment, input="quit -t 5\n", text=True, timeout=30)


@pytest.fixture
def shared_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes may share a GPU, and what they do is the default worker's."""
    if SHARED_GPU:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", request.getfixturevalue("mps_folder"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of those that the daemon sees, which has this one's choice
        # Kernels that wait for the other process's would otherwise fill all multiprocessors, and keep that one's out.
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # for the workers, which inherit it
        known = start.shares_experts
        monkeypatch.setattr(start, "shares_experts", lambda config, hf: known(config.replace(worker="default"), hf))


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """What `load_model` sets for a process of its own is set back."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
