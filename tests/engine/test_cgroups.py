"""The limits of a container, read from made-up trees of both versions of cgroups, and of a real one where it can be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aengine.config import EngineConfig, num_worker_threads, thread_environment
from aengine.limits.cgroups import cpu_quota, memory_left, memory_limit, num_usable_cpus

V2 = "31 23 0:28 {shown} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw"
V1 = "33 31 0:30 {shown} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{controllers}"
GB = 1 << 30


def tree(root: Path, own: list[str], mounts: list[str], files: dict[str, str]) -> Path:
    """A file system with these lines in /proc/self/cgroup and mountinfo, and these files under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in own))
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "\n".join(mounts) + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_nothing_is_known_without_cgroups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert memory_left(tmp_path) is None
    assert memory_limit(tmp_path) is None
    assert num_usable_cpus(tmp_path) == len(os.sched_getaffinity(0))


def test_version_2_in_a_container(tmp_path: Path) -> None:
    """With a namespace of its own: the container's group is the root of all that it sees."""
    files = {
        "cpu.max": "150000 100000\n",
        "memory.max": f"{4 * GB}\n",
        "memory.high": "max\n",
        "memory.current": f"{3 * GB}\n",
        "memory.stat": f"anon 17\ninactive_file {GB}\nactive_file 9\n",
    }
    root = tree(tmp_path, ["0::/"], [V2.format(shown="/")], files)
    assert cpu_quota(root) == 1.5
    assert memory_limit(root) == 4 * GB
    assert memory_left(root) == 2 * GB


def test_the_least_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = {
        "cpu.max": "max 100000\n",
        "a/cpu.max": "200000 100000\n",
        "a/b c/cpu.max": "max 100000\n",
        "a/b c/d/cpu.max": "600000 200000\n",
        "other/cpu.max": "1000 100000\n",
        "a/memory.max": f"{8 * GB}\n",
        "a/memory.current": f"{7 * GB}\n",
        "a/b c/d/memory.max": f"{2 * GB}\n",
        "a/b c/d/memory.high": f"{3 * GB // 2}\n",
        "a/b c/d/memory.current": "4096\n",
    }
    root = tree(tmp_path, ["0::/a/b c/d"], [V2.format(shown="/")], files)
    assert cpu_quota(root) == 2.0
    assert memory_limit(root) == 3 * GB // 2
    assert memory_left(root) == GB


@pytest.mark.parametrize("shown, own", [("/docker/1", "/docker/1"), ("/docker/1", "/docker/1/init"), ("/", "/../x")])
def test_version_1_in_a_container(tmp_path: Path, shown: str, own: str) -> None:
    """Docker mounts the container's part only, and without a namespace the paths are the machine's. A path that leads
    out of the namespace can't be followed: what is mounted is the container's."""
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": f"{2 * GB}\n",
        "memory/memory.usage_in_bytes": f"{GB}\n",
        "memory/memory.stat": "inactive_file 1\ntotal_cache 5\ntotal_inactive_file 1000\n",
    }
    mounts = [
        V1.format(shown=shown, name="cpu,cpuacct", controllers="cpu,cpuacct"),
        V1.format(shown=shown, name="memory", controllers="memory"),
        V1.format(shown=shown, name="cpuset", controllers="cpuset"),
    ]
    root = tree(tmp_path, [f"4:cpu,cpuacct:{own}", f"3:memory:{own}", f"2:cpuset:{own}"], mounts, files)
    assert cpu_quota(root) == 2.5
    assert memory_limit(root) == 2 * GB
    assert memory_left(root) == GB + 1000


def test_version_1_without_limits_beside_version_2(tmp_path: Path) -> None:
    """The hybrid set-up of systemd; no limit is -1, or the largest number of bytes that is a multiple of a page."""
    files = {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "5\n",
        "unified/cgroup.procs": "",
    }
    mounts = [
        V1.format(shown="/", name="cpu", controllers="cpu"),
        V1.format(shown="/", name="memory", controllers="memory"),
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    ]
    root = tree(tmp_path, ["2:cpu:/", "1:memory:/user", "0::/"], mounts, files)
    assert cpu_quota(root) is None
    assert memory_limit(root) is None
    assert memory_left(root) is None
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("50000\n")
    assert cpu_quota(root) == 0.5


@pytest.mark.parametrize("quota, cores, usable", [("50000", 8, 1), ("100000", 8, 1), ("399999", 8, 3), ("max", 8, 8)])
def test_usable_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int, usable: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    root = tree(tmp_path, ["0::/"], [V2.format(shown="/")], {"cpu.max": f"{quota} 100000\n"})
    assert num_usable_cpus(root) == usable


@pytest.mark.parametrize("cpus, threads", [(1, 1), (2, 2), (4, 4), (5, 4), (64, 63)])
def test_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int) -> None:
    monkeypatch.setattr("aengine.config.num_usable_cpus", lambda: cpus)
    config = EngineConfig.create("m", {})
    for given, expected in (
        ("3", 3),
        ("3,2", 3),
        ("9" * 5000, max(64, os.cpu_count() or 1)),
        ("0", threads),
        ("many", threads),
        ("", threads),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert num_worker_threads(config) == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert num_worker_threads(config) == threads
    assert thread_environment(config) == {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    assert num_worker_threads(config.replace(num_threads=7)) == 7


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group below this process' own, in the hierarchy that has the CPU controller."""
    for base in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup")):
        folder = base / f"aengine-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / "cpu.max").exists() or (folder / "cpu.cfs_quota_us").exists():
            break
        folder.rmdir()
    else:
        pytest.skip("no cgroup with a CPU controller can be made here")
    yield folder
    folder.rmdir()


def test_a_real_quota(real_group: Path) -> None:
    """A process that was put into a group with a quota of one CPU finds it by itself."""
    code = "from aengine.limits.cgroups import *; import sys; sys.stdin.read(); print(cpu_quota(), num_usable_cpus())"
    try:
        if (real_group / "cpu.max").exists():
            (real_group / "cpu.max").write_text("100000 100000")
        else:
            (real_group / "cpu.cfs_quota_us").write_text("100000")
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            (real_group / "cgroup.procs").write_text(str(process.pid))
            out, _ = process.communicate()
    except PermissionError as error:
        pytest.skip(f"no process can be put into a cgroup here: {error}")
    assert out.split() == ["1.0", "1"]
