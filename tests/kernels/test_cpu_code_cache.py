"""Compiled kernels are kept in a folder that nobody else can write to; without it they are compiled anew."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from aengine.config import model_cache
from aengine.kernels.cpu import library
from aengine.kernels.cpu.compiler import code_cache, target
from aengine.kernels.cpu.compiler.code_cache import MOST_FILES, CodeCache, code_key, digest_of_sources
from aengine.runner.platforms import cpu

KEY, CODE = "a" * 64, bytes(range(256)) * 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "kernels"


@pytest.fixture
def cache(folder: Path) -> CodeCache:
    cache = CodeCache(folder)
    cache.write(KEY, CODE)
    return cache


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine.runner")


def test_what_was_written_is_read(folder: Path, cache: CodeCache, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.read(KEY) == CODE == CodeCache(folder).read(KEY)
    assert cache.read("b" * 64) is None and CodeCache(folder / "none").read(KEY) is None
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / KEY).stat().st_mode & 0o777 == 0o600
    assert not caplog.messages and os.listdir(folder) == [KEY]


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "of another key"])
def test_a_damaged_file_is_written_anew(
    damage: str, folder: Path, cache: CodeCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / KEY
    content = path.read_bytes()
    if damage == "of another key":
        cache.write("b" * 64, CODE)
        (folder / ("b" * 64)).replace(path)
    else:
        other = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes({"truncated": content[:-1], "changed": other, "empty": b""}[damage])
    assert cache.read(KEY) is None and cache.read(KEY) is None
    assert len(caplog.messages) == 1 and "is damaged" in caplog.messages[0]
    cache.write(KEY, CODE)
    assert cache.read(KEY) == CODE


@pytest.mark.parametrize("writable", ["folder", "file"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_run(
    writable: str, mode: int, folder: Path, cache: CodeCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder if writable == "folder" else folder / KEY
    path.chmod(path.stat().st_mode | mode)
    assert cache.read(KEY) is None
    assert "others may write to it" in caplog.messages[0]
    cache.write(KEY, CODE)
    assert (cache.read(KEY) is None) == (writable == "folder")  # a file of our own takes the other's place


def test_what_belongs_to_others_is_not_run(
    cache: CodeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.read(KEY) is None
    assert f"it belongs to the user {os.getuid()}, not to {os.getuid() + 1}: mend that, or set" in caplog.messages[0]


@pytest.mark.parametrize("link", ["folder", "file"])
def test_links_are_not_followed(link: str, folder: Path, cache: CodeCache, caplog: pytest.LogCaptureFixture) -> None:
    path = folder if link == "folder" else folder / KEY
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert cache.read(KEY) is None
    assert ("it is a link, or no folder" if link == "folder" else "links are not followed") in caplog.messages[0]


@pytest.mark.parametrize("kind", ["pipe", "folder", "of absurd size"])
def test_what_is_no_code_is_not_waited_for(
    kind: str, folder: Path, cache: CodeCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a pipe waits for its other end; reading 30 GB takes all memory."""
    (path := folder / KEY).unlink()
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path.touch(0o600)
        os.truncate(path, 30 << 30)
    assert cache.read(KEY) is None
    expected = f"{KEY} is damaged" if kind == "of absurd size" else f"{KEY} is no file"
    assert len(caplog.messages) == 1 and expected in caplog.messages[0]


@pytest.fixture
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CODE) // 2, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing(folder: Path, full_disk: None, caplog: pytest.LogCaptureFixture) -> None:
    cache = CodeCache(folder)
    cache.write(KEY, CODE)
    assert cache.read(KEY) is None and os.listdir(folder) == []
    assert len(caplog.messages) == 1


def test_a_folder_that_can_not_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = CodeCache(tmp_path / "file" / "aengine" / "kernels")
    cache.write(KEY, CODE)
    assert cache.read(KEY) is None
    assert len(caplog.messages) == 1 and "are compiled anew" in caplog.messages[0]


def test_the_files_that_were_not_used_for_longest_are_removed(folder: Path, cache: CodeCache) -> None:
    for i in range(MOST_FILES - 1):
        (folder / f"{i:064}").touch()
        os.utime(folder / f"{i:064}", (1000 + i, 1000 + i))
    os.utime(folder / KEY, (1, 1))
    assert cache.read(KEY) == CODE
    cache.write("c" * 64, CODE)
    cache.write("d" * 64, CODE)
    assert len(os.listdir(folder)) == MOST_FILES
    assert cache.read(KEY) == CODE and not (folder / f"{1:064}").exists() and (folder / f"{2:064}").exists()


def test_sources_that_were_edited_meanwhile_leave_no_code(
    folder: Path, cache: CodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "edited.py").write_text("a = 1")
    before = digest_of_sources(folder.parent)
    (folder.parent / "edited.py").write_text("a = 2")
    assert digest_of_sources(folder.parent) != before
    monkeypatch.setattr(code_cache, "_FOLDER", folder.parent)
    cache.write("b" * 64, CODE)
    assert cache.read("b" * 64) is None


def test_a_later_process_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_module(module: Any, target: target.Target) -> bytes:
        compiled.append(target.cpu)
        return original(module, target)

    original = library.compile_module
    monkeypatch.setattr(library, "compile_module", compile_module)
    host = target.host()
    other = dataclasses.replace(host, cpu="x86-64-v3" if "x86_64" in host.triple else "generic")
    for own in (host, host, other):
        later = library.Library(own, 1, CodeCache(folder))
        assert later.addresses(["quantise"])["quantise"]
    assert compiled == [host.cpu] * 2 + [other.cpu] * 2
    key = code_key(["quantise"], host)
    assert len({key, code_key(["norm_quantise"], host), code_key(["quantise"], other)}) == 3
    assert key != code_key(["quantise"], dataclasses.replace(host, has_vnni=not host.has_vnni))


def reason(monkeypatch: pytest.MonkeyPatch, **features: bool) -> str | None:
    """Why kernels are not available on a processor that lacks those features."""
    found = target.host()
    text = ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items())
    monkeypatch.setattr(target, "host", lambda: dataclasses.replace(found, features=text or found.features))
    return target.unavailable.__wrapped__()


def test_kernels_are_available_where_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch) is None


@pytest.mark.parametrize(
    ("found", "cure"),
    [
        (None, "llvmlite is not installed: pip install 'aengine-llm[cpu]'"),
        ("0.44.1", "llvmlite 0.44.1 is too old: pip install 'llvmlite>=0.45'"),
        ("0.45.0", None),
    ],
)
def test_llvmlite_may_be_missing_or_old(found: str | None, cure: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if found is None:
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    else:
        monkeypatch.setattr(sys.modules["llvmlite"], "__version__", found)
    assert reason(monkeypatch) == cure


def test_a_processor_without_vectors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    text = "this processor has no AVX2, F16C: use a machine that has"
    assert reason(monkeypatch, avx2=False, fma=True, f16c=False) == text
    monkeypatch.setattr(target.platform, "machine", lambda: "riscv64")
    assert "this is Linux on riscv64" in (reason(monkeypatch) or "")


def test_a_system_where_memory_can_not_become_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.ctypes, "CDLL", lambda name: SimpleNamespace(mprotect=lambda *args: -1))
    assert "MemoryDenyWriteExecute=no" in (reason(monkeypatch) or "")


def test_a_worker_without_kernels_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: "llvmlite is not installed: pip install 'aengine-llm[cpu]'")
    platform = cpu.CpuPlatform()
    platform.open()
    assert not platform.compiled_types
    assert len(caplog.messages) == 1 and "pip install 'aengine-llm[cpu]'" in caplog.messages[0]


def test_asking_what_kernels_are_for_does_not_load_llvm() -> None:
    code = "import sys; import aengine.kernels.cpu.compiler.target; print('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_tests_keep_their_code_beside_themselves() -> None:
    """A run leaves nothing in the user's cache, and finds what the one before has compiled."""
    assert model_cache().is_relative_to(Path(__file__).parents[2] / "build")


def test_once_kernels_are_loaded_pages_of_the_compiler_are_handed_back_and_it_can_compile_again(
    folder: Path,
) -> None:
    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        found = 0
        for line in lines:
            if line.endswith("/libllvmlite.so") and " r-xp " in line:
                found += next(int(own.split()[1]) for own in lines if own.startswith("Rss:"))
        return found

    kernels = library.Library(target.host(), 1, CodeCache(folder))
    kernels.addresses(["attend.64.3.float32"])
    assert resident() < 4096  # of 30,000 KiB; another thread may have compiled meanwhile
    again = library.Library(target.host(), 1, CodeCache(folder / "other"))
    assert again.addresses(["attend.64.3.float32"])


def test_that_bfloat16_has_no_kernels_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    for dtype in ("auto", "float16", "float32", "bfloat16"):
        assert cpu.CpuPlatform().choose_dtype(dtype, "bfloat16") == dtype
    assert len(caplog.messages) == 1 and 'have no dtype="bfloat16"' in caplog.messages[0]
