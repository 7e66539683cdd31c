"""Limits of this process' cgroups (a container's, a systemd unit's): CPU time, memory, threads.

A limit holds for a group and all groups below it, so each is looked for from the process' own group up to the topmost
that is visible, and the least one counts. Both versions of cgroups are read; on a machine with both (hybrid) each
controller is in one of them. Inside a container only the container's part of the tree may be mounted: then its topmost
folder is the container's own group.

Everything here reads small files: call it in a thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 62  # version 1 writes the largest multiple of a page instead of a word


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU seconds that may be used in each second (1.5: one and a half CPUs); None: no limit."""
    quotas: list[float] = []
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()  # "max 100000", "150000 100000"
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def num_usable_cpus(root: Path = _ROOT) -> int:
    """Return how many threads may be busy at once: the cores of the affinity mask, at most the quota's whole CPUs.

    A thread more than that makes all of them stop for a part of each period (100 ms, usually), and the others wait for
    those that stopped first.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the bytes that the group may use, pages of files included; None: no limit."""
    return min((most for _, most in _memory_limits(root)), default=None)


def memory_left(root: Path = _ROOT) -> int | None:
    """Return the bytes that are left until the first limit is reached; None: no limit. Pages of files that the kernel
    can drop count as left."""
    left: list[int] = []
    for folder, most in _memory_limits(root):
        used = _read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip()
        if used.isdecimal():
            left.append(max(0, most - int(used) + _cached(folder)))
    return min(left, default=None)


def threads_limit(root: Path = _ROOT) -> int | None:
    """Return how many threads the group's processes may have (its pids.max); None: no limit."""
    limits = [_read(folder / "pids.max").strip() for folder in _groups(root, "pids")]
    return min((int(limit) for limit in limits if limit.isdecimal()), default=None)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    for folder in _groups(root, "memory"):
        # Above memory.high nothing is killed, but the group's threads are made to wait.
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            value = _read(folder / name).strip()
            if value.isdecimal() and int(value) < _UNLIMITED:
                yield folder, int(value)


def _cached(folder: Path) -> int:
    """Return the bytes of pages of files that can be dropped. Version 1 counts those of the groups below in a line of
    their own."""
    text = _read(folder / "memory.stat")
    found = re.search(r"^total_inactive_file (\d+)$", text, re.MULTILINE)
    found = found or re.search(r"^inactive_file (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Return the folders of this process' groups, in each hierarchy that may have the controller, innermost first."""
    for kind, mounted, shown in _mounts(root, controller):
        own = _own_group(root, "" if kind == "cgroup2" else controller)
        if own is None:
            continue
        below = "" if shown == "/" else shown
        inner = own[len(below) :] if f"{own}/".startswith(f"{below}/") and ".." not in own else ""
        parts = [part for part in inner.split("/") if part]
        top = root / mounted.lstrip("/")
        for length in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:length])


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield file system type, mount point and the group that is shown there, for the mounts that may have it."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2" or (kinds[0] == "cgroup" and controller in kinds[2].split(",")):
            yield kinds[0], _unescaped(fields[4]), _unescaped(fields[3])


def _own_group(root: Path, controller: str) -> str | None:
    """Return the path of this process' group in the hierarchy of the controller; "" for version 2's."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path.rstrip("/")
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
