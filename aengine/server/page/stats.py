"""``/stats``: the engine's numbers at this moment, as the page's graphs need them."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...telemetry.metrics import Histogram
from ..http import JSONAnswer
from ..service import Service

NO_STORE = {"cache-control": "no-store"}

_COUNTERS = (
    *("num_running", "num_waiting", "num_blocks", "num_free_blocks", "block_size", "num_steps", "prompt_tokens"),
    *("generated_tokens", "num_requests", "num_finished", "num_aborted", "num_failed", "num_rejected"),
    *("num_preemptions", "num_restarts", "prefix_cache_queries", "prefix_cache_hits", "loop_lag"),
    *("worker_memory_bytes", "device_memory_bytes", "device_memory_total_bytes"),
)
"""Fields of `Statistics` that are told by their names."""

_FACTS = ("num_parameters", "max_model_len", "device", "sampling_defaults")
"""Fields taken from `AsyncLLM.describe`, null where it does not say."""


async def show_stats(service: Service, request: Request) -> Response:
    """Answer with `AsyncLLM.statistics`. Counts are since the engine's start; whoever asks twice has rates.

    ``time`` is in seconds since any moment; of ``inter_token_latency`` and ``time_to_first_token`` there is the sum of
    seconds, and the number of values.
    """
    statistics = service.engine.statistics()
    described = service.engine.describe()
    answer: dict[str, Any] = {"time": time.monotonic(), "model": service.model_name, "state": service.engine.state}
    answer |= {name: described.get(name) for name in _FACTS}
    answer |= {name: getattr(statistics, name) for name in _COUNTERS}
    histograms = statistics.histograms
    answer["inter_token_latency"] = _sum(histograms.inter_token_latency)
    answer["time_to_first_token"] = _sum(histograms.time_to_first_token)
    return JSONAnswer(answer, headers=NO_STORE)


def _sum(histogram: Histogram) -> dict[str, float]:
    return {"sum": histogram.sum, "count": histogram.count}
