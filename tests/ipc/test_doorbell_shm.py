"""Doorbells, the segment and its names."""

from __future__ import annotations

import errno
import gc
import os
import platform
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ipc_helpers import own_names

from aengine.errors import EngineError
from aengine.ipc.doorbell import LoopBell, WorkerBell, is_weakly_ordered, new_fence
from aengine.ipc.layout import (
    CONTROL_BYTES,
    HEARTBEAT,
    LABEL,
    LABEL_BYTES,
    PAGE_BYTES,
    FrameError,
    bitmask_span,
    ring_span,
    round_capacity,
    segment_bytes,
)
from aengine.ipc.shm import Segment, Ticket, new_name, sweep_stale_names


def made(fence: Callable[[], None] | None = None, name: str = "") -> WorkerBell:
    bell = WorkerBell(name or new_name(), fence or new_fence())
    bell.make()
    return bell


def attached(fence: Callable[[], None] | None = None) -> tuple[WorkerBell, WorkerBell]:
    """The host's and the worker's, whose name is gone."""
    host = made()
    worker = WorkerBell.attach(host._name, fence or new_fence(), lambda: False)
    assert worker.wait(0), "rung when it was made"
    return host, worker


@pytest.fixture(params=["monotonic", "old libc"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "old libc":
        monkeypatch.setattr("aengine.ipc.doorbell._libc", lambda: None)


def test_only_x86_is_trusted_with_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for machine in ("x86_64", "AMD64", "aarch64", "arm64", "riscv64", "ppc64le", ""):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        seen[machine] = is_weakly_ordered()
    assert seen == {
        "x86_64": False,
        "AMD64": False,
        "aarch64": True,
        "arm64": True,
        "riscv64": True,
        "ppc64le": True,
        "": True,
    }


def test_a_fence_survives_an_interrupt_between_its_halves() -> None:
    fence = new_fence()
    fence()
    lock = next(c.cell_contents for c in fence.__closure__ if "release" in repr(c.cell_contents)).__self__  # type: ignore
    lock.release()  # as after a KeyboardInterrupt between release and acquire
    fence()
    fence()
    assert lock.locked()


def test_rings_do_not_pile_up() -> None:
    bell = made()
    try:
        for _ in range(1000):
            bell.ring()
        assert bell.wait(0), "rung"
        assert not bell.wait(0), "once"
    finally:
        bell.unlink()
        bell.unlink()
        bell.close()
        bell.close()
    assert own_names() == []


def test_a_waiter_fences_before_it_looks_again(both_ways: None) -> None:
    fences: list[None] = []
    host, worker = attached(lambda: fences.append(None))
    fences.clear()
    host.ring()
    assert worker.wait(0) and len(fences) == 1
    assert not worker.wait(0.001) and len(fences) == 2
    host.close()
    worker.close()


def test_a_ring_wakes_a_sleeper(both_ways: None) -> None:
    host, worker = attached()
    woken = []
    thread = threading.Thread(target=lambda: woken.append(worker.wait(60)))
    thread.start()
    time.sleep(0.02)  # so that it sleeps as a rule; a ring that comes before the wait ends that, too
    host.ring()
    thread.join(30)
    assert woken == [True]
    host.close()
    worker.close()


def test_a_wait_ends_when_its_time_is_over(both_ways: None) -> None:
    host, worker = attached()
    begun = time.monotonic()
    assert not worker.wait(0.05)
    assert time.monotonic() - begun >= 0.05
    host.close()
    host.close()
    worker.close()
    worker.close()


def test_a_wait_does_not_look_at_the_time_of_day() -> None:
    """A clock that is set back would make it longer: the kernel is told which clock counts."""
    host, worker = attached()
    if worker._monotonic is None:
        pytest.skip("a C library before glibc 2.30")
    thread = threading.Thread(target=worker.wait, args=(60,))
    thread.start()
    try:
        assert not _futex_operation(thread) & FUTEX_CLOCK_REALTIME
    finally:
        host.ring()
        thread.join()
        host.close()
        worker.close()


FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_CLOCK_REALTIME = 256


def _futex_operation(thread: threading.Thread) -> int:
    """The second argument of the futex call in which the thread waits for a semaphore."""
    number = FUTEX_NUMBERS.get(platform.machine())
    while True:
        try:
            words = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
        except PermissionError:
            pytest.skip("system calls can't be looked at here")
        if number is None or words[0] == str(number):
            if number is None:
                pytest.skip("the number of the futex call is not known")
            # A lock of Python's own waits for ever: it has no time in the fourth argument.
            if int(words[4], 16):
                return int(words[2], 16)
        time.sleep(0.001)


def test_a_bell_without_a_name_says_who_has_gone() -> None:
    with pytest.raises(FileNotFoundError, match="the host has gone"):
        WorkerBell.attach(new_name(), new_fence(), lambda: True)


def test_a_name_is_awaited_and_rung_before_it_was_there() -> None:
    name = new_name()
    host = WorkerBell(name, new_fence())
    host.ring()
    host.unlink()  # nothing yet
    looks: list[None] = []

    def host_gone() -> bool:
        looks.append(None)
        if len(looks) == 3:
            host.make()
        return len(looks) == 3  # the host ends right after it made the name: it is found, and removed

    worker = WorkerBell.attach(name, new_fence(), host_gone)
    assert own_names() == [] and len(looks) == 3
    assert worker.wait(0), "whoever rang before is heard"
    for bell in (host, worker):
        bell.close()
        bell.close()


def test_the_loop_bell_adds_up_and_clears() -> None:
    bell = LoopBell.create()
    assert not os.get_inheritable(bell.fd)
    bell.clear()  # not rung: does not block
    for _ in range(3):
        bell.ring()
    assert os.eventfd_read(bell.fd) == 3
    os.eventfd_write(bell.fd, 2**64 - 2)
    bell.ring()  # can't count further: does not block, stays readable
    bell.clear()
    bell.close()
    bell.close()


def test_a_segment_has_no_name_and_both_see_it() -> None:
    before = set(os.listdir("/dev/shm"))
    one = Segment.create(4096, 10_000)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if str(os.getpid()) in name]
    ticket = Ticket(os.dup(one.fd), 0, "/none", one.capacity, 10_000, one.nonce)
    assert stat.S_IMODE(os.fstat(one.fd).st_mode) == 0o600
    assert Ticket.parse(str(ticket)) == ticket
    two = Segment.attach(ticket)
    with one.ring(0) as mine, two.ring(0) as theirs, two.ring(1) as other:
        mine[300:305] = b"hello"
        assert bytes(theirs[300:305]) == b"hello"
        assert b"hello" not in bytes(other)
    with one.bitmask() as mine, two.bitmask() as theirs:
        mine[:] = b"\xff" * 10_000
        assert bytes(theirs) == bytes(mine)
    for index in (0, 1):
        with two.ring(index) as ring:
            assert b"\xff" * 100 not in bytes(ring), "the bitmask lies in a ring"
    for segment in (one, two):
        segment.close()
        segment.close()


def test_a_bitmask_in_use_outlives_its_segment() -> None:
    one = Segment.create(4096, 5000)
    held = one.bitmask()
    one.close()
    one.close()
    held[4999] = 7  # not a segmentation fault
    assert held[4999] == 7


def test_a_semaphore_is_private() -> None:
    name = new_name()
    bell = made(name=name)
    assert stat.S_IMODE(os.stat(f"/dev/shm/sem.{name[1:]}").st_mode) == 0o600
    with pytest.raises(Exception, match="exist"):
        made(name=name)
    bell.unlink()
    bell.close()


@pytest.mark.parametrize("text", ["", "1,2,3", "a,b,/n,4096,0,x", "1,2,/n,4096,0,x,y"])
def test_a_malformed_ticket(text: str) -> None:
    with pytest.raises(ValueError, match="not the description"):
        Ticket.parse(text)


def test_another_file_or_another_segment_is_refused(tmp_path: Path) -> None:
    one, two = Segment.create(4096), Segment.create(4096)
    ticket = Ticket(os.dup(two.fd), 0, "/none", one.capacity, 0, one.nonce)
    with pytest.raises(FrameError, match="labelled"):
        Segment.attach(ticket)
    with pytest.raises(FrameError, match="not a segment"):
        Segment.attach(replace(ticket, shm_fd=os.dup(one.fd), capacity=8192))
    with pytest.raises(FrameError, match="not a segment"):
        Segment.attach(replace(ticket, shm_fd=os.dup(one.fd), bitmask_bytes=64))
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(os.fstat(one.fd).st_size)
        with pytest.raises(FrameError, match="labelled"):
            Segment.attach(replace(ticket, shm_fd=os.dup(file.fileno())))
    one.close()
    two.close()


def test_no_room_in_shared_memory_is_an_error_with_a_cure() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError, match="--shm-size.*ring_bytes"):
        Segment.create(1 << 50)
    whole = os.statvfs("/dev/shm")
    with pytest.raises(EngineError, match="--shm-size.*ring_bytes"):  # not a SIGBUS when the rings fill up
        Segment.create(whole.f_blocks * whole.f_frsize // 2)
    assert own_names() == []
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_names_of_dead_hosts_are_swept(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead, mine = int(child.stdout), os.getpid()
    old = time.time() - 3600
    stale = [f"sem.aengine-{dead}-ab", f"aengine-{dead}-cd"]
    kept = [f"sem.aengine-{mine}-ab", f"sem.other-{dead}-ab", "sem.aengine-", "aengine-x-y", f"sem.aengine-{2**70}x-"]
    for name in stale + kept:
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (old, old))
    young = tmp_path / f"sem.aengine-{dead}-young"  # perhaps a live host of another pid namespace
    young.write_bytes(b"")
    assert sweep_stale_names(str(tmp_path)) == len(stale)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, young.name])
    assert sweep_stale_names(str(tmp_path / "missing")) == 0


def test_a_limit_of_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(EngineError, match=r"`ulimit -f` \(RLIMIT_FSIZE\) .*: lift it with `ulimit -f unlimited`$"):
        Segment.create(4096)


def traces() -> tuple[int, list[str]]:
    """Descriptors of this process, and what it has mapped of ours."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sorted(line for line in maps if "/dev/shm/" in line)


def test_nothing_stays_open_or_mapped(both_ways: None) -> None:
    before = traces()
    one = Segment.create(4096)
    ticket = Ticket(os.dup(one.fd), 0, "/none", one.capacity, 0, one.nonce)
    two = Segment.attach(ticket)
    for wrong in (replace(ticket, nonce="0" * 16), replace(ticket, capacity=8192)):
        with pytest.raises(FrameError):
            Segment.attach(replace(wrong, shm_fd=os.dup(one.fd)))
    assert not two.is_void
    one.void()
    assert two.is_void
    with pytest.raises(FileNotFoundError):
        Segment.attach(replace(ticket, shm_fd=os.dup(one.fd)))
    assert len(traces()[1]) == len(before[1]) + 2
    host, worker = attached()
    loop_bell = LoopBell.create()
    assert len(traces()[1]) == len(before[1]) + 3, "the semaphore is mapped once"
    for end in (one, two, host, worker, loop_bell):
        end.close()
    assert traces() == before


def test_nothing_in_the_segment_overlaps(rng: random.Random) -> None:
    for ring_bytes in (0, 1, 255, 256, 257, 4096, rng.randrange(1 << 20), 64 * rng.randrange(5, 1 << 14)):
        capacity = round_capacity(ring_bytes)
        assert capacity % 64 == 0 and capacity - 64 < max(ring_bytes, 256) <= capacity
        first, second, bitmask = ring_span(0, capacity), ring_span(1, capacity), bitmask_span(capacity, 1000)
        assert first.start == LABEL_BYTES >= max(LABEL.size, HEARTBEAT.stop) and HEARTBEAT.start >= LABEL.size
        assert first.stop == second.start == first.start + CONTROL_BYTES + capacity
        assert second.stop - second.start == first.stop - first.start
        assert 0 <= bitmask.start - second.stop < PAGE_BYTES and bitmask.start % PAGE_BYTES == 0
        assert segment_bytes(capacity, 1000) == bitmask.stop == bitmask.start + 1000
        assert segment_bytes(capacity) == second.stop
    on_a_page = PAGE_BYTES // 2 - CONTROL_BYTES - LABEL_BYTES // 2
    assert bitmask_span(on_a_page, 1).start == segment_bytes(on_a_page) == PAGE_BYTES
