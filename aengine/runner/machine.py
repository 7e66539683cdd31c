"""How much memory this machine has left, by Linux's own files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory"]


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still use: what the kernel calls available, or what a container leaves."""
    available = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        folder = root / "sys/fs/cgroup"
        most, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if most.isdecimal() and now.isdecimal():  # else "max", or another version of cgroups
            # Cached pages of files count as used, but give way.
            cached = [int(s.split()[1]) for s in _read(folder / stat).splitlines() if s.startswith(cache + " ")]
            available = min(available, max(0, int(most) - int(now) + sum(cached)))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
