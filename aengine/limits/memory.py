"""Free memory of this machine, read from Linux's own files."""

from __future__ import annotations

from pathlib import Path

from .cgroups import memory_left


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use: what the kernel calls available, or what a container leaves."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    left = memory_left(root)
    return available if left is None else min(available, left)
