"""Processes that start together compile each kernel once, and nothing that another does makes one wait for ever."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from aengine.kernels.triton import compile_once
from aengine.kernels.triton.compile_once import CompileOnce

ANOTHER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from aengine.kernels.triton.compile_once import CompileOnce

def compile_slowly():
    print("compiling", flush=True)
    sys.stdin.readline()

with ThreadPoolExecutor(4) as pool, CompileOnce(pool, 1) as mode:
    mode.submit("first", compile_slowly, lambda kernel: None)
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def another(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is compiling the kernel "first", until it is sent a line."""
    command = [sys.executable, "-c", ANOTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "compiling\n"
        yield process
        process.kill()


def compiled(order: list[str], then: dict[str, Callable[[], Any]] | None = None, num_threads: int = 1) -> list[str]:
    """The order in which the kernels ``order`` end here; ``then``: what is done once a kernel is compiled."""
    ended: list[str] = []

    def compile_kernel(name: str) -> str:
        (then or {}).get(name, lambda: None)()
        ended.append(name)
        return name

    kernels = []
    with ThreadPoolExecutor(8) as pool, CompileOnce(pool, num_threads) as mode:
        for name in order:
            mode.submit(name, lambda name=name: compile_kernel(name), kernels.append)
    assert sorted(kernels) == sorted(order)
    return ended


def test_what_another_compiles_is_left_to_it(another: subprocess.Popen[str]) -> None:
    assert another.stdin is not None
    end = another.stdin.close  # the other then has its kernel
    assert compiled(["first", "second"], {"second": end}) == ["second", "first"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_another_leaves_by_its_death(another: subprocess.Popen[str], number: int) -> None:
    assert compiled(["first", "second"], {"second": lambda: another.send_signal(number)}) == ["second", "first"]


def test_a_stopped_process_holds_nobody_up_for_ever(
    another: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_once, "LONGEST_WAIT", 0.1)
    another.send_signal(signal.SIGSTOP)
    assert compiled(["first", "second"]) == ["second", "first"]


def test_a_kernel_that_fails_is_free_again(cache: Path) -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such instruction"), ThreadPoolExecutor(4) as pool:
            CompileOnce(pool, 1).submit("a", fail, lambda kernel: None).result()
    assert compiled(["a"]) == ["a"]


def test_no_place_for_locks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("not a folder")
    assert sorted(compiled(["a", "b"])) == ["a", "b"]
    cache.unlink()

    def no_locks(file: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert sorted(compiled(["a", "b"])) == ["a", "b"]


def test_no_more_at_a_time_than_threads(cache: Path) -> None:
    running: list[int] = []

    def look() -> None:
        running.append(1)
        os.sched_yield()
        assert len(running) <= 2
        running.pop()

    names = [str(i) for i in range(32)]
    assert sorted(compiled(names, dict.fromkeys(names, look), num_threads=2)) == sorted(names)
