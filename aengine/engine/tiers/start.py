"""What the setting ``kv_tiers`` takes to start: stores are opened and weights are read while the workers start."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from ...checkpoint.source import ModelSource
from ...config import EngineConfig
from ...errors import ModelLoadError
from ...ipc.thread_calls import outcome_of
from ...limits.kv_tiers import DiskTier, HostTier, StoreTier
from ..stores.choice import open_store
from ..stores.fingerprint import fingerprints, weights_digest
from ..stores.store import KVStore
from .host_memory import HostMemory


class TiersStart:
    """The start of the tiers of all replicas. Its methods block."""

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        """Raises ModelLoadError: a store can't be opened."""
        self._config = config
        self._source = source
        self._is_dropped = threading.Event()
        self._stores: list[list[tuple[str, KVStore]]] = []  # stores of the replicas that have no memory yet
        tiers = [tier for tier in config.kv_tiers if isinstance(tier, DiskTier | StoreTier)]
        try:
            for _ in range(config.data_parallel_size):
                self._stores.append([])
                for tier in tiers:
                    name = f"disk:{tier.path}" if isinstance(tier, DiskTier) else tier.name
                    self._stores[-1].append((name, open_store(tier)))
        except ModelLoadError:
            self.undo()
            raise
        self._reading = threading.Thread(target=self._read, name="aengine-weights-digest", daemon=True)
        if tiers:
            self._reading.start()

    def _read(self) -> None:
        self._weights = outcome_of(partial(weights_digest, self._config, self._source, self._is_dropped.is_set))

    def new_memory(self, ready: dict[str, Any]) -> HostMemory | None:
        """Return the memory for the pages of one replica; None: the setting asks for none, or there is no KV.
        ``ready``: what its workers say of themselves. Raises NotEnoughMemoryError, or ModelLoadError."""
        page_bytes = [int(rank.get("kv_cache_bytes", 0)) // int(ready["num_blocks"]) for rank in ready.get("ranks", [])]
        if not self._config.kv_tiers or not page_bytes or not all(page_bytes):
            return None
        host = self._config.kv_tiers[0]
        assert isinstance(host, HostTier), "the configuration has checked it"
        memory = HostMemory(host.num_bytes // self._config.data_parallel_size, page_bytes)
        memory.stores = self._stores.pop()
        if memory.stores:
            self._reading.join()
            digest, error = self._weights
            if digest is None:
                raise ModelLoadError(f"kv_tiers: the weights could not be read for their digest: {error}") from error
            memory.fingerprints = fingerprints(self._config, self._source, digest, ready, page_bytes)
        return memory

    def undo(self) -> None:
        """Close what was opened: the engine does not start."""
        self._is_dropped.set()
        while self._stores:
            for _, store in self._stores.pop():
                store.close()
