"""What several tests of the public contract ask."""

from __future__ import annotations

import asyncio

from aengine import AsyncLLM


async def settled(engine: AsyncLLM) -> None:
    """Wait until no request is left; then nothing of any may be: no block, no row, no call."""
    core = engine._handle.core
    assert core is not None
    for _ in range(2000):
        statistics = engine.statistics()
        if not statistics.num_running and not statistics.num_waiting:
            if statistics.num_free_blocks == statistics.num_blocks:
                break
        await asyncio.sleep(0.001)
    assert statistics.num_free_blocks == statistics.num_blocks, statistics
    assert statistics.num_running == statistics.num_waiting == 0
    assert core.admission.is_empty
    core.steps.scheduler.check()
