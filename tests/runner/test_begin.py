"""The GPU is opened while torch is imported."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest

from aengine.runner.startup import begin, load
from aengine.workers.rank import Rank


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of what `begin` hands over to."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(load, "load_model", lambda *args: calls.append(args))
    return calls


class Driver:
    """In place of libcuda.so.1."""

    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self._error = error

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.calls.append(("init", flags))
        return self._error

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        self.calls.append(("device", index))
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        self.calls.append(("context", device.value))
        return 0


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_gpu_opens_beside_the_import(
    monkeypatch: pytest.MonkeyPatch, loaded: list[tuple[Any, ...]], device: str, index: int
) -> None:
    driver, hashed = Driver(), threading.Event()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(begin, "_hash_triton", hashed.set)
    modules = [[] for _ in range(10_000)]
    before = gc.get_freeze_count()
    begin.load_model("config", {}, Rank(index=0, device=device), print)  # type: ignore[arg-type]
    assert gc.get_freeze_count() >= before + len(modules)
    assert driver.calls == [("init", 0), ("device", index), ("context", index)]
    assert hashed.is_set()
    assert [call[0] for call in loaded] == ["config"]
    assert gc.isenabled()


@pytest.mark.parametrize("device", ["cpu", "toy:1"])
def test_no_other_device_opens_a_gpu(
    monkeypatch: pytest.MonkeyPatch, loaded: list[tuple[Any, ...]], device: str
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    begin.load_model("config", {}, Rank(index=0, device=device), print)  # type: ignore[arg-type]
    assert len(loaded) == 1


def test_a_gpu_that_fails_to_open_is_left_to_the_platform(
    monkeypatch: pytest.MonkeyPatch, loaded: list[tuple[Any, ...]]
) -> None:
    driver = Driver(error=100)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begin.load_model("config", {}, Rank(index=0, device="auto"), print)  # type: ignore[arg-type]
    assert (driver.calls, len(loaded)) == ([("init", 0)], 1)
