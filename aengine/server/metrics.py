"""``/metrics``: the engine's metrics in the formats of Prometheus and OpenMetrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from .http import HTTPError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..async_llm import AsyncLLM
    from .service import Service

_OPEN_METRICS_END = b"# EOF\n"


def new_registry(engines: Mapping[str, AsyncLLM]) -> CollectorRegistry | None:
    """Make a registry of the metrics of engines, by the names of their models; None if prometheus_client is not
    installed."""
    try:
        from prometheus_client import CollectorRegistry

        from ..telemetry.prometheus import PrometheusCollector
    except ImportError:
        return None
    registry = CollectorRegistry()
    (first_name, first), *others = engines.items()
    collector = PrometheusCollector(first, model_name=first_name)
    for name, engine in others:
        collector.add(engine, model_name=name)
    registry.register(collector)
    return registry


async def metrics(service: Service, request: Request) -> Response:
    """Answer a scrape: all of the application's registry. Raises HTTPError 501 if there is none."""
    if service.metrics_registry is None:
        cure = "pip install prometheus-client"
        raise HTTPError(501, f"/metrics needs the package prometheus-client: {cure}", code="not_installed")
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    parts: list[bytes] = []
    for metric in service.metrics_registry.collect():
        parts.append(encode(SimpleNamespace(collect=partial(iter, [metric]))).removesuffix(_OPEN_METRICS_END))
        await asyncio.sleep(0)  # a scrape takes milliseconds, and others wait on this loop
    if content_type.startswith("application/openmetrics-text"):
        parts.append(_OPEN_METRICS_END)
    return Response(b"".join(parts), headers={"content-type": content_type})
