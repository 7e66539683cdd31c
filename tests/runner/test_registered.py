"""Workers and platforms of another package, found by entry points: a distribution that is a folder on sys.path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from aengine.config import EngineConfig
from aengine.engine.executor import ProcessExecutor
from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.limits.registry import PLATFORMS, WORKERS, registered
from aengine.runner.platforms.choice import choose_platform
from aengine.runner.platforms.cpu import CpuPlatform

METADATA = "Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n"
ENTRY_POINTS = """[aengine.platforms]
toy = toy_engine:ToyPlatform
broken = no_such_toy:ToyPlatform

[aengine.workers]
toy = toy_engine:load
"""
MODULE = """
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.platforms.platform import Unavailable
from aengine.runner.startup.load import load_model

class ToyPlatform(CpuPlatform):
    name = "Toy"
    is_there = True

    @classmethod
    def find(cls, setting):
        return cls() if cls.is_there else Unavailable("the toy is in its box: take it out")

def load(config, source, rank, progress):
    model = load_model(config, source, rank, progress)
    model.offer["worker"] = "toy"
    return model
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = tmp_path / "toy_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "toy_engine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "toy_engine", raising=False)
    return tmp_path


def test_names_that_nobody_registers() -> None:
    for wrong in ("toy", "tpu:1", "cuda:", "cuda:x", "cpu:1", "", ":1", 3, None):
        with pytest.raises(InvalidRequestError, match="'auto', 'cpu', 'cuda', 'cuda:N' or") as caught:
            EngineConfig.create("m", {"device": wrong})
        assert caught.value.param == "device"
    for wrong in ("toy", "", ":", "a b:c", "module:", 3, None):
        with pytest.raises(InvalidRequestError, match="'module:function', or one of 'default'") as caught:
            EngineConfig.create("m", {"worker": wrong})
        assert caught.value.param == "worker"


def test_names_of_another_package(toy: Path) -> None:
    assert list(registered(PLATFORMS)) == ["cuda", "cpu", "broken", "toy"]
    assert list(registered(WORKERS)) == ["default", "toy"]
    for device in ("toy", "toy:3"):
        assert EngineConfig.create("m", {"device": device, "worker": "toy"}).device == device
    with pytest.raises(InvalidRequestError, match="'cuda:N,M', 'broken', 'toy'$"):
        EngineConfig.create("m", {"device": "toi"})
    with pytest.raises(InvalidRequestError, match="one of 'default', 'toy'$"):
        EngineConfig.create("m", {"worker": "toi"})


def test_a_platform_of_another_package(
    toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from aengine.runner.platforms.cuda import CudaPlatform
    from aengine.runner.platforms.platform import Unavailable

    assert choose_platform("toy").name == choose_platform("toy:1").name == "Toy"
    with pytest.raises(ModelLoadError, match="device='broken': .*no_such_toy:ToyPlatform can't be imported"):
        choose_platform("broken")
    monkeypatch.setattr(CudaPlatform, "find", lambda setting: Unavailable("none", is_expected=True))
    assert choose_platform("auto").name == "Toy"
    assert "device='auto' passes over broken" in caplog.text
    toy_platform = importlib.import_module("toy_engine").ToyPlatform
    monkeypatch.setattr(toy_platform, "is_there", False)
    assert isinstance(choose_platform("auto"), CpuPlatform) and choose_platform("auto").name == "cpu"
    with pytest.raises(ModelLoadError, match=r"device='toy': the toy is in its box: take it out, or use device='cpu'"):
        choose_platform("toy")


async def test_an_engine_on_a_worker_and_a_platform_of_another_package(toy: Path) -> None:
    """In a real process, which finds the package as the host does."""
    from test_startup import TINY

    from aengine.checkpoint.source import ModelSource

    config = EngineConfig.create("m", {"device": "toy", "worker": "toy", "load_format": "dummy", "num_threads": 1})
    executor = ProcessExecutor(config)
    source = ModelSource("tiny", "/nowhere", "dummy", TINY).to_wire()
    ready = await executor.start({"config": config.to_wire(), "source": source}, lambda progress: None, lambda: None)
    assert ready["worker"] == "toy" and ready["device"] == "cpu" and ready["num_blocks"] > 0
    await executor.aclose(5)


@pytest.mark.parametrize(
    ("worker", "cause"),
    [
        ("no_such_package.worker:load", "can't be imported here"),
        ("os:getcwd", r"does not load a model .*\(config, source, rank, progress\)"),
        ("os:path", "does not load a model .*not a callable"),
        ("builtins:print", "does not load a model .*returned NoneType"),
    ],
)
async def test_a_worker_that_is_none(worker: str, cause: str) -> None:
    executor = ProcessExecutor(EngineConfig.create("m", {"worker": worker}))
    load = {"config": EngineConfig.create("m", {}).to_wire(), "source": {}}
    with pytest.raises(ModelLoadError, match=f"worker='{worker}' {cause}"):
        await executor.start(load, lambda progress: None, lambda: None)
    await executor.aclose(5)
