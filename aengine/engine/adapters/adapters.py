"""What changes the model's weights for one request: the seat of adapters between a call and the scheduler.

A request that names an adapter gets a share of it while it is prepared, and gives it back when it ends. All that the
scheduler and the worker see of it are an extra of the request, and the key of its KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from ...errors import AEngineError, EngineError, InvalidRequestError
from ...ipc.messages import Extras
from ...telemetry.metrics import AdapterStatistics


def _keep() -> None:
    """There is nothing to give back."""


class AdapterShare(NamedTuple):
    """What a request has of its adapter, from when it is prepared until it ends."""

    extras: Extras  # the request's, see `NewRequest`; nobody changes them
    key: bytes  # what its KV depends on, see `CacheKey`
    give_back: Callable[[], None]  # called once


NO_SHARE = AdapterShare({}, b"", _keep)


class Workers(Protocol):
    """The workers of a replica, as `Executor` says."""

    @property
    def failure(self) -> EngineError | None: ...

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]: ...


class Adapters(Protocol):
    """The adapters of an engine. On its loop."""

    def check(self, name: str) -> None:
        """Raise InvalidRequestError unless there is an adapter of this name."""

    async def share(self, name: str) -> AdapterShare:
        """Wait until the workers have the adapter, and hold it there. Raises InvalidRequestError, EngineError."""

    async def restore(self, workers: Workers) -> None:
        """Give workers that were started in place of others what those had."""

    def fail(self, error: AEngineError) -> None:
        """End all waiting, of requests and of others, with ``error``: the engine has ended."""

    def statistics(self) -> AdapterStatistics:
        """Return what there is at this moment."""


Running = Callable[[], Iterable[Workers]]
"""Returns the workers of each replica that is not being started again."""
NewAdapters = Callable[[Running], Adapters]
"""Makes an engine's adapters."""
AdaptersOf = Callable[[Mapping[str, Any]], NewAdapters]
"""Compares adapters with what workers have said of themselves. Blocking. Raises ModelLoadError: one is none for their
model."""


class NoAdapters:
    """`Adapters` of an engine that was started without any."""

    def check(self, name: str) -> None:
        raise InvalidRequestError(
            f"lora={name!r:.80}: the engine was started without adapters: give loras={{...}} or max_loras=...",
            param="lora",
        )

    async def share(self, name: str) -> AdapterShare:
        raise AssertionError("`check` refuses all names")

    async def restore(self, workers: Workers) -> None:
        return None

    def fail(self, error: AEngineError) -> None:
        return None

    def statistics(self) -> AdapterStatistics:
        return AdapterStatistics()
