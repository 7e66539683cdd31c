"""Pages in files: found again by the next process, never wrong, never more than their size, nobody else's."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest

from aengine import DiskTier, ModelLoadError
from aengine.engine.stores.choice import open_store
from aengine.engine.stores.disk import DiskStore
from aengine.engine.stores.store import KVStore

PAGE = 10_000
FILE = 12288  # bytes that a page's file takes
Open = Callable[..., KVStore]


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def page_of(number: int, size: int = PAGE) -> bytes:
    return random.Random(number).randbytes(size)


def save(store: KVStore, *numbers: int) -> None:
    store.save([key_of(n) for n in numbers], [memoryview(page_of(n)) for n in numbers])


def found(store: KVStore, *numbers: int) -> list[bool]:
    """Which pages are loaded, each of them as it was saved."""
    pages = [bytearray(PAGE) for _ in numbers]
    filled = store.load([key_of(n) for n in numbers], [memoryview(page) for page in pages])
    assert all(page == page_of(n) for n, page, is_filled in zip(numbers, pages, filled, strict=True) if is_filled)
    return filled


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def open_disk(folder: Path) -> Iterator[Open]:
    stores: list[KVStore] = []

    def opened(num_bytes: int = 1 << 30) -> KVStore:
        stores.append(open_store(DiskTier(folder, num_bytes)))
        return stores[-1]

    yield opened
    for store in stores:
        with suppress(OSError):
            store.close()


def test_pages_are_found_by_the_next_process(open_disk: Open, folder: Path) -> None:
    first = open_disk()
    assert first.query([key_of(0)]) == 0 and found(first, 0) == [False]
    save(first, 0, 1, 2, 4)
    save(first, 1, 5)
    first.close()
    second = open_disk()
    assert second.query([key_of(n) for n in range(6)]) == 3 and second.query([]) == 0
    assert found(second, *range(6)) == [True, True, True, False, True, True]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in [*files_of(folder), folder / "kv-pages"]} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_dir()} == {0o700}


def test_a_page_of_another_size_is_not_found(open_disk: Open) -> None:
    store = open_disk()
    save(store, 0)
    for size in (PAGE - 1, PAGE + 1):
        save(store, 0)
        assert store.load([key_of(0)], [memoryview(bytearray(size))]) == [False]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
    "truncated": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "empty": lambda whole: b"",
    "zeros": lambda whole: bytes(len(whole)),
    "header alone": lambda whole: whole[:64],
    "another version": lambda whole: whole[:8] + b"\2\0\0\0" + whole[12:],
    "another magic": lambda whole: b"AENGINKV" + whole[8:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_page_is_removed(
    open_disk: Open, folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = open_disk()
    save(store, 0, 1)
    path = folder / key_of(0).hex()[:2] / key_of(0).hex()
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert found(store, 0, 1) == [False, True]
    assert store.query([key_of(0)]) == 0 and "computed again" in caplog.text
    save(store, 0)
    assert found(store, 0) == [True]


def test_a_page_by_anothers_name_is_removed(open_disk: Open, folder: Path) -> None:
    store = open_disk()
    save(store, 0, 1)
    paths = [folder / key_of(n).hex()[:2] / key_of(n).hex() for n in (0, 1)]
    paths[0].rename(paths[1])
    assert found(store, 0, 1) == [False, False] and files_of(folder) == []


def test_what_is_no_file_is_no_page(open_disk: Open, folder: Path) -> None:
    store = open_disk()
    path = folder / key_of(0).hex()[:2] / key_of(0).hex()
    path.symlink_to("/etc/passwd")
    assert found(store, 0) == [False]
    path.unlink(missing_ok=True)
    path.mkdir()
    assert found(store, 0) == [False]
    path.rmdir()
    os.mkfifo(path)
    assert found(store, 0) == [False]


def test_what_is_no_page_stays_when_room_is_made(open_disk: Open, folder: Path) -> None:
    store = open_disk(3 * FILE)
    save(store, 0)
    others = [folder / "00" / name for name in ("notes", "mine.new")]
    for path in others:
        path.write_text("mine")
    (folder / "00" / "a folder").mkdir()
    for number in range(1, 9):
        save(store, number)
    assert all(path.read_text() == "mine" for path in others)
    assert found(store, 8) == [True] and len(files_of(folder)) <= 3 + len(others) + 1
    assert isinstance(store, DiskStore) and store.num_bytes == FILE * (len(files_of(folder)) - len(others))


def test_files_are_counted_though_a_process_saves_what_is_there(open_disk: Open) -> None:
    save(open_disk(), 0)
    store = open_disk()
    save(store, 0)
    assert isinstance(store, DiskStore) and store.num_bytes == FILE


def age(folder: Path, number: int, seconds: float) -> None:
    path = folder / key_of(number).hex()[:2] / key_of(number).hex()
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_longest_unused_go(open_disk: Open, folder: Path) -> None:
    store = open_disk(10 * FILE)
    save(store, *range(10))
    for number in range(10):
        age(folder, number, 100 - number)
    assert found(store, 0, 2) == [True, True], "a use"
    save(store, 10)
    assert found(store, *range(11)) == [True, False, *[True] * 9]
    for number in range(2, 11):
        age(folder, number, 50 - number)
    save(store, 11, 12, 13)
    assert found(store, *range(14)) == [True, *[False] * 4, *[True] * 9]


def test_pages_that_are_more_than_the_store_holds(open_disk: Open, folder: Path) -> None:
    store = open_disk(3 * FILE)
    save(store, *range(5))
    assert len(files_of(folder)) <= 3 and any(found(store, *range(5)))
    tiny = open_disk(FILE - 1)
    save(tiny, 7)
    assert found(tiny, 7) == [False]


def test_the_size_holds_over_starts(open_disk: Open, folder: Path) -> None:
    """The next process may give another size, and the count may be wrong or gone."""
    save(open_disk(), *range(20))
    for count in (b"", b"abc", bytes(8), b"\xff" * 8):
        (folder / "kv-pages").write_bytes(count)
        save(open_disk(5 * FILE), 100 + len(count))
        assert 1 <= len(files_of(folder)) <= 5


def test_what_a_killed_process_was_writing_goes(open_disk: Open, folder: Path) -> None:
    save(open_disk(), 0)
    left = folder / key_of(1).hex()[:2] / f"{key_of(1).hex()}.new"
    left.write_bytes(b"x" * 5000)
    store = open_disk(4 * FILE)
    assert found(store, 1) == [False]
    save(store, 2)
    assert not left.exists() and found(store, 0, 1, 2) == [True, False, True]


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from test_disk_store import *
store = DiskStore({folder!r}, 40 * FILE)
print("ready", flush=True)
for number in itertools.count({first}):
    save(store, number % 100, (number + 50) % 100)
"""


def process(folder: Path, first: int) -> subprocess.Popen[str]:
    code = "import itertools\n" + KILLED.format(tests=str(Path(__file__).parent), folder=str(folder), first=first)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_share_a_folder_are_killed_as_they_write(folder: Path, open_disk: Open) -> None:
    rng = random.Random(1)
    for round_ in range(2):
        processes = [process(folder, 1000 * round_ + 30 * number) for number in range(2)]
        try:
            for one in processes:
                assert one.stdout is not None and one.stdout.readline() == "ready\n"
            for _ in range(10):
                time.sleep(rng.uniform(0, 0.05))
                for one in processes:
                    one.send_signal(signal.SIGSTOP)
                    os.waitid(os.P_PID, one.pid, os.WSTOPPED)
                assert sum(-(-path.stat().st_size // 4096) * 4096 for path in files_of(folder)) <= 40 * FILE
                for one in processes:
                    one.send_signal(signal.SIGCONT)
        finally:
            for one in processes:
                one.send_signal(signal.SIGKILL)
                one.communicate()
    store = open_disk(40 * FILE)
    assert any(found(store, *range(100)))
    for number in range(100):
        save(store, number)
    assert found(store, *range(90, 100)) == [True] * 10


# -- disks and folders that can't be used


def test_a_full_disk(open_disk: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk(10 * FILE)
    save(store, 0)
    whole = os.writev

    def part(file: int, parts: list[memoryview]) -> int:
        if os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(file, [parts[0], parts[1][:1000]])

    monkeypatch.setattr(os, "writev", part)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            save(store, 1, 2, 3)
    monkeypatch.undo()
    assert len(files_of(folder)) == 1 and found(store, 0, 1) == [True, False]
    save(store, *range(1, 10))
    assert all(found(store, *range(10))), "what was not written is not counted"


def test_a_write_in_parts_is_whole(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: whole(file, [parts[0][:777]]))
    store = open_disk()
    save(store, 0)
    assert found(store, 0) == [True]


def test_a_disk_that_has_become_read_only(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_disk()
    save(store, 0)

    def refused(*args: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("utime", "unlink", "rename", "pwrite"):
        monkeypatch.setattr(os, name, refused)
    assert found(store, 0) == [True]
    with pytest.raises(OSError, match="Read-only"):
        save(store, 1)


@pytest.fixture
def without_root() -> Iterator[None]:
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_of_ours_alone(tmp_path: Path) -> None:
    for mode, is_taken in ((0o755, True), (0o700, True), (0o770, False), (0o707, False), (0o1777, False)):
        path = tmp_path / f"{mode:o}"
        path.mkdir()
        path.chmod(mode)
        if is_taken:
            DiskStore(str(path), 1).close()
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        else:
            with pytest.raises(ModelLoadError, match=r"DiskTier\(.*written by other users.*\(mode 0700\)"):
                DiskStore(str(path), 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_anothers_folder(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(ModelLoadError, match="belongs to the user 65534: name a folder of this user's own"):
        DiskStore(str(tmp_path), 1)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "file", "dangling", "file/below"):
        with pytest.raises(ModelLoadError, match="name a folder"):
            DiskStore(str(tmp_path / name), 1)
    assert not (tmp_path / "nowhere").exists()


def test_anothers_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ModelLoadError, match="has other files, and no pages of KV: name an empty folder"):
        DiskStore(str(tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_can_not_be_written_to(tmp_path: Path, without_root: None) -> None:
    with pytest.raises(ModelLoadError, match="a folder that this user may write to"):
        DiskStore("/proc/kv", 1)


def test_no_handle_is_left_open(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "new"):
        with suppress(ModelLoadError):
            DiskStore(str(path), 1).close()
    store = DiskStore(str(tmp_path / "new"), 1 << 20)
    save(store, 0)
    found(store, 0, 1)
    store.close()
    assert num_open() == before
