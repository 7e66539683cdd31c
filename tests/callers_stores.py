"""Stores of KV that a caller could name: one in memory, which engines of a process share, and some that misbehave."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence


class MemoryStore:
    """Keeps pages by ``name``; all of its objects with that name share them."""

    kept: dict[str, dict[bytes, bytes]] = {}

    def __init__(self, name: str = "") -> None:
        self.pages = self.kept.setdefault(name, {})

    def query(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
        for key, page in zip(keys, pages, strict=True):
            if key in self.pages:
                page[:] = self.pages[key]
        return [key in self.pages for key in keys]

    def save(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        self.pages.update((key, bytes(page)) for key, page in zip(keys, pages, strict=True))

    def close(self) -> None:
        pass


class Misbehaving(MemoryStore):
    """Does ``what`` in each call of ``method``."""

    let_go = threading.Event()
    """Ends what hangs."""
    num_calls = 0

    def __init__(self, name: str, method: str, what: str) -> None:
        super().__init__(name)
        self._what = what
        setattr(self, method, self._misbehave)

    def _misbehave(self, *args: object) -> object:
        type(self).num_calls += 1
        if self._what == "hangs":
            self.let_go.wait()
        if self._what == "raises":
            raise ConnectionError("the store is gone")
        if self._what == "exits":
            raise SystemExit("the store has had enough")
        return {"lies": -3, "has more": [True] * 1000}.get(self._what)


class Flaky(MemoryStore):
    """Fails now and then, takes its time, and drops pages."""

    rng = random.Random(0)

    def query(self, keys: Sequence[bytes]) -> int:
        self._stumble()
        return super().query(keys)

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
        self._stumble()
        filled = super().load(keys, pages)
        for index, page in enumerate(pages):
            if self.rng.random() < 0.1:
                page[:] = bytes(len(page))
                filled[index] = False
        return filled

    def save(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        self._stumble()
        super().save(keys, pages)
        for key in self.rng.sample(sorted(self.pages), len(self.pages) // 50):
            self.pages.pop(key, None)

    def _stumble(self) -> None:
        time.sleep(self.rng.random() * 0.01)
        if self.rng.random() < 0.05:
            raise OSError("it has stumbled")


class NoStore:
    """Lacks methods."""
