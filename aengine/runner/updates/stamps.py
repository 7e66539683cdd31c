"""What tells whether a folder still has the weights that it had."""

from __future__ import annotations

from pathlib import Path

_KINDS = (".safetensors", ".gguf")


def stamp_of(path: str) -> list[list[str | int]]:
    """Return name, size and time of the last change of each file of weights in a folder, or of the one file."""
    place = Path(path)
    files = place.iterdir() if place.is_dir() else [place]
    found = [(file.name, file.stat()) for file in files if file.suffix in _KINDS and file.exists()]
    return sorted([name, stat.st_size, stat.st_mtime_ns] for name, stat in found)
