"""What an engine counts and measures of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.outputs import FinishReason, RequestEnd, Timings, Usage
from aengine.telemetry.metrics import GraphStatistics, HistogramCount, HistogramCounts, LoopLag


def test_a_value_on_a_bound_counts_below_it() -> None:
    counts = HistogramCount((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        counts.add(value)
    histogram = counts.snapshot()
    assert histogram.counts == (2, 2, 1) and histogram.cumulative == (2, 4, 5)


def test_the_parts_of_a_requests_time() -> None:
    histograms = HistogramCounts()
    timings = Timings(queued=1.0, prefill=2.0, first_token=3.0, total=8.0, per_token=0.5)
    histograms.add_request(RequestEnd("r", FinishReason.STOP, Usage(7, 11), timings, None, (FinishReason.STOP,)))
    sums = {name: histogram.sum for name, histogram in vars(histograms).items() if histogram.sum}
    assert sums == {
        "request_latency": 8.0,
        "time_to_first_token": 3.0,
        "queue_time": 1.0,
        "prefill_time": 2.0,
        "decode_time": 5.0,
        "time_per_output_token": 0.5,
        "prompt_tokens": 7,
        "generation_tokens": 11,
    }


class FakeLoop:
    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[float], None], float]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[float], None], due: float) -> Any:
        timer = (when, callback, due)
        self.timers.append(timer)
        return SimpleNamespace(cancel=lambda: self.timers.remove(timer))

    def run_late(self, seconds: float) -> None:
        when, callback, due = self.timers.pop()
        self.now = when + seconds
        callback(due)


def test_the_loops_lag_is_that_of_busy_times() -> None:
    loop = FakeLoop()
    lag = LoopLag(loop)  # type: ignore[arg-type]
    assert lag.worst == 0.0 and not loop.timers
    for _ in range(2):  # an idle loop is measured no more, and a busy one again
        lag.resume()
        lag.resume()
        assert len(loop.timers) == 1
        loop.run_late(0.5)
        assert lag.worst == pytest.approx(0.5)
        loop.run_late(0.0)
        assert 0.4 < lag.worst < 0.5  # it fades
        lag.pause()
        assert lag.worst == 0.0 and not loop.timers


def test_how_steps_were_launched_is_summed_over_replicas() -> None:
    first = Counter({(2, False, "num_steps"): 3, (2, False, "num_tokens"): 9, (2, False, "num_paddings"): 3})
    second = Counter({(2, False, "num_steps"): 1, (2, False, "num_tokens"): 4, (0, True, "num_steps"): 1})
    wanted = (GraphStatistics("NONE", True, 1, 0, 0), GraphStatistics("FULL", False, 4, 13, 3))
    assert GraphStatistics.sums([first, second]) == wanted and first[2, False, "num_steps"] == 3
    assert GraphStatistics.sums([Counter()]) == ()
