"""The start of one rank, without a process of its own."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.config import EngineConfig
from aengine.workers.loading import Loading


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_loading_has_freed_goes_back_to_the_system() -> None:
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    class Model:
        def allocate(self, plan: object, bitmask: object) -> tuple[object, dict[str, object]]:
            blocks = [libc.malloc(60_000) for _ in range(1000)]
            for block in blocks:
                ctypes.memset(block, 1, 60_000)
            self.most = resident_bytes()
            for block in blocks[:-1]:  # the last one holds the end of the heap where it is
                libc.free(block)
            return object(), {}

    channel: Any = SimpleNamespace(bitmask=lambda: memoryview(b""), publish=lambda *frame: None)
    loading, model = Loading(channel, 0, "m:f", channel), Model()
    loading.model, loading.config = model, EngineConfig.create("m", {})  # type: ignore[assignment]
    loading.allocate({})
    assert resident_bytes() < model.most - 50_000_000
