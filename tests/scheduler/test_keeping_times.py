"""For how long the KV of sessions is kept: by the loop's clock, which is set here by hand, and by one timer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from scheduler_harness import Driver

from aengine.engine.keeping.keeping import Keeping
from aengine.engine.keeping.kept_blocks import ANYBODY
from aengine.params import CallOptions


class Loop:
    """An event loop's clock and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[SimpleNamespace] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, do: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(time=when, do=do)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def run_until(self, time: float) -> None:
        while self.timers and self.timers[0].time <= time:
            assert len(self.timers) == 1
            timer = self.timers.pop()
            self.now = max(self.now, timer.time)
            timer.do()
        self.now = time


class House:
    """A scheduler, and what keeps the KV of its requests."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.loop = Loop()
        limits = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        self.drivers = [Driver(kept_fraction=1.0, **limits) for _ in range(num_replicas)]
        self.keeping = Keeping(self.loop, self.drivers)  # type: ignore[arg-type]

    def begin(self, number: int, replica: int = 0, **options: Any) -> Callable[[], None]:
        """Begin a request with 41 tokens of its own. Returns what ends it."""
        turn = self.keeping.begin(CallOptions(**options), f"request-{number}")
        driver = self.drivers[replica]
        made = driver.add([number + 1] * 41, max_tokens=1)

        def end() -> None:
            driver.drain()
            turn(SimpleNamespace(requests=made, replica=driver, account=ANYBODY))  # type: ignore[arg-type]

        return end

    @property
    def kept(self) -> list[int]:
        return [driver.kept.num_kept for driver in self.drivers]


def test_each_session_ends_at_its_time_by_one_timer() -> None:
    house = House()
    for number, seconds in enumerate((5.0, 2.0, 9.0)):
        house.begin(number, session_id=str(number), keep=seconds)()
    assert house.kept == [30] and len(house.loop.timers) == 1
    house.loop.run_until(1.9)
    assert house.kept == [30]
    house.loop.run_until(2.1)
    assert house.kept == [20]
    assert house.keeping.keep("0", 20.0) and house.keeping.keep("2", 0.5)
    house.loop.run_until(2.7)
    assert house.kept == [10]
    house.loop.run_until(22.0)
    assert house.kept == [10]
    house.loop.run_until(22.2)
    assert house.kept == [0] and not house.loop.timers


def test_turns_that_are_hardly_kept_put_nothing_off() -> None:
    house = House()
    for number in range(8):
        house.begin(number, session_id=str(number), keep=0.01)()
        house.loop.run_until(house.loop.now + 0.1)
    assert house.kept[0] <= 30


def test_what_is_kept_waits_for_the_turn_under_way() -> None:
    house = House()
    house.begin(0, session_id="a", keep=1.0)()
    end = house.begin(0, session_id="a", keep=1.0)
    assert house.keeping.keep("a", 0.5)
    house.loop.run_until(100.0)
    assert house.kept == [10]
    end()
    house.loop.run_until(100.9)
    assert house.kept == [10]
    house.loop.run_until(101.1)
    assert house.kept == [0]


def test_a_turn_that_never_had_tokens_lets_the_one_before_be() -> None:
    house = House()
    house.begin(0, session_id="a", keep=1.0)()
    turn = house.keeping.begin(CallOptions(session_id="a", keep=3.0), "b")
    turn(SimpleNamespace(requests=[], replica=None))  # type: ignore[arg-type]
    house.loop.run_until(2.9)
    assert house.kept == [10]
    house.loop.run_until(3.1)
    assert house.kept == [0]


def test_a_turn_on_another_replica_replaces_what_the_first_one_kept() -> None:
    house = House(2)
    house.begin(0, 0, session_id="a", keep=5.0)()
    assert house.kept == [10, 0]
    house.begin(0, 1, session_id="a", keep=5.0)()
    assert house.kept == [0, 10]
    assert house.keeping.keep("a", 0) and house.kept == [0, 0] and not house.keeping.keep("a", 0)


def test_a_closed_engine_has_no_timer() -> None:
    house = House()
    house.begin(0, session_id="a", keep=5.0)()
    house.keeping.close()
    assert not house.loop.timers
