"""Traces and metrics of OpenTelemetry: `instrument`, and the trace of a client over HTTP."""

from __future__ import annotations

import asyncio
import builtins
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from aengine import (
    DeadlineExceededError,
    EngineError,
    GrammarError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
    WorkerDiedError,
)
from aengine.__main__ import main
from aengine.cli import serve
from aengine.remote import connect, serve_engine
from aengine.server import create_app
from aengine.telemetry import opentelemetry
from aengine.telemetry.opentelemetry import instrument
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply

HELLO = [{"role": "user", "content": "a secret question"}]


class Backend:
    """What an application's providers collect."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meter_provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.tracer = self.tracer_provider.get_tracer("application")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def span(self) -> ReadableSpan:
        (span,) = self.spans
        return span

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        metrics = [m for r in data.resource_metrics for scope in r.scope_metrics for m in scope.metrics]
        return {metric.name: list(metric.data.data_points) for metric in metrics}

    def instrument(self, engine: Any) -> Any:
        return instrument(engine, tracer_provider=self.tracer_provider, meter_provider=self.meter_provider)


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.tracer_provider.shutdown()
    backend.meter_provider.shutdown()


@pytest.fixture(params=[False, True], ids=["local", "own_thread"])
def own_thread(request: pytest.FixtureRequest) -> bool:
    return request.param


async def test_the_span_of_a_chat(backend: Backend) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=["#"], n=2, frequency_penalty=1.0
    )
    async with FakeAsyncLLM("a secret answer") as engine:
        backend.instrument(engine)
        completion = await engine.chat(HELLO, params, request_id="r")
    span = backend.span
    assert (span.name, span.kind, span.parent) == ("chat fake", SpanKind.INTERNAL, None)
    assert span.status.status_code is StatusCode.UNSET
    times = {name: span.attributes[name] for name in ("aengine.queue_time", "aengine.prefill_time")}
    first = completion.timings.first_token
    assert dict(span.attributes) == times | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aengine",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("#",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.frequency_penalty": 1.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": "r",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.response.time_to_first_chunk": first,
        "gen_ai.usage.input_tokens": completion.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 18,
        "gen_ai.usage.cache_read.input_tokens": completion.usage.cached_tokens,
    }
    assert sum(times.values()) == pytest.approx(first)
    total = completion.timings.total
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(total, abs=1e-5)
    assert [event.name for event in span.events] == ["aengine.first_step", "aengine.first_token"]
    assert span.start_time < span.events[0].timestamp < span.events[1].timestamp < span.end_time
    assert (span.events[1].timestamp - span.start_time) / 1e9 == pytest.approx(first, abs=1e-5)
    assert "secret" not in span.to_json()


async def test_the_span_of_a_completion(backend: Backend) -> None:
    async with FakeAsyncLLM({"a": 1}) as engine:
        backend.instrument(engine)
        await engine.generate("x", SamplingParams(structured_output=StructuredOutput(json_object=True)))
    assert backend.span.name == "text_completion fake"
    assert backend.span.attributes["gen_ai.output.type"] == "json"
    assert backend.span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "gen_ai.request.max_tokens" not in backend.span.attributes
    json.loads(backend.span.to_json())


async def test_the_callers_span_is_the_parent(backend: Backend, own_thread: bool) -> None:
    async def agent(name: str) -> None:
        with backend.tracer.start_as_current_span(name):
            await asyncio.sleep(0)
            await engine.chat(HELLO)
            stream = engine.stream("x")
        await stream.wait()  # when the span that it began in is over

    async with FakeAsyncLLM("Paris", own_thread=own_thread) as engine:
        backend.instrument(engine)
        await asyncio.gather(agent("a"), agent("b"), engine.generate("x"))
    by_id = {span.context.span_id: span for span in backend.spans}
    parents = sorted((span.name, by_id[span.parent.span_id].name) for span in backend.spans if span.parent)
    assert parents == [(f"{kind} fake", name) for kind in ("chat", "text_completion") for name in ("a", "b")]
    assert len(by_id) == 7
    for span in backend.spans:
        if span.parent:
            assert span.context.trace_id == by_id[span.parent.span_id].context.trace_id


def test_the_parent_of_a_blocking_call(backend: Backend) -> None:
    with FakeLLM("Paris") as llm:
        backend.instrument(llm.as_async())
        with backend.tracer.start_as_current_span("job"):
            llm.generate(["x", "y"])
    job = backend.spans[-1]
    assert [span.parent.span_id for span in backend.spans[:-1] if span.parent] == [job.context.span_id] * 2


async def test_errors_and_aborts(backend: Backend, own_thread: bool) -> None:
    script = [Reply("a" * 900), Reply("a" * 900), Reply("cut", error=WorkerDiedError("gone"))]
    async with FakeAsyncLLM(script, token_delay=0.001, own_thread=own_thread) as engine:
        backend.instrument(engine)
        with pytest.raises(DeadlineExceededError):
            await engine.generate("x", deadline=0.02)
        stream = engine.stream("x")
        await anext(stream)
        await stream.aclose()
        with pytest.raises(WorkerDiedError):
            await engine.generate("x")
        with pytest.raises(InvalidRequestError):
            await engine.generate("x", SamplingParams(stop_token_ids=[10**9]))
    late, left, died = backend.spans
    assert (late.status.status_code, late.attributes["error.type"]) == (StatusCode.ERROR, "DeadlineExceededError")
    assert "deadline" in late.status.description
    assert left.status.status_code is StatusCode.UNSET and "error.type" not in left.attributes
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert died.attributes["error.type"] == "WorkerDiedError" and died.status.description == "gone"
    points = backend.points()
    by_error = {point.attributes.get("error.type"): point.count for point in points["gen_ai.server.request.duration"]}
    assert by_error == {None: 1, "DeadlineExceededError": 1, "WorkerDiedError": 1}
    assert [point.count for point in points["gen_ai.server.time_to_first_token"]] == [1], "only without an error"


async def test_what_an_error_says_of_a_request_is_not_recorded(backend: Backend) -> None:
    async with FakeAsyncLLM("Paris") as engine:
        backend.instrument(engine)
        with pytest.raises(GrammarError, match="secret"):
            await engine.chat(HELLO, SamplingParams(structured_output=StructuredOutput(json_schema={"type": "secret"})))
    assert backend.span.attributes["error.type"] == "GrammarError" and "secret" not in backend.span.to_json()


async def test_metrics(backend: Backend) -> None:
    async with FakeAsyncLLM("Paris") as engine:
        backend.instrument(engine)
        chat = await engine.chat(HELLO)
        await engine.generate("x" * 20, SamplingParams(max_tokens=1))
    points = backend.points()
    assert set(points) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.token.usage",
    }
    common = {"gen_ai.provider.name": "aengine", "gen_ai.request.model": "fake", "gen_ai.response.model": "fake"}
    duration = {point.attributes["gen_ai.operation.name"]: point for point in points["gen_ai.server.request.duration"]}
    assert dict(duration["chat"].attributes) == common | {"gen_ai.operation.name": "chat"}
    assert duration["chat"].sum == chat.timings.total and duration["text_completion"].count == 1
    assert duration["chat"].explicit_bounds[:2] == (0.01, 0.02) and duration["chat"].explicit_bounds[-1] == 81.92
    assert points["gen_ai.client.token.usage"][0].explicit_bounds[-1] == 67108864
    tokens = {
        (point.attributes["gen_ai.operation.name"], point.attributes["gen_ai.token.type"]): point.sum
        for point in points["gen_ai.client.token.usage"]
    }
    assert tokens == {
        ("chat", "input"): chat.usage.prompt_tokens,
        ("chat", "output"): chat.usage.completion_tokens,
        ("text_completion", "input"): 20,
        ("text_completion", "output"): 1,
    }
    assert [point.count for point in points["gen_ai.server.time_per_output_token"]] == [1], "of two tokens and more"
    (chat_span, _) = backend.spans
    assert duration["chat"].exemplars[0].trace_id == chat_span.context.trace_id


async def test_it_can_be_removed(backend: Backend) -> None:
    async with FakeAsyncLLM("a" * 50, token_delay=0.001) as engine:
        remove = backend.instrument(engine)
        stream = engine.stream("x", request_id="a")
        await anext(stream)
        remove()
        await engine.generate("x", SamplingParams(max_tokens=1), request_id="b")
        await stream.wait()
    assert backend.span.attributes["gen_ai.response.id"] == "a", "its span was begun, and is ended"


async def test_spans_of_many_requests_that_end_at_once_and_of_an_engine_that_is_closed_then(
    backend: Backend, own_thread: bool
) -> None:
    async with FakeAsyncLLM("Paris", own_thread=own_thread, max_num_seqs=512) as engine:
        backend.instrument(engine)
        await asyncio.gather(*(engine.generate("x") for _ in range(300)))
        open_streams = [engine.stream("x") for _ in range(20)]
    assert len(backend.spans) == 320 and len(open_streams) == 20


async def test_removing_records_what_has_ended(backend: Backend) -> None:
    async with FakeAsyncLLM("Paris") as engine:
        remove = backend.instrument(engine)
        await asyncio.gather(*(engine.generate("x") for _ in range(50)))
        remove()
        assert len(backend.spans) == 50


async def test_without_an_sdk_nothing_is_recorded_and_nothing_fails() -> None:
    async with FakeAsyncLLM("Paris") as engine:
        instrument(engine)
        assert (await engine.chat(HELLO)).message.content == "Paris"


# -- over HTTP

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"model": "fake", "messages": HELLO, "max_tokens": 9},
}


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_the_span_of_a_client_is_the_parent(backend: Backend, path: str, stream: bool) -> None:
    async with FakeAsyncLLM("Paris") as engine, client_of(create_app(engine)) as client:
        backend.instrument(engine)
        body = {**PATHS[path], "stream": stream}
        for headers in (TRACEPARENT, {}, {"traceparent": "nonsense"}):
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    first, second, third = backend.spans
    assert first.parent is not None and first.parent.is_remote
    assert f"{first.context.trace_id:032x}" == TRACE_ID and f"{first.parent.span_id:016x}" == PARENT_ID
    assert second.parent is third.parent is None
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_trace_reaches_an_engine_in_another_process(backend: Backend, tmp_path: Path) -> None:
    """As with ``aengine serve --workers``: the application's process has no engine."""
    async with FakeAsyncLLM("Paris") as engine:
        backend.instrument(engine)
        async with serve_engine(engine, tmp_path / "engine"), connect(tmp_path / "engine") as remote:
            async with client_of(create_app(remote, model_names="fake")) as client:
                for headers in (TRACEPARENT, {}):
                    answer = await client.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers)
                    assert answer.status_code == 200, answer.text
            with backend.tracer.start_as_current_span("agent"):
                await remote.generate("x")
    first, second, third, agent = sorted(backend.spans, key=lambda span: (span.name == "agent", span.start_time))
    assert first.parent is not None and f"{first.parent.span_id:016x}" == PARENT_ID
    assert second.parent is None
    assert third.parent is not None and third.parent.span_id == agent.context.span_id


def test_aengine_serve_reports_to_the_global_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are OpenTelemetry's ``opentelemetry-instrument``'s to set; without an SDK they record nothing."""
    instrumented = []
    monkeypatch.setattr(opentelemetry, "instrument", lambda engine, **options: instrumented.append((engine, options)))

    class Engine(FakeAsyncLLM):
        def __init__(self, model: str, **settings: Any) -> None:
            super().__init__()
            engines.append(self)

        async def start(self) -> Any:
            raise EngineError("enough seen")

    engines: list[Engine] = []
    monkeypatch.setattr(serve, "AsyncLLM", Engine)
    assert main(["serve", "m", "--port", "0", "--served-model-name", "paris", "other"]) != 0
    assert instrumented == [(engines[0], {"model_name": "paris"})]


async def test_a_span_of_the_application_goes_before_the_header(backend: Backend) -> None:
    async with FakeAsyncLLM("Paris") as engine:
        app = create_app(engine)

        async def instrumented(scope: Any, receive: Any, send: Any) -> None:
            with backend.tracer.start_as_current_span("POST /v1/chat/completions"):
                await app(scope, receive, send)

        backend.instrument(engine)
        async with client_of(instrumented) as client:
            await client.post("/v1/chat/completions", json={"messages": HELLO}, headers=TRACEPARENT)
    chat, server = backend.spans
    assert chat.parent is not None and chat.parent.span_id == server.context.span_id


async def test_without_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "aengine.telemetry.opentelemetry")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install opentelemetry-api"):
        import aengine.telemetry.opentelemetry  # noqa: F401
