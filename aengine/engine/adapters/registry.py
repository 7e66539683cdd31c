"""`LoraAdapters`: the adapters that requests can name, and how they come to the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from ...checkpoint.lora import MOST_ADAPTERS, MOST_RANK, LoraFiles, Matrices, find_lora, named_as, read_lora
from ...config import EngineConfig
from ...errors import (
    AEngineError,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    InternalError,
    InvalidRequestError,
    ModelLoadError,
)
from ...ipc.messages import int32
from ...limits.loras import DEFAULT_RANK
from ...limits.values import shown
from ...telemetry.metrics import AdapterStatistics
from ..threads.pools import run_in_thread
from .adapters import AdapterShare, NewAdapters, Running, Workers
from .loading import load_into
from .memory import MOST_KEPT, LoraMemory, LoraTensors
from .slots import Lora, LoraSlots

logger = logging.getLogger("aengine")

_FEW = 1000  # adapters that are listed on the loop
_SHOWN = 100  # names in statistics

EXTRA = "lora"
"""Name of the extra of a request that has its adapter's slot."""


class LoraAdapters:
    """`Adapters` of LoRA. ``given``: those of the setting ``loras``, by name."""

    def __init__(
        self, config: EngineConfig, given: Mapping[str, LoraFiles], matrices: Matrices, running: Running
    ) -> None:
        """``matrices``: those of the model that adapters can change, to which the ``given`` have been compared."""
        self._running = running
        self._max_ranks = config.max_lora_rank or 0, config.max_lora_expert_rank or 0
        self._matrices = matrices
        self._can_share_memory = config.executor != "ray"
        self._serials = count(1)
        self._loras = {name: Lora(name, files, next(self._serials)) for name, files in given.items()}
        self._coming: dict[str, bool] = {}  # names of those that are being read, and whether they came as tensors
        self.slots = LoraSlots(config.num_lora_slots, self._load)

    # -- of requests

    def check(self, name: str) -> None:
        """See `Adapters`."""
        self._named(name, "lora")

    async def share(self, name: str) -> AdapterShare:
        """See `Adapters`."""
        lora = self._named(name, "lora")
        index, leave = await self.slots.acquire(lora)
        return AdapterShare({EXTRA: [int32([index]).tobytes()]}, lora.key, leave)

    # -- of the engine's owner

    async def add(self, name: str, source: str | LoraTensors | LoraMemory, *, replace: bool) -> None:
        """See `AsyncLLM.add_lora`."""
        if name in self._coming or (name in self._loras and not replace):
            raise InvalidRequestError(
                f"there is an adapter {shown(name)} already: remove_lora({name!r:.80}) first, or give replace=True",
                param="name",
            )
        if len(self._loras) + len(self._coming) >= MOST_ADAPTERS and name not in self._loras:
            raise InvalidRequestError(
                f"there are {MOST_ADAPTERS} adapters, which is the most: remove some", param="name"
            )
        is_kept = not isinstance(source, str)
        kept = [one for one in self._loras.values() if one.memory is not None and one.name != name]
        if is_kept and len(kept) + sum(self._coming.values()) >= MOST_KEPT:
            raise InvalidRequestError(
                f"there are {MOST_KEPT} adapters that were given as tensors, which is the most: write some to folders",
                param="source",
            )
        self._coming[name] = is_kept
        try:
            files, memory = await run_in_thread("lora", partial(self._read, source))
        except ModelLoadError as error:
            raise InvalidRequestError(f"lora {shown(name)}: {error}", param="source") from error
        finally:
            del self._coming[name]
        before, new = self._loras.get(name), Lora(name, files, next(self._serials), memory)
        if before is not None:
            self.slots.forget(before, heir=new)
        self._loras[name] = new

    def _read(self, source: str | LoraTensors | LoraMemory) -> tuple[LoraFiles, LoraMemory | None]:
        """Find an adapter and compare it with the model. Blocking: it may change thousands of matrices."""
        if isinstance(source, str):
            return named_as(find_lora(source, *self._max_ranks), self._matrices), None
        if not self._can_share_memory:
            message = (
                "workers of other machines can't read tensors of this process: write them to a folder that all see"
            )
            raise InvalidRequestError(message, param="source")
        memory = LoraMemory.of(source) if isinstance(source, LoraTensors) else source
        return named_as(read_lora(Path(memory.path), *self._max_ranks), self._matrices), memory

    def remove(self, name: str) -> None:
        """See `AsyncLLM.remove_lora`."""
        lora = self._named(name, "name")
        del self._loras[name]
        self.slots.forget(lora)

    async def pin(self, name: str) -> None:
        """See `AsyncLLM.pin_lora`."""
        lora = self._named(name, "name")
        await self.slots.pin(lora)
        if self._loras.get(name) is not lora:
            raise InvalidRequestError(f"the adapter {shown(name)} was removed before it was loaded", param="name")

    def __contains__(self, name: str) -> bool:
        return name in self._loras

    async def listed(self) -> dict[str, dict[str, Any]]:
        """See `AsyncLLM.list_loras`."""
        users, waiting, loaded = self.slots.num_users, self.slots.num_waiting, {lora.name for _, lora in self.slots}
        loras = list(self._loras.values())

        def listed() -> dict[str, dict[str, Any]]:
            return {
                lora.name: {
                    "path": lora.files.path,
                    "rank": max(lora.files.rank, lora.files.expert_rank),
                    "is_loaded": lora.name in loaded,
                    "num_running": users.get(lora.name, 0),
                    "num_waiting": waiting.get(lora.name, 0),
                }
                for lora in loras
            }

        return listed() if len(loras) < _FEW else await run_in_thread("lora", listed)

    def fail(self, error: AEngineError) -> None:
        """See `Adapters`."""
        self.slots.fail(error)
        self._loras.clear()  # a closed engine may be kept, and their memory with it

    def statistics(self) -> AdapterStatistics:
        """See `Adapters`."""
        slots = self.slots
        running = (name for name, count in slots.num_users.items() if count)
        waiting = (lora.name for lora in slots.waiting)
        return AdapterStatistics(
            slots.size,
            len(self._loras),
            slots.num_loads,
            tuple(islice(running, _SHOWN)),
            tuple(islice(waiting, _SHOWN)),
        )

    def _named(self, name: str, param: str) -> Lora:
        lora = self._loras.get(name)
        if lora is None:
            known = ", ".join(f"{one:.40}" for one in islice(self._loras, 8)) or "none"
            raise InvalidRequestError(f"there is no adapter {shown(name)}: there are {known}", param=param)
        return lora

    # -- in the workers

    async def _load(self, index: int, lora: Lora) -> None:
        async def load(workers: Workers) -> None:
            try:
                await load_into(workers, index, lora)
            except (EngineError, EngineOverloadedError):
                if workers.failure is None or isinstance(workers.failure, EngineClosedError):
                    raise
                # The workers that come in place of dead ones get it by `restore`.

        await asyncio.gather(*map(load, self._running()))

    async def restore(self, workers: Workers) -> None:
        """See `Adapters`: an adapter whose files have gone fails its requests, by the worker, and no others."""
        done: set[tuple[int, Lora]] = set()
        while missing := [one for one in self.slots if one not in done]:
            for index, lora in missing:
                done.add((index, lora))
                try:
                    await load_into(workers, index, lora)
                except InvalidRequestError as error:
                    logger.error("the adapter %s can't be loaded into the new worker: %s", lora.name, error)
                except EngineOverloadedError as error:  # nobody is there to try again
                    raise InternalError(str(error)) from error


def find_given(config: EngineConfig) -> tuple[EngineConfig, dict[str, LoraFiles]]:
    """Return the settings as workers need them, with the largest ranks known and all adapters in folders, and the
    adapters of ``loras``. Blocking. Raises ModelLoadError, naming the adapter."""
    given, expert_rank = {}, config.max_lora_expert_rank
    most = config.max_lora_rank or MOST_RANK, MOST_RANK if expert_rank is None else expert_rank
    for name, source in (config.loras or {}).items():
        with _named_in_error(name):
            given[name] = find_lora(source, *most)
    rank = config.max_lora_rank or max((files.rank for files in given.values()), default=0) or DEFAULT_RANK
    if expert_rank is None:
        expert_rank = max((files.expert_rank for files in given.values()), default=0)
    paths = {name: files.path for name, files in given.items()}
    return config.replace(loras=paths, max_lora_rank=rank, max_lora_expert_rank=expert_rank), given


def compared(config: EngineConfig, given: Mapping[str, LoraFiles], ready: Mapping[str, Any]) -> NewAdapters:
    """See `AdaptersOf`: of the adapters that `find_given` has found."""
    matrices, own = ready["lora_matrices"], {}
    for name, files in given.items():
        with _named_in_error(name):
            own[name] = named_as(files, matrices)
    return partial(LoraAdapters, config, own, matrices)


@contextmanager
def _named_in_error(name: str) -> Iterator[None]:
    """Say of which of the setting's adapters a ModelLoadError is."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"loras: {shown(name)}: {error}") from error
