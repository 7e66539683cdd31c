"""The queue of an engine: who is inside, who is held, who is let in next."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from aengine.engine.admission_queue import AdmissionQueue
from aengine.engine.tenants.accounts import Counts, Payer
from aengine.errors import EngineOverloadedError
from aengine.limits.tenants import Tenant
from aengine.telemetry.metrics import Counters

ALL = Payer("", Tenant(), Counts(), time.monotonic)


def line_of(limit: int, *, wait: bool = True) -> tuple[AdmissionQueue, Counters]:
    counters = Counters()
    return AdmissionQueue(limit, counters, wait_when_full=wait), counters


async def test_the_most_urgent_is_let_in_first_and_of_equals_the_first_that_came() -> None:
    line, _ = line_of(1)
    assert line.join("runs", 0, ALL, 0) is None
    turns = {
        name: line.join(name, priority, ALL, 0) for name, priority in (("b", 1), ("a", 0), ("c", 1), ("urgent", -1))
    }
    assert len(line) == 5
    let_in = []
    for _ in turns:
        line.leave("runs" if not let_in else let_in[-1])
        (name,) = (name for name, turn in turns.items() if turn.done() and name not in let_in)
        let_in.append(name)
    assert let_in == ["urgent", "a", "b", "c"]
    line.leave("c")
    assert len(line) == 0


async def test_a_place_is_left_once_by_whoever_has_it() -> None:
    line, _ = line_of(2)
    for name in "ab":
        assert line.join(name, 0, ALL, 0) is None
    held = line.join("c", 0, ALL, 0)
    line.leave("d")
    line.leave("c")
    line.leave("c")
    assert held is not None and not held.done() and len(line) == 2
    line.leave("a")
    line.leave("a")
    assert len(line) == 1 and not held.done()
    assert line.join("e", 0, ALL, 0) is None


async def test_a_full_queue_refuses_or_holds() -> None:
    line, counters = line_of(2, wait=False)
    line.join("a", 0, ALL, 0)
    line.check_room(ALL)
    with pytest.raises(EngineOverloadedError, match="1 requests are waiting") as caught:
        line.check_room(ALL, 1)
    assert caught.value.retry_after == 1.0 and counters.num_rejected == 1
    waits, counters = line_of(1)
    waits.join("a", 0, ALL, 0)
    waits.check_room(ALL, 5)
    assert counters.num_rejected == 0


async def test_the_length_is_the_number_of_those_who_came_and_have_not_left(rng: random.Random) -> None:
    line, _ = line_of(3)
    inside: set[str] = set()
    turns: dict[str, asyncio.Future[None]] = {}
    for i in range(500):
        if rng.random() < 0.55:
            turn = line.join(str(i), rng.randrange(3), ALL, 0)
            if turn is None:
                inside.add(str(i))
            else:
                turns[str(i)] = turn
        elif inside or turns:
            name = rng.choice(sorted(inside | turns.keys()))
            inside.discard(name)
            turns.pop(name, None)
            line.leave(name)
        inside |= {name for name, turn in turns.items() if turn.done()}
        turns = {name: turn for name, turn in turns.items() if not turn.done()}
        assert len(line) == len(inside) + len(turns)
        assert len(inside) == min(3, len(line))
