"""`WeightCalls`: the calls of an engine whose weights come from a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...limits.values import not_valid

if TYPE_CHECKING:
    from ..core import EngineCore
    from ..pacing.pausing import PauseMode
    from .handle import Handle

_MODES = ("abort", "wait", "keep")


async def pause(core: EngineCore, mode: PauseMode) -> bool:
    """See `WeightCalls.pause`."""
    return await core.pause(mode)


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
