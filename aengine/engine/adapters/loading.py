"""Brings an adapter into a slot of workers, without keeping their steps waiting.

Each call begins the load or goes on with it: a thread of each worker reads the files, and copies them beside its steps.
The reply comes when that is done, or says after a while that it goes on.
"""

from __future__ import annotations

import asyncio

from ...errors import EngineOverloadedError, InvalidRequestError
from ...limits.values import shown
from .adapters import Workers
from .slots import Lora

_PERIOD = 0.005  # seconds between a reply and the next call
_MOST_SECONDS = 120.0  # seconds that a load may take; files may lie in a network
_CALL_SECONDS = 60.0  # seconds that a call may take, which waits for the steps before it


async def load_into(workers: Workers, slot: int, lora: Lora) -> None:
    """Load an adapter into a slot of all of a replica's workers.

    Raises InvalidRequestError: it is none for this model, or can't be read any more. EngineOverloadedError: they don't
    answer. EngineError: they failed.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + _MOST_SECONDS
    while True:
        try:
            states = await workers.call("load_lora", slot, lora.files.path, timeout=_CALL_SECONDS)
        except TimeoutError:
            late = f"the adapter {shown(lora.name)} was not loaded: no answer of the workers in {_CALL_SECONDS:g} s"
            raise EngineOverloadedError(f"{late}; one that hangs is replaced: try again", retry_after=1.0) from None
        for state in states:
            if state.startswith("refused: "):
                # Whose request it is may not know where the adapter lies.
                why = state.removeprefix("refused: ").replace(lora.files.path, "its folder")
                raise InvalidRequestError(f"lora {shown(lora.name)}: {why}", param="lora")
        if all(state == "ready" for state in states):
            return
        if loop.time() > end:
            raise InvalidRequestError(
                f"lora {shown(lora.name)}: its files were not read within {_MOST_SECONDS:g} s: pin_lora "
                f"loads it ahead, and a copy on a disk of this machine is read in less",
                param="lora",
            )
        await asyncio.sleep(_PERIOD)
