"""For whom an engine is held up: the state, the door and the steps follow from all holds, in any order of calls."""

from __future__ import annotations

import asyncio
import random
import time

from aengine.engine.admission_queue import AdmissionQueue
from aengine.engine.pacing.holds import DRAIN, PAUSE, Hold, Holds
from aengine.engine.pacing.step_hold import StepHold
from aengine.engine.tenants.accounts import Counts, Payer
from aengine.limits.tenants import Tenant
from aengine.telemetry.metrics import Counters

ALL = Payer("", Tenant(), Counts(), time.monotonic)
SLEEP, UPDATE = Hold("sleep", "asleep"), Hold("update", "paused")


class Requests:
    """As many as are said."""

    number = 0

    def count(self, others: set[str]) -> int:
        return self.number

    def abort_all(self) -> int:
        self.number = 0
        return 0


def holds_of(requests: Requests) -> tuple[Holds, AdmissionQueue, StepHold, list[str]]:
    queue = AdmissionQueue(8, Counters(), wait_when_full=True)
    told: list[str] = []
    steps = StepHold(lambda: True, lambda: told.append("stop"), lambda: told.append("go on"))
    return Holds(queue, requests, [steps]), queue, steps, told


async def test_the_state_follows_from_all_of_them(rng: random.Random) -> None:
    for _ in range(50):
        holds, queue, steps, told = holds_of(Requests())
        begun: dict[Hold, bool] = {}  # whether steps stop for it
        for number in range(20):
            hold = rng.choice([DRAIN, PAUSE, SLEEP, UPDATE])
            call = rng.choice(["begin", "stop", "release"] if hold is not DRAIN else ["begin", "release"])
            getattr(holds, call)(hold)
            if call == "release":
                begun.pop(hold, None)
            else:
                begun[hold] = begun.get(hold, False) or call == "stop"
            wanted = next(
                (state for state in ("draining", "asleep", "paused") if state in {h.state for h in begun}), ""
            )
            assert holds.state == (wanted or "running") and holds.is_alive
            assert steps.is_held == any(begun.values())
            assert all(one in holds for one in begun)
            assert (queue.join(f"{number}", 0, ALL, 0) is not None) == bool(begun.keys() - {DRAIN})
            queue.leave(f"{number}")
        assert told == (["stop", "go on"] * len(told))[: len(told)]
        holds.end = "closed"
        assert holds.state == "closed" and not holds.is_alive


async def test_who_gives_up_a_pause_ends_no_other() -> None:
    requests = Requests()
    requests.number = 1
    holds, _, steps, _ = holds_of(requests)
    first, second = (asyncio.create_task(holds.pause("wait", hold)) for hold in (PAUSE, UPDATE))
    await asyncio.sleep(0)
    assert holds.state == "paused" and not steps.is_held
    first.cancel()
    await asyncio.wait([first])
    assert PAUSE not in holds and UPDATE in holds and holds.state == "paused"
    requests.number = 0
    holds.note_change()
    assert await second and steps.is_held
    holds.release(UPDATE)
    assert holds.state == "running" and not steps.is_held
