"""Collective calls: what the host may ask of all ranks at once, by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from ..errors import InvalidRequestError, ModelLoadError
from .host.answers import NoSuchMethodError
from .loaded import LoadedModel, WorkerContext
from .rank import Rank


def ping(rank: Rank, model: LoadedModel | None) -> dict[str, Any]:
    """Return at once. A worker handles calls in order, so its reply says that all steps before were launched."""
    return {"rank": rank.index, "pid": os.getpid()}


def memory_info(rank: Rank, model: LoadedModel | None) -> dict[str, int]:
    """Return the bytes of ``resident`` memory of this process, and of these the ``shared`` with files and others."""
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    page = os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident * page, "shared": shared * page}


def start_profile(rank: Rank, model: LoadedModel | None, folder: str | None) -> dict[str, str]:
    """See `LoadedModel`."""
    return _or_refused(_loaded(model).start_profile, folder)


def stop_profile(rank: Rank, model: LoadedModel | None) -> dict[str, str]:
    """See `LoadedModel`."""
    return _or_refused(_loaded(model).stop_profile)


def reload_weights(rank: Rank, model: LoadedModel | None, path: str | None = None) -> int:
    """See `LoadedModel`."""
    return _loaded(model).reload_weights(path)


CALLS: dict[str, Callable[..., Any]] = {
    "ping": ping,
    "memory_info": memory_info,
    "reload_weights": reload_weights,
    "start_profile": start_profile,
    "stop_profile": stop_profile,
}


AT_ONCE = frozenset({"map_pages", "pinned_pages", "copy_pages"})
"""Calls that need no order among steps: they are made when they come, not behind the steps that wait."""


def call_model(model: LoadedModel | None, method: str, arguments: list[Any]) -> Any:
    """Make a call that the model itself has, in ``calls``: a mapping of names to functions."""
    calls = getattr(model, "calls", {})
    if method not in calls:
        raise ValueError(f"there is no collective call {method!r}; there are {', '.join([*CALLS, *calls])}")
    return calls[method](*arguments)


_CALLS_OF_USERS = ("ping", "memory_info", "reload_weights")


class Extension:
    """The methods that `AsyncLLM.collective_rpc` can call: public ones of an object of ``cls``, and some of our own."""

    def __init__(self, cls: Callable[[WorkerContext], object] | None, context: WorkerContext) -> None:
        """Make the extension, an instance of ``cls``. Raises what its ``__init__`` raises."""
        self._object = None if cls is None else cls(context)
        self._context = context

    def call(self, method: str, args: list[Any]) -> Any:
        """Call a method of the extension. Raises NoSuchMethodError, and whatever the method raises."""
        names = self._names()
        if method in names:
            value = getattr(self._object, method)(*args)
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError(f"{method} is an async function: a worker has no event loop, so it must be a plain one")
            return value
        if method in _CALLS_OF_USERS:
            return CALLS[method](self._context.rank, self._context.model, *args)
        setting = self._context.config.worker_extension
        has = f"worker_extension={setting!r} has" if setting else "without a worker_extension there are"
        raise NoSuchMethodError(
            f"there is no method {method!r} to call: {has} {', '.join(sorted({*names, *_CALLS_OF_USERS}))}"
        )

    def _names(self) -> list[str]:
        cls = type(self._object)
        return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]


def extension_class(setting: str | None) -> Callable[[WorkerContext], object] | None:
    """Import what the setting ``worker_extension`` names. Raises ModelLoadError if it is not there, or no class; what
    else an import raises."""
    if setting is None:
        return None
    try:
        cls = resolve_name(setting)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ModelLoadError(f"worker_extension={setting!r} can't be imported in a worker: {error}") from error
    if not isinstance(cls, type):
        raise ModelLoadError(
            f"worker_extension={setting!r} is no class: it must be one of (context), see "
            "https://github.com/aengine/aengine/blob/main/docs/extending.md#calls-of-your-own"
        )
    return cls


def _loaded(model: LoadedModel | None) -> LoadedModel:
    if model is None:
        raise ValueError("a call came before LOAD")
    return model


def _or_refused(call: Callable[..., str], *args: Any) -> dict[str, str]:
    """Return ``{"path": ...}``, or ``{"refused": ...}`` where the caller asked for what can't be."""
    try:
        return {"path": call(*args)}
    except InvalidRequestError as error:
        return {"refused": str(error)}
