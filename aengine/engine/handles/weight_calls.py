"""`WeightCalls`: the calls of an engine whose weights come from a trainer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...limits.values import is_unicode, not_valid
from ..threads.pools import run_in_thread
from .calls import positive_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..core import EngineCore
    from ..pacing.holds import PauseMode
    from ..updates.sources import IpcTensors, TrainerGroup
    from .handle import Handle

_MODES = ("abort", "wait", "keep")
_MOST_VERSION = 256  # characters of a version's name


async def pause(core: EngineCore, mode: PauseMode) -> bool:
    """See `WeightCalls.pause`."""
    return await core.pause(mode)


async def start_weight_update(core: EngineCore, mode: PauseMode) -> None:
    """See `WeightCalls.start_weight_update`."""
    await core.weights.start(mode)


async def update_weights(core: EngineCore, source: Any, allow_nan: bool, timeout: float) -> None:
    """See `WeightCalls.update_weights`."""
    if isinstance(source, str):
        source = await run_in_thread("abspath", os.path.abspath, source)  # the worker's own directory may differ
    await core.weights.update(source, allow_nan, timeout)


async def finish_weight_update(core: EngineCore, version: str | None, is_partial: bool, clear_cache: bool) -> str:
    """See `WeightCalls.finish_weight_update`."""
    return await core.weights.finish(version, is_partial, clear_cache)


async def abort_weight_update(core: EngineCore) -> None:
    """See `WeightCalls.abort_weight_update`."""
    await core.weights.abort()


async def weights_checksum(core: EngineCore) -> dict[str, str]:
    """See `WeightCalls.weights_checksum`."""
    return {"version": core.weights.versions.current, "checksum": core.weights.checksum}


class WeightCalls:
    """Calls about the weights of an engine held by a handle, and about pauses."""

    _handle: Handle

    async def pause(self, mode: PauseMode = "abort") -> bool:
        """Let the workers compute nothing until `resume`. Requests that come meanwhile wait; their deadlines run on.

        Args:
            mode: what becomes of the requests so far. "abort": they end with FinishReason.ABORT. "wait": they are
                computed to their ends, which is waited for. "keep": they stand still, and go on after `resume`.

        Returns whether the engine is paused, with no step under way; False: `resume` or `drain` was called meanwhile,
        which end a pause. ``state`` is "paused" from the call on. A call that is cancelled has paused nothing.

        Raises:
            InvalidRequestError: there is no such mode.
            EngineClosedError: the engine is not running, drains, or ended meanwhile.
        """
        if mode not in _MODES:
            raise not_valid("mode", mode, 'one of "abort", "wait" and "keep"')
        return await self._handle.run(pause, mode)

    async def start_weight_update(self, mode: PauseMode = "keep") -> None:
        """Begin to replace the weights: pause the engine by this ``mode``, unless it is paused. Requests that come
        meanwhile wait, and with "keep" those that run stand still.

        Raises:
            InvalidRequestError: there is no such mode, or an update is under way.
            WorkerDiedError: a worker is being started again.
            EngineClosedError: the engine is not running, or drains.
        """
        if mode not in _MODES:
            raise not_valid("mode", mode, 'one of "abort", "wait" and "keep"')
        await self._handle.run(start_weight_update, mode)

    async def update_weights(
        self,
        source: Mapping[str, Any] | Iterable[tuple[str, Any]] | str | os.PathLike[str] | IpcTensors | TrainerGroup,
        allow_nan: bool = False,
        timeout: float = 300.0,
    ) -> None:
        """Replace weights, in the memory and the format that the workers have; any number of calls is one update.

        Args:
            source: names, as in the model's checkpoint, and tensors of torch or arrays of numpy: a mapping, or an
                iterable, which a thread reads. Or the folder of a checkpoint, all of it, where the workers find it. Or
                `IpcTensors`, or a `TrainerGroup`. Each tensor comes once, whole; what is quantised when it is loaded
                is quantised.
            allow_nan: whether numbers may be NaN or infinite. Those of a folder are not looked at.
            timeout: seconds that each piece may take.

        Raises:
            InvalidRequestError: a tensor is not of this model, has another shape or a dtype that is no number, came
                before, or is not whole; the folder is of no such model; no update is under way. The engine stays
                paused, and the update can be aborted.
            WorkerDiedError: a worker has died, and with it the update: the weights are those from before it.
        """
        if isinstance(source, str | os.PathLike):
            path = os.fspath(source)
            if not isinstance(path, str) or not path or not is_unicode(path):
                raise not_valid("source", source, "a folder, tensors with their names, IpcTensors or a TrainerGroup")
            source = path
        elif not hasattr(source, "__iter__") and not hasattr(source, "entries") and not hasattr(source, "tensors"):
            raise not_valid("source", source, "a folder, tensors with their names, IpcTensors or a TrainerGroup")
        limit = positive_seconds("timeout", timeout)
        await self._handle.run(update_weights, source, bool(allow_nan), limit)

    async def finish_weight_update(
        self, version: str | int | None = None, is_partial: bool = False, clear_cache: bool = True
    ) -> str:
        """End an update: what it has brought computes from now on, and no cached prefix of before is found. The engine
        goes on, unless `pause` had paused it.

        Args:
            version: a name for these weights, in ``completion.weight_versions``; None: their number.
            is_partial: the tensors that have not come stay as they were. Those that are kept as one weight (q, k, v;
                gate, up) come together.
            clear_cache: compute the tokens of requests that stood still again, with these weights; False: they go on
                with the keys and values of the old ones.

        Returns the version.

        Raises:
            InvalidRequestError: tensors lack, and the update goes on; or none is under way.
            InternalError: ranks have got different tensors.
        """
        if version is not None and (isinstance(version, bool) or not isinstance(version, str | int)):
            raise not_valid("version", version, "a text or a number")
        name = None if version is None else str(version)
        if name is not None and not (0 < len(name) <= _MOST_VERSION and is_unicode(name)):
            raise not_valid("version", version, f"a text of 1 to {_MOST_VERSION} characters")
        return await self._handle.run(finish_weight_update, name, bool(is_partial), bool(clear_cache))

    async def abort_weight_update(self) -> None:
        """End an update with the weights from before it: as they were if nothing had been replaced, else read again
        from their files. The engine goes on, unless `pause` had paused it.

        Raises:
            WeightsLostError: the weights from before it came as tensors: the engine stays paused until all have come
                again.
            InvalidRequestError: no update is under way.
            EngineClosedError: the engine sleeps: wake it first.
        """
        await self._handle.run(abort_weight_update)

    async def weights_checksum(self) -> dict[str, str]:
        """Return the ``version`` of the weights, and the ``checksum`` of the tensors that came with it, which all ranks
        have found equal; "" if they came in files."""
        return await self._handle.run(weights_checksum)
