"""`instrument`: a span and metrics of OpenTelemetry for every request of an engine.

    remove = instrument(engine)

Names are those of OpenTelemetry's conventions for generative AI, of 2026; what these have no name for begins with
"aengine.". Neither prompts nor answers are recorded.

    on_accepted ──> span begins, its parent the caller's current span
    on_end ──> in turns of the loop of their own, soon after: attributes, events, histograms; span ends

An SDK takes some 80 us for all of that. Requests of one batch may end in one step, and the next step is not to wait for
as many times 80 us: what can wait is done while the worker computes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DeadlineExceededError, EngineClosedError, EngineError
from ..outputs import FinishReason
from .listeners import RequestListener, RequestStart

try:
    from opentelemetry.context import get_current
    from opentelemetry.metrics import Histogram, MeterProvider, get_meter
    from opentelemetry.trace import (
        Span,
        SpanKind,
        Status,
        StatusCode,
        TracerProvider,
        get_tracer,
        set_span_in_context,
    )
except ImportError as error:
    raise ImportError("traces need OpenTelemetry's API: pip install opentelemetry-api") from error

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..outputs import RequestEnd
    from ..params import SamplingParams

__all__ = ["instrument"]

_PROVIDER = "aengine"
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_SECONDS = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),)
_PER_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**power for power in range(14))
_ENDED_A_TURN = 4
"""Requests recorded in a turn of the loop: 0.3 ms of work."""
_MOST_ENDED = 64
"""Requests that may wait to be recorded."""


_OPERATIONS = {"completion": "text_completion", "chat": "chat", "embedding": "embeddings"}
"""The conventions' names of the kinds of requests."""


class Engine(Protocol):
    """Interface of the engine that is instrumented, such as an `AsyncLLM`."""

    @property
    def config(self) -> EngineConfig: ...

    def add_listener(self, listener: RequestListener) -> Callable[[], None]: ...


def instrument(
    engine: Engine,
    *,
    model_name: str | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Callable[[], None]:
    """Trace and measure every request that the engine accepts from now on.

    Args:
        engine: an `AsyncLLM`, started or not; of an `LLM`, ``llm.as_async()``.
        model_name: as spans and metrics call the model; None: `EngineConfig.model_name`.
        tracer_provider: of the spans. None: OpenTelemetry's global one.
        meter_provider: of the metrics, likewise.

    Returns a function that ends it. The span of a request is the child of the span that is current where `stream`,
    `generate` or `chat` is called, in whatever thread.
    """
    name = model_name or engine.config.model_name
    instrumentation = _Instrumentation(name, tracer_provider, meter_provider)
    remove_listener = engine.add_listener(instrumentation)

    def remove() -> None:
        """Trace no request that comes from now on. Idempotent, from any thread."""
        remove_listener()
        instrumentation.record_all()

    return remove


class _Instrumentation(RequestListener):
    def __init__(
        self, model_name: str, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None
    ) -> None:
        from ..__version__ import __version__

        self._model_name = model_name
        self._tracer = get_tracer("aengine", __version__, tracer_provider)
        self._spans: dict[str, Span] = {}  # spans of running requests, by request_id
        self._ended: deque[tuple[RequestStart, RequestEnd, Span]] = deque()  # ended requests that are not recorded yet
        self._loop: asyncio.AbstractEventLoop | None = None  # loop on which they will be recorded
        meter = get_meter("aengine", __version__, meter_provider)

        def histogram(name: str, unit: str, bounds: tuple[float, ...], text: str) -> Histogram:
            return meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram("gen_ai.server.request.duration", "s", _SECONDS, "From the call to the end.")
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            _FIRST_TOKEN_SECONDS,
            "From the call to the first token, of requests without an error.",
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            _PER_TOKEN_SECONDS,
            "From one token to the next, the mean of a request without an error.",
        )
        self._tokens = histogram("gen_ai.client.token.usage", "{token}", _TOKENS, "Tokens of a prompt or an answer.")

    def on_accepted(self, request: RequestStart) -> None:
        attributes = self._common_attributes(request)
        self._spans[request.request_id] = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model_name}",
            context=request.context.run(get_current),
            kind=SpanKind.INTERNAL,  # the conventions' for a model in the same process
            attributes=attributes,
            start_time=_nanoseconds(request.arrived_at),
        )

    def on_end(self, request: RequestStart, end: RequestEnd) -> None:
        self._ended.append((request, end, self._spans.pop(request.request_id)))
        if isinstance(end.error, EngineClosedError):  # the loop may not go on for long
            self.record_all()
            return
        if len(self._ended) > _MOST_ENDED:
            self._record_next()
        self._record_soon()

    def _record_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._record_some)

    def _record_some(self) -> None:
        """Record some of the requests that have ended, the others in later turns of the loop."""
        self._loop = None
        for _ in range(_ENDED_A_TURN):
            self._record_next()
        if self._ended:
            self._record_soon()

    def record_all(self) -> None:
        """Record all requests that have ended."""
        while self._ended:
            self._record_next()

    def _record_next(self) -> None:
        """Record one request, if one has ended; `remove` may do that in another thread, too."""
        try:
            request, end, span = self._ended.popleft()
        except IndexError:
            return
        self._record(request, end, span)
        if span.is_recording():
            span.set_attributes({**_request_attributes(request.params), **self._end_attributes(end)})
            queued, first = end.timings.queued, end.timings.first_token
            if queued is not None and first is not None:
                span.add_event("aengine.first_step", timestamp=_nanoseconds(request.arrived_at + queued))
                span.add_event("aengine.first_token", timestamp=_nanoseconds(request.arrived_at + first))
            if end.finish_reason is FinishReason.ERROR:
                # Errors of a request may quote it; those of the engine and of time do not.
                text = str(end.error) if isinstance(end.error, EngineError | DeadlineExceededError) else None
                span.set_status(Status(StatusCode.ERROR, text))
        assert end.timings.total is not None, "it has ended"
        span.end(_nanoseconds(request.arrived_at + end.timings.total))

    def _record(self, request: RequestStart, end: RequestEnd, span: Span) -> None:
        """Record the metrics, in the span's context, by which examples of a bucket name their trace."""
        attributes = self._common_attributes(request) | {"gen_ai.response.model": self._model_name}
        context = set_span_in_context(span)
        counts = (("input", end.usage.prompt_tokens), ("output", end.usage.completion_tokens))
        for kind, count in counts:
            if count:
                self._tokens.record(count, attributes | {"gen_ai.token.type": kind}, context)
        timings = end.timings
        assert timings.total is not None, "it has ended"
        if end.finish_reason is FinishReason.ERROR:
            self._duration.record(timings.total, attributes | _error_attributes(end), context)
            return
        self._duration.record(timings.total, attributes, context)
        if timings.first_token is not None:
            self._first_token.record(timings.first_token, attributes, context)
        if timings.per_token is not None:
            self._per_token.record(timings.per_token, attributes, context)

    def _common_attributes(self, request: RequestStart) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": _OPERATIONS[request.kind],
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": self._model_name,
        }

    def _end_attributes(self, end: RequestEnd) -> dict[str, Any]:
        usage, timings = end.usage, end.timings
        attributes: dict[str, Any] = {
            "gen_ai.response.id": end.request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [reason.value for reason in end.finish_reasons],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            **_error_attributes(end),
        }
        seconds = {
            "gen_ai.response.time_to_first_chunk": timings.first_token,
            "aengine.queue_time": timings.queued,
            "aengine.prefill_time": timings.prefill,
        }
        return attributes | {name: value for name, value in seconds.items() if value is not None}


def _request_attributes(params: SamplingParams) -> Mapping[str, Any]:
    """Return what the conventions record of the parameters. They are plain numbers, as exporters expect."""
    shape = params.structured_output
    optional = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.top_k": int(params.top_k) or None,
        "gen_ai.request.choice.count": None if params.n == 1 else params.n,
        "gen_ai.request.stop_sequences": list(params.stop) or None,
        "gen_ai.output.type": "json" if shape is not None and shape.is_json else None,
    }
    return {
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.frequency_penalty": float(params.frequency_penalty),
        "gen_ai.request.presence_penalty": float(params.presence_penalty),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _error_attributes(end: RequestEnd) -> dict[str, str]:
    """Return the error's type, by its class; empty for a request that has ended without one."""
    if end.finish_reason is not FinishReason.ERROR:
        return {}
    return {"error.type": type(end.error).__qualname__}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
