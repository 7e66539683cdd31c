"""What settings name: functions and classes of ours, or of other packages' entry points, and places in modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ..errors import InvalidRequestError
from .bounds import MAX_PROCESSORS
from .values import not_valid, shown

WORKERS = "aengine.workers"
"""The group of functions that load a model: see workers/loaded.py."""
PROPOSERS = "aengine.proposers"
"""The group of what guesses tokens: see engine/speculation/proposer.py."""
PROCESSORS = "aengine.logits_processors"
"""The group of classes that change logits: see runner/sampling/processors.py."""
PLATFORMS = "aengine.platforms"
"""The group of classes of devices: see runner/platforms/platform.py."""
KV_STORES = "aengine.kv_stores"
"""The group of classes that keep KV outside of an engine: see engine/stores/store.py."""

OWN = {
    WORKERS: {"default": "aengine.runner.startup.begin:load_model"},
    PROPOSERS: dict.fromkeys(
        ("suffix", "ngram", "suffix_past", "ngram_worker", "draft_model", "eagle3", "peagle", "dflash", "mtp"),
        "aengine.engine.speculation.proposer",
    ),
    PROCESSORS: {"thinking_budget": "aengine.runner.sampling.features.thinking_budget:ThinkingBudget"},
    PLATFORMS: {
        "cuda": "aengine.runner.platforms.cuda:CudaPlatform",
        "cpu": "aengine.runner.platforms.cpu:CpuPlatform",
    },
    KV_STORES: {"redis": "aengine.engine.stores.redis_store:RedisStore"},
}


def target_of(group: str, name: str) -> str | None:
    """Return the "module:attribute" registered as ``name``; None: there is none. Blocking: reads files, unless the name
    is one of our own."""
    return OWN[group].get(name) or registered(group).get(name)


def registered(group: str) -> dict[str, str]:
    """All names of the group, our own first, then those of other packages in order; each with its "module:attribute".
    Blocking: reads files."""
    from importlib.metadata import entry_points

    return OWN[group] | {point.name: point.value for point in sorted(entry_points(group=group))}


def check_device(device: object, num_ranks: int) -> None:
    """Raise InvalidRequestError unless it is "auto", or a platform's name, perhaps with an index for each rank."""
    if isinstance(device, str) and device in ("auto", "cpu", "cuda"):
        return
    name, colon, listed = device.partition(":") if isinstance(device, str) else ("", "", "")
    places = listed.split(",") if colon else []
    wanted = "'auto', 'cpu', 'cuda', 'cuda:N' or, for several ranks, 'cuda:N,M'"
    if not name or name == "cpu" or not all(re.fullmatch("[0-9]{1,4}", place) for place in places):
        raise not_valid("device", device, wanted)
    if name != "auto" and target_of(PLATFORMS, name) is None:
        others = [name for name in registered(PLATFORMS) if name not in ("cpu", "cuda")]
        raise not_valid("device", device, wanted + "".join(f", {name!r}" for name in others))
    if places and not len(places) == len(set(map(int, places))) == num_ranks:
        raise InvalidRequestError(
            f"device={shown(device)} names {len(set(map(int, places)))} different devices, and the engine has "
            f"{num_ranks} rank{'s' * (num_ranks != 1)} (tensor_parallel_size x pipeline_parallel_size x "
            f"data_parallel_size): name one for each, or use device={name!r} for the first ones",
            param="device",
        )


def check_target(param: str, given: object, group: str, form: str) -> None:
    """Raise InvalidRequestError unless it is a name of the group, or looks like ``form``."""
    if is_in_module(given) or (isinstance(given, str) and target_of(group, given) is not None):
        return
    raise not_valid(param, given, f"{form!r}, or one of {', '.join(map(repr, registered(group)))}")


def check_processors(names: object) -> None:
    """Raise InvalidRequestError unless it is a list of known names and places in modules."""
    if isinstance(names, str) or not isinstance(names, Sequence) or len(names) > MAX_PROCESSORS:
        raise not_valid("logits_processors", names, f"a list of at most {MAX_PROCESSORS} names")
    for name in names:
        check_target("logits_processors", name, PROCESSORS, "module:Class")


def is_in_module(name: object) -> bool:
    """Whether it looks like "module:name"."""
    module, _, own = name.partition(":") if isinstance(name, str) else ("", "", "")
    return own.isidentifier() and all(part.isidentifier() for part in module.split("."))


@runtime_checkable
class Spares(Protocol):
    """A `SpareWorkers`, as the setting ``spare_workers`` and the host's side of a worker see it."""

    def take(self, environment: dict[str, str]) -> Any:
        """Return a process that is ready to become a worker with this environment; None: there is none. Blocking."""

    def close(self) -> None:
        """End those that are ready."""
