"""Prompts beside decodes: a real worker says which steps it runs as one launch, and how long each took."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from paced_runner import STEP_SECONDS, STEP_SIZES
from test_leases import PacedLLM, expected, params, steps_of

from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import Kind, ModelRunnerOutput, SchedulerOutput
from aengine.workers.host.answers import PendingAnswers


@pytest.mark.slow
async def test_a_prompt_beside_streams_takes_steps_of_the_workers_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[int]] = []
    seconds: dict[int, float] = {}
    schedule = Scheduler.schedule

    def noted(self: Scheduler, *, can_be_undone: bool = False) -> SchedulerOutput | None:
        out = schedule(self, can_be_undone=can_be_undone)
        if out is not None and any(count > 1 for count in out.num_scheduled_tokens):
            steps.append(list(out.num_scheduled_tokens))
            seconds[out.step_id] = 1e-4 * min(size for size in STEP_SIZES if size >= sum(steps[-1]))
        return out

    take = PendingAnswers.take

    def timed(self: PendingAnswers, rank: int, kind: Kind, step_id: int, message: Any) -> None:
        if isinstance(message, ModelRunnerOutput):
            message.seconds = seconds.get(message.step_id, 0.0)  # not those that it took on this machine
        take(self, rank, kind, step_id, message)

    monkeypatch.setattr(Scheduler, "schedule", noted)
    monkeypatch.setattr(PendingAnswers, "take", timed)
    async with PacedLLM("smollm2-135m", skip_tokenizer=True, preload_grammars=False, max_step_seconds=60.0) as engine:
        readers = [asyncio.create_task(engine.generate([5 + i] * 8, params(1000))) for i in range(4)]
        while steps_of(engine).scheduler.num_running < 4 or steps_of(engine).scheduler.rows.catching_up:
            await asyncio.sleep(STEP_SECONDS)
        steps.clear()
        completion = await engine.generate([9] * 150, params(4))
        assert completion.token_ids == expected([9] * 150, 4)
        assert [sum(step) for step in steps] == [STEP_SIZES[-1]] * 2 + [150 - 2 * 60 + 4]
        assert steps_of(engine)._step_time.expected(STEP_SIZES[-1]) == pytest.approx(1e-4 * STEP_SIZES[-1])
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
