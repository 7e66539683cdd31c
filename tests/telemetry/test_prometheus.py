"""Metrics for Prometheus: in a registry of the caller's, and under /metrics."""

from __future__ import annotations

import asyncio
import builtins
import re
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest_api import core_of
from prometheus_client import CollectorRegistry, Counter, generate_latest, start_http_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse

from aengine import EngineOverloadedError, SamplingParams
from aengine.engine.scheduler.kv_cache_manager import PreemptedKV
from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.remote import connect, serve_engine
from aengine.server import create_app
from aengine.telemetry.prometheus import PrometheusCollector
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
HELLO = [{"role": "user", "content": "Hello"}]
# As vLLM's dashboards ask for them.
VLLM = """
    num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info
    prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
    num_preemptions_total request_success_total admission_rejections_total
    time_to_first_token_seconds_bucket time_to_first_token_seconds_sum time_to_first_token_seconds_count
    inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
    e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
    request_decode_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
""".split()


def samples_of(registry: Any) -> dict[tuple[str, str], float]:
    """(name, labels but the model's) to value, read back from the text format."""
    found = {}
    for family in parse(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found


async def test_the_names_that_dashboards_read() -> None:
    registry = CollectorRegistry()
    async with FakeAsyncLLM("Paris" * 4) as engine:
        registry.register(PrometheusCollector(engine, model_name="m"))
        await engine.generate("x" * 40, SamplingParams(max_tokens=7))
        await engine.chat(HELLO, SamplingParams(n=2))
        engine.stream("y")
        text = generate_latest(registry).decode()
        names = set(re.findall(r"^(\S+?)\{", text, re.MULTILINE))
        assert {f"vllm:{name}" for name in VLLM} <= names
        labels = re.findall(r"\{(.*)\} ", text)
        assert labels and all('model_name="m"' in one and 'engine="0"' in one for one in labels)

        found, statistics = samples_of(registry), engine.statistics()
        assert found["vllm:generation_tokens_total", ""] == statistics.generated_tokens > 0
        assert found["vllm:prompt_tokens_total", ""] == statistics.prompt_tokens
        assert found["vllm:request_success_total", "finished_reason=length"] == 1
        assert found["vllm:request_success_total", "finished_reason=stop"] == 1
        assert found["vllm:time_to_first_token_seconds_count", ""] == 2
        assert found["vllm:time_to_first_token_seconds_bucket", "le=+Inf"] == 2
        assert found["vllm:request_generation_tokens_bucket", "le=5.0"] == 0
        assert found["vllm:request_generation_tokens_bucket", "le=10.0"] == 1
        assert found["vllm:request_generation_tokens_sum", ""] == 7 + 2 * 21
        assert found["vllm:e2e_request_latency_seconds_sum", ""] == statistics.histograms.request_latency.sum
        launched = {kind: found[f"aengine:graph_{kind}_total", "mode=NONE,step=decode"] for kind in ("steps", "tokens")}
        assert 0 < launched["steps"] <= launched["tokens"]
        assert found["aengine:running", ""] == 1 and found["aengine:worker_restarts_total", ""] == 0


async def test_drafts_by_position_and_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    registry = CollectorRegistry()
    async with FakeAsyncLLM("to be or not " * 9, speculation="suffix") as engine:
        registry.register(PrometheusCollector(engine))
        await engine.generate("x", SamplingParams(max_tokens=100))
        found, (drafts,) = samples_of(registry), engine.statistics().drafts
        assert drafts.proposer == "suffix"
        assert found["aengine:drafted_tokens_total", "proposer=suffix"] == drafts.drafted_tokens > 20
        assert found["aengine:accepted_tokens_total", "proposer=suffix"] == drafts.accepted_tokens
        for position, count in enumerate(drafts.accepted_by_position):
            assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", f"position={position}"] == count > 0


async def test_what_changes_while_requests_run() -> None:
    registry = CollectorRegistry()
    limits: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_requests": 1}
    async with FakeAsyncLLM("a" * 900, token_delay=0.001, **limits) as engine:
        registry.register(PrometheusCollector(engine))
        stream = engine.stream("x")
        await anext(stream)
        waiting = engine.stream("y")
        with pytest.raises(EngineOverloadedError):
            engine.stream("z")
        found = samples_of(registry)
        assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 1
        assert 0 < found["vllm:kv_cache_usage_perc", ""] < 1 and found["vllm:admission_rejections_total", ""] == 1
        await stream.aclose()
        await waiting.aclose()
        assert samples_of(registry)["vllm:request_success_total", "finished_reason=abort"] == 2
    async with FakeAsyncLLM(Reply("cut", num_deaths=1)) as engine:
        registry = CollectorRegistry()
        registry.register(PrometheusCollector(engine))
        await engine.generate("x")
        assert samples_of(registry)["aengine:worker_restarts_total", ""] == 1


class ThreePages(PreemptedKV):
    num_kept = 3


async def test_what_lies_in_the_memory_of_the_host() -> None:
    registry = CollectorRegistry()
    async with FakeAsyncLLM("Paris") as engine:
        registry.register(PrometheusCollector(engine))
        assert samples_of(registry)["aengine:swapped_kv_blocks", ""] == engine.statistics().swapped_bytes == 0
        (replica,) = core_of(engine).replicas
        replica.scheduler.rows.preempted = ThreePages()
        replica.worker.ready["kv_cache_bytes"] = 40 * replica.scheduler.num_blocks
        found, statistics = samples_of(registry), engine.statistics()
        assert found["aengine:swapped_kv_blocks", ""] == statistics.num_swapped_blocks == 3
        assert found["aengine:swapped_kv_bytes", ""] == statistics.swapped_bytes == 120


async def test_an_engine_that_does_not_run() -> None:
    """It is registered before the start, stays over the end, and only says that it does not run."""
    registry = CollectorRegistry()
    engine = FakeAsyncLLM("Paris")
    registry.register(PrometheusCollector(engine))
    assert samples_of(registry) == {("aengine:running", ""): 0}
    async with engine:
        await engine.generate("x")
        assert samples_of(registry)["aengine:running", ""] == 1
    assert samples_of(registry) == {("aengine:running", ""): 0}


async def test_several_engines_in_one_registry() -> None:
    registry = CollectorRegistry()
    async with FakeAsyncLLM("Paris") as first, FakeAsyncLLM("Rome") as second, FakeAsyncLLM("Oslo") as third:
        collector = PrometheusCollector(first, model_name="a")
        registry.register(collector)
        collector.add(second, model_name="b")
        collector.add(third, model_name="a")
        await second.generate("x")
        text = generate_latest(registry).decode()
        running = re.findall(r'vllm:generation_tokens_total\{engine="(.)",model_name="(.)"\} (\S+)', text)
        assert running == [("0", "a", "0.0"), ("0", "b", "5.0"), ("1", "a", "0.0")]
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(PrometheusCollector(third))


@pytest.mark.parametrize("own_thread", [False, True])
async def test_scrapes_of_another_thread_while_requests_come_and_go(own_thread: bool) -> None:
    """As `prometheus_client.start_http_server` makes them, which many programs have already."""
    registry = CollectorRegistry()
    async with FakeAsyncLLM("ab", own_thread=own_thread) as engine:
        registry.register(PrometheusCollector(engine))
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        errors: list[BaseException] = []
        enough = threading.Event()

        def scrape() -> None:
            try:
                while not enough.is_set():
                    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
                        assert b"vllm:num_requests_running" in answer.read()
            except BaseException as error:
                errors.append(error)

        scraper = threading.Thread(target=scrape)
        scraper.start()
        try:
            for _ in range(20):
                await asyncio.gather(*(engine.generate("x") for _ in range(20)))
        finally:
            enough.set()
            await asyncio.to_thread(scraper.join)
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()
        assert not errors


def test_a_blocking_engine() -> None:
    with FakeLLM("Paris") as llm:
        registry = CollectorRegistry()
        registry.register(PrometheusCollector(llm.as_async(), model_name="m"))
        llm.generate(["x", "y"])
        assert samples_of(registry)["vllm:request_success_total", "finished_reason=stop"] == 2


# -- /metrics


def client_of(engine: Any, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(engine, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://here")


async def test_the_route_in_both_formats(no_blocking: None) -> None:
    async with FakeAsyncLLM("Paris") as engine, client_of(engine, model_names="paris-1") as client:
        await engine.generate("x")
        plain = await client.get("/metrics")
        assert plain.status_code == 200 and plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        by_name = {family.name: family for family in parse(plain.text)}
        assert by_name["vllm:generation_tokens"].samples[0].labels == {"model_name": "paris-1", "engine": "0"}
        opened = await client.get("/metrics", headers={"accept": OPEN_METRICS})
        assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert opened.text.endswith("# EOF\n") and opened.text.count("# EOF") == 1
        families = {family.name: family for family in parse_open_metrics(opened.text)}
        assert families.keys() >= {"vllm:time_to_first_token_seconds", "vllm:request_success", "aengine:running"}


async def test_the_route_shows_the_callers_registry() -> None:
    registry = CollectorRegistry()
    Counter("orders", "Orders of the application.", registry=registry).inc(3)
    async with FakeAsyncLLM("Paris") as engine:
        registry.register(PrometheusCollector(engine))
        async with client_of(engine, metrics_registry=registry) as client:
            text = (await client.get("/metrics")).text
    assert "orders_total 3.0" in text and "vllm:num_requests_running" in text


async def test_the_route_of_an_application_whose_engine_is_in_another_process(tmp_path: Path) -> None:
    async with FakeAsyncLLM("Paris") as engine:
        await engine.generate("x")
        async with serve_engine(engine, tmp_path / "engine"), connect(tmp_path / "engine") as remote:
            async with client_of(remote, model_names="m") as client:
                text = (await client.get("/metrics")).text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0' in text


async def test_the_route_asks_for_the_key() -> None:
    async with FakeAsyncLLM("Paris") as engine, client_of(engine, api_keys="secret") as client:
        assert (await client.get("/metrics")).status_code == 401
        answer = await client.get("/metrics", headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


async def test_others_have_their_turn_during_a_scrape() -> None:
    async with FakeAsyncLLM("Paris") as engine, client_of(engine) as client:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        begun = turns
        await client.get("/metrics")
        task.cancel()
        assert turns - begun >= 25, "one for each metric"


async def test_without_the_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "aengine.telemetry.prometheus")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install prometheus-client"):
        import aengine.telemetry.prometheus  # noqa: F401
    async with FakeAsyncLLM("Paris") as engine:
        async with client_of(engine) as client:
            answer = await client.get("/metrics")
    assert answer.status_code == 501
    assert "pip install prometheus-client" in answer.json()["error"]["message"]


def test_all_of_vllms_names_are_in_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text()
    missing = [
        name for name in VLLM if name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") not in page
    ]
    assert not missing
