"""`PrometheusCollector`: an engine's statistics as Prometheus metrics, in a registry of yours.

    REGISTRY.register(PrometheusCollector(engine))

Nothing is counted twice: at each scrape it reads `statistics()`, and formats that. The names are those of vLLM, which
dashboards read already; what vLLM does not have begins with "aengine:".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import EngineClosedError
from .metrics import Histogram, Histograms, ReplicaStatistics, Statistics, TenantStatistics

try:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError("metrics for Prometheus need its client: pip install prometheus-client") from error

if TYPE_CHECKING:
    from ..config import EngineConfig

__all__ = ["PrometheusCollector"]


class Engine(Protocol):
    """Interface of the engine that is observed, such as an `AsyncLLM`."""

    @property
    def config(self) -> EngineConfig: ...

    def statistics(self) -> Statistics: ...


_Labels = tuple[str, str]
_Value = Callable[[Statistics], float | None]
_LABELS = ("model_name", "engine")

_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("vllm:num_requests_running", "Requests with a row on the worker.", lambda s: s.num_running),
    (
        "vllm:num_requests_waiting",
        "Requests that wait for their first step, or were preempted.",
        lambda s: s.num_waiting,
    ),
    ("vllm:kv_cache_usage_perc", "Used part of the KV cache. 1: all of it.", lambda s: _kv_usage(s)),
    ("aengine:kv_blocks", "Blocks of the KV cache.", lambda s: s.num_blocks),
    ("aengine:swapped_kv_blocks", "Blocks of preempted requests on the host.", lambda s: s.num_swapped_blocks),
    ("aengine:swapped_kv_bytes", "Bytes of these blocks.", lambda s: s.swapped_bytes),
    ("aengine:kept_kv_blocks", "Blocks that are kept for next turns of sessions.", lambda s: s.num_kept_blocks),
    ("aengine:loop_lag_seconds", "Lateness of the host's event loop, lately at worst.", lambda s: s.loop_lag),
    ("aengine:worker_memory_bytes", "Resident memory of the worker processes.", lambda s: s.worker_memory_bytes),
    ("aengine:device_memory_bytes", "GPU memory that the workers have taken.", lambda s: s.device_memory_bytes),
    ("aengine:device_memory_total_bytes", "Memory of the GPU.", lambda s: s.device_memory_total_bytes),
)
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of accepted requests.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    ("aengine:kept_kv_block_hits", "Kept blocks that requests found.", lambda s: s.kept_block_hits),
    ("vllm:spec_decode_num_drafts", "Drafts of tokens that were verified.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", lambda s: s.drafted_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", lambda s: s.accepted_tokens),
    ("aengine:lora_loads", "Adapters brought to the device.", lambda s: s.adapters.num_loads),
    ("vllm:num_preemptions", "Requests that had to give their KV blocks to others.", lambda s: s.num_preemptions),
    ("vllm:admission_rejections", "Requests refused because the queue was full.", lambda s: s.num_rejected),
    ("aengine:requests", "Requests accepted.", lambda s: s.num_requests),
    ("aengine:steps", "Steps of the worker.", lambda s: s.num_steps),
    ("aengine:worker_restarts", "Workers started in place of one that had died or hung.", lambda s: s.num_restarts),
)
_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStatistics], float]], ...] = (
    ("aengine:replica_running", "1: the worker of the replica runs.", lambda r: r.state == "running"),
    ("aengine:replica_requests_running", "Requests with a row on the replica's worker.", lambda r: r.num_running),
    ("aengine:replica_requests_waiting", "Requests that wait there for a row.", lambda r: r.num_waiting),
    (
        "aengine:replica_kv_cache_usage_perc",
        "Used part of the replica's KV cache. 1: all of it.",
        lambda r: _kv_usage(r),
    ),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaStatistics], float]], ...] = (
    ("aengine:replica_prefix_cache_queries", "Prompt tokens looked up there.", lambda r: r.prefix_cache_queries),
    ("aengine:replica_prefix_cache_hits", "Prompt tokens found there.", lambda r: r.prefix_cache_hits),
    ("aengine:replica_worker_restarts", "Workers of the replica started anew.", lambda r: r.num_restarts),
)
_TENANT_GAUGES: tuple[tuple[str, str, Callable[[TenantStatistics], float]], ...] = (
    ("aengine:tenant_requests_running", "Requests of the tenant with a row.", lambda t: t.num_running),
    ("aengine:tenant_requests_open", "Requests of the tenant that have not ended.", lambda t: t.num_open),
)
_TENANT_COUNTERS: tuple[tuple[str, str, Callable[[TenantStatistics], float]], ...] = (
    ("aengine:tenant_requests", "Requests of the tenant accepted.", lambda t: t.num_requests),
    ("aengine:tenant_rejections", "Requests refused because a quota was used up.", lambda t: t.num_rejected),
    ("aengine:tenant_prompt_tokens", "Prompt tokens of its requests that have ended.", lambda t: t.prompt_tokens),
    ("aengine:tenant_cached_tokens", "Those of them found in the prefix cache.", lambda t: t.cached_tokens),
    ("aengine:tenant_generation_tokens", "Tokens generated for them.", lambda t: t.generated_tokens),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Histograms], Histogram]], ...] = (
    ("vllm:time_to_first_token_seconds", "From the call to the first token.", lambda h: h.time_to_first_token),
    ("vllm:inter_token_latency_seconds", "From one token to the next.", lambda h: h.inter_token_latency),
    (
        "vllm:request_time_per_output_token_seconds",
        "From one token to the next, the mean of a request.",
        lambda h: h.time_per_output_token,
    ),
    ("vllm:e2e_request_latency_seconds", "From the call to the end.", lambda h: h.request_latency),
    ("vllm:request_queue_time_seconds", "From the call to the first step.", lambda h: h.queue_time),
    ("vllm:request_prefill_time_seconds", "From the first step to the first token.", lambda h: h.prefill_time),
    ("vllm:request_decode_time_seconds", "From the first token to the end.", lambda h: h.decode_time),
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", lambda h: h.prompt_tokens),
    ("vllm:request_generation_tokens", "Tokens generated for a request.", lambda h: h.generation_tokens),
)


class PrometheusCollector(Collector):
    """Collects the metrics of an engine, or of several, for a `prometheus_client.CollectorRegistry`.

    Args:
        engine: an `AsyncLLM`, started or not; of an `LLM`, ``llm.as_async()``.
        model_name: the label; None: `EngineConfig.model_name`.

    Scrapes may come from any thread. An engine that does not run has "aengine:running" 0 and no other metric; its
    counts begin again with its next start, as Prometheus expects of counters.
    """

    def __init__(self, engine: Engine, *, model_name: str | None = None) -> None:
        self._engines: list[tuple[Engine, _Labels]] = []
        self.add(engine, model_name=model_name)

    def add(self, engine: Engine, *, model_name: str | None = None) -> None:
        """Collect another engine's, too: a registry takes each metric from one collector only. Those of the same
        ``model_name`` are told apart by the label "engine": "0", "1", ..."""
        name = model_name or engine.config.model_name
        number = sum(labels[0] == name for _, labels in self._engines)
        self._engines = [*self._engines, (engine, (name, str(number)))]

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values: engines need not run when this is registered."""
        return self._families([])

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, of one moment for each engine."""
        running: list[tuple[_Labels, Statistics]] = []
        is_running = GaugeMetricFamily("aengine:running", "1: the engine runs, or drains.", labels=_LABELS)
        for engine, labels in self._engines:
            try:
                running.append((labels, engine.statistics()))
            except EngineClosedError:
                is_running.add_metric(labels, 0)
            else:
                is_running.add_metric(labels, 1)
        yield is_running
        yield from self._families(running)

    def _families(self, running: list[tuple[_Labels, Statistics]]) -> Iterator[Metric]:
        # Of an engine with one replica its own metrics say all.
        replicas = [
            ((*labels, str(index)), replica)
            for labels, statistics in running
            if len(statistics.replicas) > 1
            for index, replica in enumerate(statistics.replicas)
        ]
        yield from _families(GaugeMetricFamily, _GAUGES, _LABELS, running)
        yield from _families(CounterMetricFamily, _COUNTERS, _LABELS, running)
        yield from _families(GaugeMetricFamily, _REPLICA_GAUGES, (*_LABELS, "replica"), replicas)
        yield from _families(CounterMetricFamily, _REPLICA_COUNTERS, (*_LABELS, "replica"), replicas)
        tenants = [((*labels, one.name), one) for labels, statistics in running for one in statistics.tenants]
        yield from _families(GaugeMetricFamily, _TENANT_GAUGES, (*_LABELS, "tenant"), tenants)
        yield from _families(CounterMetricFamily, _TENANT_COUNTERS, (*_LABELS, "tenant"), tenants)
        ends = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended.", labels=[*_LABELS, "finished_reason"]
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache.", labels=[*_LABELS, "block_size", "num_gpu_blocks"]
        )
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Unix time; its labels name the adapters that requests use, and that they wait for.",
            labels=[*_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        for labels, statistics in running:
            own = statistics.adapters
            if own.max_loras:
                names = ",".join(own.running), ",".join(own.waiting)
                adapters.add_metric([*labels, str(own.max_loras), *names], time.time())
            for reason, count in statistics.finish_reasons.items():
                ends.add_metric([*labels, reason], count)
            config.add_metric([*labels, str(statistics.block_size), str(statistics.num_blocks)], 1)
        yield ends
        yield config
        yield _sleep_states(running)
        yield adapters
        yield from _drafts(running)
        yield from _graphs(running)
        yield from _kv_tiers(running)
        for name, text, histogram_of in _HISTOGRAMS:
            histograms = HistogramMetricFamily(name, text, labels=_LABELS)
            for labels, statistics in running:
                histogram = histogram_of(statistics.histograms)
                bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
                histograms.add_metric(labels, list(zip(bounds, histogram.cumulative)), histogram.sum)
            yield histograms


def _families(
    family_class: type[GaugeMetricFamily] | type[CounterMetricFamily],
    table: Iterable[tuple[str, str, Callable[[Any], float | None]]],
    names: Sequence[str],
    sources: Iterable[tuple[Sequence[str], Any]],
) -> Iterator[Metric]:
    """Yield the metrics of a table; ``sources``: labels by these names, and what the values are read from."""
    for name, text, value_of in table:
        family = family_class(name, text, labels=names)
        for labels, source in sources:
            if (value := value_of(source)) is not None:
                family.add_metric(labels, value)
        yield family


def _sleep_states(running: list[tuple[_Labels, Statistics]]) -> Metric:
    text = "1: the engine is awake; asleep with its weights in the host's memory; asleep without them."
    states = GaugeMetricFamily("vllm:engine_sleep_state", text, labels=[*_LABELS, "sleep_state"])
    for labels, statistics in running:
        for level, name in enumerate(("awake", "weights_offloaded", "discard_all")):
            states.add_metric([*labels, name], statistics.sleep_level == level)
    return states


def _drafts(running: list[tuple[_Labels, Statistics]]) -> Iterator[Metric]:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    places = CounterMetricFamily(name, "Accepted tokens by position in a draft.", labels=[*_LABELS, "position"])
    labels = [*_LABELS, "proposer"]
    drafted = CounterMetricFamily("aengine:drafted_tokens", "Tokens drafted, by who proposed them.", labels=labels)
    accepted = CounterMetricFamily("aengine:accepted_tokens", "Tokens accepted, by who proposed them.", labels=labels)
    for labels_of, statistics in running:
        counts = zip_longest(*(each.accepted_by_position for each in statistics.drafts), fillvalue=0)
        for position, count in enumerate(map(sum, counts)):
            places.add_metric([*labels_of, str(position)], count)
        for each in statistics.drafts:
            drafted.add_metric([*labels_of, each.proposer], each.drafted_tokens)
            accepted.add_metric([*labels_of, each.proposer], each.accepted_tokens)
    yield from (places, drafted, accepted)


def _graphs(running: list[tuple[_Labels, Statistics]]) -> Iterator[Metric]:
    labels = [*_LABELS, "mode", "step"]
    texts = {
        "num_steps": ("aengine:graph_steps", "Steps by how they were launched: as CUDA graphs, in part, or op by op."),
        "num_tokens": ("aengine:graph_tokens", "Tokens of these steps."),
        "num_paddings": ("aengine:graph_paddings", "Tokens that graphs computed to fill their size."),
    }
    for field, (name, text) in texts.items():
        family = CounterMetricFamily(name, text, labels=labels)
        for labels_of, statistics in running:
            for each in statistics.graphs:
                step = "prompt" if each.has_prompts else "decode"
                family.add_metric([*labels_of, each.mode, step], getattr(each, field))
        yield family


def _kv_tiers(running: list[tuple[_Labels, Statistics]]) -> Iterator[Metric]:
    labels = [*_LABELS, "tier"]
    gauges = {
        "num_pages": GaugeMetricFamily("aengine:kv_tier_pages", "Pages of KV in a tier.", labels=labels),
        "num_bytes": GaugeMetricFamily("aengine:kv_tier_bytes", "Bytes of these pages.", labels=labels),
    }
    texts = {"saved": "Pages brought to a tier.", "fetched": "Pages that came back.", "lost": "Pages that did not."}
    counters = {
        f"num_{name}": CounterMetricFamily(f"aengine:kv_tier_pages_{name}", text, labels=labels)
        for name, text in texts.items()
    }
    for name, family in (gauges | counters).items():
        for labels_of, statistics in running:
            for each in statistics.kv_tiers:
                family.add_metric([*labels_of, each.tier], getattr(each, name))
        yield family


def _kv_usage(statistics: Statistics | ReplicaStatistics) -> float:
    return 1 - statistics.num_free_blocks / max(1, statistics.num_blocks)
