"""benchmarks/traffic.py: its client is on time, its figures are right, its engines are the command line's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import traffic  # noqa: E402
import traffic_workloads  # noqa: E402
from traffic_client import Client, RequestRecord, failures, series, summary  # noqa: E402
from traffic_report import table, value  # noqa: E402


class FakeEngine:
    """Answers each request with its tokens at once, when ``num_wanted`` of them have come."""

    def __init__(self, num_wanted: int = 1, fails: bool = False) -> None:
        self.prompts: list[list[int]] = []
        self.sampling: list[Any] = []
        self.num_open = 0
        self._num_wanted, self._fails = num_wanted, fails
        self._all_here = asyncio.Event()

    async def stream(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[int]:
        self.prompts.append(prompt)
        self.sampling.append(p["sampling"])
        if self._fails:
            raise ConnectionError("no engine")
        if len(self.prompts) == self._num_wanted:
            self._all_here.set()
        self.num_open += 1
        try:
            await self._all_here.wait()
            for _ in range(p["max_tokens"]):
                yield 1
                await asyncio.sleep(0)
        finally:
            self.num_open -= 1

    async def stream_ids(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[list[int]]:
        async for _ in self.stream(prompt, p, request_id):
            yield [7]


def run_of(adapter: Any, name: str, round_number: int = 0) -> tuple[traffic_workloads.Run, dict[str, Any]]:
    results: dict[str, Any] = {}
    return traffic_workloads.Run(Client(adapter), name, 3, round_number, results.__setitem__), results


def record(due: float, times: list[float], sizes: list[int] | None = None, error: str | None = None) -> RequestRecord:
    return RequestRecord(due, due + 0.002, 10, times, sizes or [1] * len(times), error=error)


async def test_arrivals_do_not_wait_for_answers() -> None:
    plan = [(i * 0.001, [i] * 3, 4) for i in range(20)]
    records = await Client(FakeEngine(num_wanted=20)).open_loop(plan)
    assert [r.num_tokens for r in records] == [4] * 20 and not failures(records)
    assert all(r.sent >= r.due for r in records)
    assert [round(r.due - records[0].due, 6) for r in records] == [round(i * 0.001, 6) for i in range(20)]


async def test_errors_and_missing_tokens_are_failures() -> None:
    records = await Client(FakeEngine(fails=True)).at_once([([1], 5)] * 3)
    assert failures(records) == {"ConnectionError: no engine": 3}
    result = summary(records, 0.0, 1.0)
    assert result["requests"] == 3 and result["good_share"] == 0 and result["first_token_ms"] is None

    class Short(FakeEngine):
        async def stream(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[int]:
            yield 2

    assert failures(await Client(Short()).at_once([([1], 5)])) == {"2 of 5 tokens": 1}


async def test_steady_streams_end_with_their_block() -> None:
    engine = FakeEngine(num_wanted=3)
    async with Client(engine).steady([[1], [2], [3]], 10**6) as steady:
        assert len(steady) == 3 and all(r.num_tokens >= 10 for r in steady)
        assert engine.num_open == 3
    assert engine.num_open == 0 and not failures(steady)


def test_figures_of_known_times() -> None:
    smooth = record(1.0, [1.1, 1.11, 1.12])
    late = record(1.0, [1.3, 1.31])
    stalls = record(1.0, [1.1, 1.101, 1.102, 1.15], [1, 1, 1, 8])  # 50 ms over 11 tokens, 48 of them at once
    failed = record(1.0, [1.1], error="it broke")
    result = summary([smooth, late, stalls, failed], 1.0, 3.0)
    assert result["requests"] == 4 and result["failures"] == {"it broke": 1}
    assert result["output_tokens"] == 16 and result["tokens_per_s"] == 8.0
    assert result["first_token_ms"]["p50"] == pytest.approx(100) and result["first_token_ms"]["max"] == pytest.approx(
        300
    )
    assert result["between_tokens_ms"]["max"] == pytest.approx(48)
    assert result["good_share"] == 0.5 and result["good_share_by_every_gap"] == 0.25
    assert result["client_late_ms"]["p50"] == pytest.approx(2)
    assert sorted(gap for _, gap in stalls.gaps())[:7] == [0.0] * 7
    assert [round(gap) for _, gap in smooth.gaps(since=1.115)] == [10]  # what overlaps counts whole
    assert [round(gap) for _, gap in smooth.gaps(until=1.105)] == [10]
    over_time = series([smooth, failed], 1.0)
    assert len(over_time["requests_over_time"]["rows"]) == 2
    assert [row[0] for row in over_time["gaps_over_time"]["rows"]] == [0.1]


async def test_lengths_are_the_seeds_and_ids_are_fresh() -> None:
    sizes = {"rate": 300.0, "seconds": 0.1, "output_mean": 4, "most_output": 8}
    engines = [FakeEngine() for _ in range(3)]
    for engine, round_number in zip(engines, (0, 0, 1)):
        run, results = run_of(engine, "poisson", round_number)
        await traffic_workloads.arrivals(run, **sizes)
        assert results["poisson"]["requests"] == len(engine.prompts) > 5 and not results["poisson"]["failures"]
    lengths = [[len(prompt) for prompt in engine.prompts] for engine in engines]
    assert lengths[0] == lengths[1] == lengths[2]
    assert engines[0].prompts == engines[1].prompts
    assert all(a[:4] != b[:4] for a, b in zip(engines[0].prompts, engines[2].prompts))


def test_arrivals_have_the_rate_and_the_mean_lengths() -> None:
    run, _ = run_of(FakeEngine.__new__(FakeEngine), "poisson")
    lengths = [run.lognormal(250, 0.8, 1, 10**6) for _ in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(250, rel=0.05)


async def test_an_agents_context_grows_by_its_answers() -> None:
    engine = FakeEngine()
    run, results = run_of(engine, "agents")
    await traffic_workloads.agents(
        run, agents=1, turns=3, first_prompt=10, answer_tokens=2, tool_tokens=5, think_seconds=0.001
    )
    assert [len(prompt) for prompt in engine.prompts] == [10, 17, 24]
    assert engine.prompts[2][:10] == engine.prompts[0] and engine.prompts[2][10:12] == [7, 7]
    assert results["agents"]["requests"] == 3


async def test_the_other_workloads_report() -> None:
    engine = FakeEngine()
    for name, sizes in {
        "prompts_beside_decodes": {"streams": 2, "stream_tokens": 10**6, "prompts": 2, "quiet": 0.01, "interval": 0.01},
        "shared_prefix": {"requests": 3, "prefix_tokens": 20, "own_tokens": 4, "output_tokens": 5},
        "skewed_lengths": {"short": 3, "long": 1, "long_tokens": 50, "output_tokens": 5},
        "rare_parameters": {"streams": 2, "stream_tokens": 10**6, "quiet": 0.01},
        "blocked_loop": {"streams": 2, "output_tokens": 40, "held": 0.001, "free": 0.001},
        "blocked_arrivals": {"streams": 2, "stream_tokens": 10**6, "requests": 2, "pause": 0.001, "held": 0.001},
    }.items():
        run, results = run_of(engine, name)
        await traffic_workloads.WORKLOADS[name](run, **sizes)
        assert results and all(not result["failures"] for result in results.values()), results
        assert all(result["host_cpu_s"] >= 0 for result in results.values())
    assert engine.num_open == 0
    assert engine.sampling.count(traffic_workloads.RARE) == 2


def test_settings_belong_to_the_engine_before_them() -> None:
    args = traffic.arguments(
        "--set a=1 --engine x_adapter:X --engine x_adapter:X --set b=2 --path /old --engine y:Y --name peer".split()
    )
    first, second, third = args.engines
    assert (first.adapter, first.settings, first.path) == ("x_adapter:X", ["a=1"], "")
    assert (second.settings, second.path, second.label()) == (["a=1", "b=2"], "/old", "x a=1 b=2")
    assert (third.settings, third.label()) == (["a=1"], "peer")
    assert traffic.arguments([]).engines[0].label() == "aengine"
    assert traffic.arguments(["--small"]).engines[0].adapter == "paced_adapter:Adapter"


def test_what_is_run() -> None:
    names = [(name, sizes.get("rate")) for name, sizes in traffic.plan(traffic.arguments([]))]
    assert names[:4] == [("rare_parameters", None), ("poisson", 20.0), ("poisson", 60.0), ("bursty", 20.0)]
    assert {name for name, _ in names} == set(traffic_workloads.WORKLOADS) - {"blocked_arrivals"}
    some = "--workloads poisson,agents --rates 5 10 --size agents.turns=2 --size poisson.seconds=1".split()
    assert traffic.plan(traffic.arguments(some)) == [
        ("poisson", {"rate": 5.0, "seconds": 1}),
        ("poisson", {"rate": 10.0, "seconds": 1}),
        ("agents", {"turns": 2}),
    ]
    for wrong in (["--workloads", "nothing"], ["--size", "agents.nothing=1"]):
        with pytest.raises(SystemExit):
            traffic.arguments(wrong)


def lines() -> list[dict[str, Any]]:
    smooth = [record(i / 10, [i / 10 + 0.1, i / 10 + 0.11]) for i in range(20)]
    result = summary(smooth, 0.0, 2.0) | series(smooth, 0.0)
    found: list[dict[str, Any]] = [{"kind": "calibration", "device": "cpu", "copy_gb_s": 10.0, "call": "now"}]
    for engine in ("one", "two"):
        base = {"kind": "result", "engine": engine, "model": "tiny", "call": "now", "limits_ms": [200.0, 20.0]}
        found += [base | {"workload": "poisson", "params": {"rate": rate}} | result for rate in (20.0, 60.0)]
        found.append(base | {"workload": "blocked_loop", "params": {}, "tokens_per_s": [9.0], "ratio": 0.97})
        found.append(base | {"workload": "agents", "params": {}, "error": "TimeoutError: "})
    return [json.loads(json.dumps(line)) for line in found]


def test_the_table_has_a_row_for_each_engine() -> None:
    text = table(lines())
    assert text.count("poisson 20/s") == text.count("poisson 60/s") == text.count("blocked_loop") == 2
    assert "blocked to undisturbed 0.970" in text and "agents" not in text
    assert value({"failures": {"a": 1, "b": 2}}, ("failures",)) == 3
    assert value({"tokens_per_s": [1.0, 3.0, 2.0]}, ("tokens_per_s",)) == 2.0
    assert value({}, ("first_token_ms", "p50")) is None


def test_a_picture_of_earlier_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from traffic_plot import plot

    plot(lines(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no results"):
        plot([], tmp_path / "none.png")


async def test_one_engine_from_start_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child does: a line of its start, a line a result, an error of one workload is no end of the others."""
    stopped: list[list[str]] = []

    class Adapter(FakeEngine):
        OWN_THREAD = ("own_thread=true",)

        async def start(self, model: str, args: SimpleNamespace) -> None:
            self._settings = args.set

        def describe(self) -> dict[str, Any]:
            return {"version": 1}

        def statistics(self) -> dict[str, int]:
            return {"prefix_cache_queries": 10 * len(self.prompts), "prefix_cache_hits": 5 * len(self.prompts)}

        async def stop(self) -> None:
            stopped.append(self._settings)

    monkeypatch.setattr(traffic.importlib, "import_module", lambda name: SimpleNamespace(Adapter=Adapter))
    small = {"streams": 2, "output_tokens": 40, "held": 0.001, "free": 0.001}
    monkeypatch.setitem(traffic_workloads.WORKLOADS, "agents", lambda run, **sizes: asyncio.sleep(60))
    workloads = [("agents", {}), ("shared_prefix", {"requests": 2, "prefix_tokens": 8}), ("blocked_loop", small)]
    out = tmp_path / "traffic.jsonl"
    engine = traffic.Engine("fake_adapter:Adapter", ["a=1"])
    await traffic.measure(
        traffic.Spec(engine, "tiny", "", workloads, {"round": 0}, 0, 0, str(out), warm_up=0.0, settle=0.0, limit=0.5)
    )
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in found] == ["start", *["result"] * 4, "start", "result"]
    names = [line["workload"] for line in found if line["kind"] == "result"]
    assert names == ["agents", "shared_prefix_cold", "shared_prefix_warm", "blocked_loop", "blocked_loop_own_thread"]
    assert found[1]["error"].startswith("TimeoutError")
    assert found[2]["engine_counted"]["hit_rate"] == 0.5 and found[2]["params"]["prefix_tokens"] == 8
    assert stopped == [["a=1"], ["a=1", "own_thread=true"]]


@pytest.mark.slow
def test_no_request_waits_behind_steps_that_were_given_before(tmp_path: Path) -> None:
    """Counts, not times: arrivals, long prompts beside decodes, and requests while the host's loop is often blocked.
    At most ``max_in_flight_steps + 1`` steps begin after the engine knew a request and before the one that has it."""
    out = tmp_path / "results"
    short = ["--size", "poisson.seconds=2", "--size", "bursty.seconds=2", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "traffic.py"), "--small", *short]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    found = [json.loads(line) for line in (out / "traffic.jsonl").read_text().splitlines()]
    results = {line["workload"]: line for line in found if line["kind"] == "result"}
    assert set(results) == {"poisson", "bursty", "prompts_beside_decodes", "blocked_arrivals"}, done.stderr
    for result in results.values():
        waited = result["steps_waited"]
        assert waited["requests"] >= 10 and waited["limit"] == 3 and not result["failures"]
        assert waited["max"] <= waited["limit"], (result["workload"], waited)
    assert done.returncode == 0, done.stdout + done.stderr
