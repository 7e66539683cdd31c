"""Collective calls: what the host may ask of all ranks at once, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import InvalidRequestError
from .loaded import LoadedModel
from .rank import Rank

__all__ = ["CALLS"]


def ping(rank: Rank, model: LoadedModel | None) -> dict[str, Any]:
    """Answer: all steps before have been launched."""
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


CALLS: dict[str, Callable[..., Any]] = {
    "ping": ping,
    "memory_info": memory_info,
    "start_profile": start_profile,
    "stop_profile": stop_profile,
}


def _loaded(model: LoadedModel | None) -> LoadedModel:
    if model is None:
        raise ValueError("a call came before LOAD")
    return model


def _or_refused(call: Callable[..., str], *args: Any) -> dict[str, str]:
    """``{"path": ...}``, or ``{"refused": ...}`` where the caller asked for what can't be: no fault of the worker."""
    try:
        return {"path": call(*args)}
    except InvalidRequestError as error:
        return {"refused": str(error)}
