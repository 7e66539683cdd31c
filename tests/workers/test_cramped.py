"""Machines that withhold what an engine needs: each is an error that names the cause and the cure, at the start."""

from __future__ import annotations

import errno
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest
from worker_helpers import HERE, gone, leftovers, make, start

from aengine.errors import EngineError, InternalError, InvalidRequestError, ModelLoadError, WorkerDiedError
from aengine.ipc.channel import HostChannel
from aengine.ipc.shm import Segment
from aengine.limits import ulimits
from aengine.limits.cgroups import threads_limit
from aengine.limits.ulimits import is_out_of_memory, limit_hint, memory_ulimit_hint

PROGRAM = """
    import asyncio, sys
    sys.path.insert(0, {here!r})
    from aengine.errors import AEngineError
    from worker_helpers import make, start

    async def main():
        executor = make()
        try:
            await start(executor)
        except AEngineError as error:
            print(type(error).__name__, error)
        else:
            print("started")
            await executor.aclose(5)

    asyncio.run(main())
"""


def program_after(mount: str) -> str:
    """What a program prints that starts a worker where /dev/shm is another; skips where nothing can be mounted."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs to mount")
    code = textwrap.dedent(PROGRAM.format(here=str(HERE)))
    script = f'set -e; {mount}; exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


async def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    executor = make()
    ready = await start(executor)
    assert Path(f"/proc/{ready['pid']}/cwd").readlink() == Path("/")
    await executor.aclose(5)


@pytest.mark.parametrize(
    "options, text",
    [
        ("ro", r"EngineError /dev/shm can't be used \(.*Read-only.*--tmpfs /dev/shm"),
        ("size=4m", r"EngineError no shared memory for the rings, \d+ bytes .*No space.*--shm-size.*ring_bytes"),
        ("size=64m", "started"),
    ],
)
def test_another_dev_shm(options: str, text: str) -> None:
    assert re.match(text, program_after(f"mount -t tmpfs -o {options} tmpfs /dev/shm"))


def test_no_dev_shm(tmp_path: object) -> None:
    nodes = " ".join(f"{tmp_path}/{name}" for name in ("null", "urandom"))
    bind = "; ".join(f"mount --bind /dev/{name} {tmp_path}/{name}" for name in ("null", "urandom"))
    out = program_after(f"mount -t tmpfs tmpfs {tmp_path}; touch {nodes}; {bind}; mount --rbind {tmp_path} /dev")
    assert out.startswith("EngineError /dev/shm can't be used (there is no such folder)")


@pytest.mark.parametrize(
    "error, cause",
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only"),
        (posix_ipc.PermissionsError("Permission denied"), "Permission denied"),
        (posix_ipc.ExistentialError("No shared memory exists with the specified name"), "No shared memory exists"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    ],
)
@pytest.mark.parametrize("what", ["SharedMemory", "Semaphore"])
def test_what_can_not_be_made_there(monkeypatch: pytest.MonkeyPatch, what: str, error: Exception, cause: str) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise error

    channel = HostChannel.create(65536)
    try:
        monkeypatch.setattr(posix_ipc, what, refuse)
        with pytest.raises(EngineError, match=cause) as caught:
            Segment.create(65536) if what == "SharedMemory" else channel.offer()
        assert caught.value.__cause__ is error
    finally:
        channel.close()
    assert not leftovers()


@pytest.fixture
def ulimit() -> Iterator[None]:
    """As after ``ulimit -v``, though with room enough; children inherit it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 44, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("how", ["memory", "map", "crash", "import"])
async def test_a_ulimit_is_named(ulimit: None, how: str) -> None:
    executor = make()
    with pytest.raises(ModelLoadError, match=r"`ulimit -v` allows each process 17179869184 kB.*ulimit -v unlimited"):
        await start(executor, {"fail": how})
    await gone(executor.workers[0].pid)


@pytest.mark.parametrize(
    "how, error, text",
    [
        ("memory", ModelLoadError, "not enough memory to load.*MemoryError.*lower kv_cache_memory_bytes"),
        ("crash", WorkerDiedError, "died of SIGSEGV"),
    ],
)
async def test_without_a_ulimit_none_is_named(how: str, error: type[Exception], text: str) -> None:
    executor = make()
    with pytest.raises(error, match=text) as caught:
        await start(executor, {"fail": how})
    assert "ulimit" not in str(caught.value)


async def test_a_bug_stays_one_under_a_ulimit(ulimit: None) -> None:
    with pytest.raises(InternalError, match="KeyError"):
        await start(make(), {"fail": "bug"})


async def test_a_start_that_hangs_names_the_ulimit(ulimit: None) -> None:
    """OpenBLAS has been seen to try again and again for ever."""
    with pytest.raises(ModelLoadError, match=r"not ready after.*ulimit -v"):
        await start(make(startup_timeout=1.5), {"fail": "hang"})


def test_what_a_want_of_memory_looks_like() -> None:
    assert not memory_ulimit_hint()
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        ImportError("libmkl.so: failed to map segment from shared object"),
    ):
        assert is_out_of_memory(error)
    for error in (KeyError("x"), RuntimeError("shapes differ"), ImportError("no module x"), ValueError("can't map")):
        assert not is_out_of_memory(error)


# -- files, threads


def test_what_is_said_of_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulimits, "threads_limit", lambda: 77)
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, 33), 33))
    assert "`ulimit -n` allows each process 33 open files" in limit_hint(
        str(OSError(errno.EMFILE, "Too many open files"))
    )
    for text in (
        "can't start new thread",
        "[Errno 11] Resource temporarily unavailable",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 8",
    ):
        hint = limit_hint(text)
        assert "`ulimit -u` allows this user 33" in hint and "pids.max allows 77" in hint and "num_threads" in hint
    assert limit_hint("KeyError: 'weight'") == ""
    limits[resource.RLIMIT_AS] = 200 * 1024**2
    assert "`ulimit -v` allows each process 204800 kB" in limit_hint("can't start new thread"), "its stack is memory"


@pytest.mark.parametrize("how, text", [("files", "`ulimit -n` allows"), ("threads", "no thread can be started")])
async def test_a_limit_that_is_hit_while_the_model_loads(how: str, text: str) -> None:
    executor = make()
    with pytest.raises(ModelLoadError, match=text) as caught:
        await start(executor, {"fail": how})
    assert "\n" not in str(caught.value)
    await gone(executor.workers[0].pid)


async def test_a_library_that_ends_the_worker_for_want_of_threads() -> None:
    with pytest.raises(ModelLoadError, match="(?s)no thread can be started.*libgomp: Thread creation failed"):
        await start(make(), {"fail": "libgomp"})


@pytest.mark.parametrize("limit", [12, 13])
def test_few_descriptors(limit: int) -> None:
    """Too few for the rings, or for the worker's process."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
    code += textwrap.dedent(PROGRAM.format(here=str(HERE)))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert re.match(rf"EngineError .*Too many open files.*`ulimit -n` allows each process {limit} open files", out)


def test_more_threads_than_any_machine_runs() -> None:
    with pytest.raises(InvalidRequestError, match="num_threads=1000000 is not valid: it must be at most") as caught:
        make(num_threads=10**6)
    assert caught.value.param == "num_threads"


def test_the_most_threads_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    group = tmp_path / "sys/fs/cgroup/pod/box"
    group.mkdir(parents=True)
    assert threads_limit(tmp_path) is None
    (group / "pids.max").write_text("max\n")
    assert threads_limit(tmp_path) is None
    (group.parent / "pids.max").write_text("512\n")
    assert threads_limit(tmp_path) == 512
