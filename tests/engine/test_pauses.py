"""Requests with slow grammars: left out of the steps until their next row has been filled."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

from fakes import FakeExecutor

from aengine.engine.pacing.peers import NoPeers
from aengine.engine.pacing.step_time import StepTime
from aengine.engine.pacing.steps_in_flight import StepsInFlight
from aengine.engine.scheduler.request import Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.speculation.drafts import Speculation
from aengine.engine.step_loop import StepLoop
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, int32
from aengine.params import SamplingParams
from aengine.telemetry.metrics import Counters
from aengine.telemetry.observer import Observer


async def test_a_row_that_was_begun_before_a_preemption_resumes_no_later_pause() -> None:
    rows: list[asyncio.Future[Any]] = []

    def fill_ahead(grammar: Any, is_wanted: Any) -> asyncio.Future[Any]:
        rows.append(asyncio.get_running_loop().create_future())
        return rows[-1]

    grammars: Any = SimpleNamespace(bitmasks=SimpleNamespace(fill_ahead=fill_ahead))
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
    scheduler = Scheduler(num_blocks=16, kv_groups=[KVCacheGroup("full", 4)], **limits)
    steps = StepLoop(
        scheduler,
        FakeExecutor(),
        asyncio.Event(),
        in_flight=StepsInFlight(2),
        step_time=StepTime(math.inf),
        counters=Counters(),
        observer=Observer(),
        on_begun=lambda request_id: None,
        speculation=Speculation(),
        peers=NoPeers(),
        grammars=grammars,
    )
    grammar: Any = SimpleNamespace(is_slow=False, ahead=None)
    request = Request(
        "r", [1, 2, 3], SamplingParams(), seed=0, max_num_tokens=20, stop_token_ids=frozenset(), grammar=grammar
    )
    scheduler.add_request(request)

    def step_and_pause() -> None:
        out = scheduler.schedule()
        assert out is not None
        scheduler.pause(request)
        scheduler.update(ModelRunnerOutput(out.step_id, int32([5])))
        assert request.is_paused and request.status is RequestStatus.CATCHING_UP

    step_and_pause()
    steps._fill_ahead(request)
    scheduler.preempt_all()  # the worker died
    assert not request.is_paused
    step_and_pause()
    steps._fill_ahead(request)
    rows[0].set_result(None)
    await asyncio.sleep(0)
    assert request.is_paused, "resumed by the row of a pause that is over"
    rows[1].set_result(None)
    await asyncio.sleep(0)
    assert not request.is_paused
