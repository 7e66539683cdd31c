"""Compiled kernels are loaded before the first step launches them."""

from __future__ import annotations

import threading

import pytest
import torch


def test_kernels_are_loaded_by_the_threads_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from aengine.kernels.triton import launch

    devices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)

    class Kernel:
        loaded_by = ""

        def __getitem__(self, grid: tuple[int, ...]) -> None:
            self.loaded_by = threading.current_thread().name
            raise RuntimeError("it is too large for this GPU")

    with launch._Compilers(1) as pool:
        kernel = pool.submit(Kernel).result()
    assert kernel.loaded_by.startswith("compile")
    assert devices == [2]
