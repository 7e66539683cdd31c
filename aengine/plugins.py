"""Workers and platforms by name: our own, and those that other packages register as entry points.

A package registers one in its pyproject.toml, and the settings ``worker`` and ``device`` then take its name:

    [project.entry-points."aengine.platforms"]
    toy = "toy_platform:ToyPlatform"
"""

from __future__ import annotations

__all__ = ["PLATFORMS", "WORKERS", "registered", "target_of"]

WORKERS = "aengine.workers"
"""The group of functions that load a model: see workers/loaded.py."""
PLATFORMS = "aengine.platforms"
"""The group of classes of devices: see runner/platforms/platform.py."""

_OWN = {
    WORKERS: {"default": "aengine.runner.startup.begin:load_model"},
    PLATFORMS: {
        "cuda": "aengine.runner.platforms.cuda:CudaPlatform",
        "cpu": "aengine.runner.platforms.cpu:CpuPlatform",
    },
}


def target_of(group: str, name: str) -> str | None:
    """Return the "module:attribute" registered as ``name``; None: there is none. Blocking: reads files, unless the name
    is one of our own."""
    return _OWN[group].get(name) or registered(group).get(name)


def registered(group: str) -> dict[str, str]:
    """All names of the group, our own first, then those of other packages in order; each with its "module:attribute".
    Blocking: reads files."""
    from importlib.metadata import entry_points

    return _OWN[group] | {point.name: point.value for point in sorted(entry_points(group=group))}
