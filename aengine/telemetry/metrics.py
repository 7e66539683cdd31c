"""Counters of one engine, and the frozen snapshot that `AsyncLLM.statistics` returns."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

from ..limits.graphs import GRAPH_MODES

if TYPE_CHECKING:
    from ..outputs import RequestEnd

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_SECONDS_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)) + (1e6,)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of values: those of all requests since the engine's start."""

    bounds: tuple[float, ...]  # upper bounds of the buckets, ascending, in the unit of the values
    counts: tuple[int, ...]  # counts[i]: values in (bounds[i - 1], bounds[i]]; the last one: values above all bounds
    sum: float  # sum of the values

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Number of values at most the bound of equal index; then of all: the buckets of Prometheus."""
        return tuple(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class Histograms:
    """Times in seconds, lengths in tokens. A request counts when it ends, in whatever way; the time of something that
    it never came to does not."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram  # seconds from one step's tokens to the next, once for each request that got one
    time_per_output_token: Histogram  # seconds between tokens, the mean of each request
    request_latency: Histogram  # seconds from the call to the end
    queue_time: Histogram  # seconds from the call to the first step, of requests that got a token
    prefill_time: Histogram  # seconds from the first step to the first token
    decode_time: Histogram  # seconds from the first token to the end
    prompt_tokens: Histogram
    generation_tokens: Histogram  # tokens of all completions of a request


@dataclass(frozen=True, slots=True)
class WorkerRestart:
    """A worker that was started in the place of one that had died or hung."""

    time: float  # time of the death, in seconds since 1970
    reason: str


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """What was verified of the drafts of one proposer."""

    proposer: str  # "grammar", or what the setting `speculation` names
    num_drafts: int  # times that tokens were drafted for a request in a step, and verified
    drafted_tokens: int  # tokens of these drafts
    accepted_tokens: int  # those of them that the request got
    accepted_by_position: tuple[int, ...]  # how often the first token of a draft was accepted, the second, ...

    @classmethod
    def sums(cls, each: Iterable[DraftStatistics]) -> tuple[DraftStatistics, ...]:
        """Return one for each proposer."""
        found: dict[str, DraftStatistics] = {}
        for new in each:
            old = found.get(new.proposer, cls(new.proposer, 0, 0, 0, ()))
            places = zip_longest(old.accepted_by_position, new.accepted_by_position, fillvalue=0)
            found[new.proposer] = cls(
                new.proposer,
                old.num_drafts + new.num_drafts,
                old.drafted_tokens + new.drafted_tokens,
                old.accepted_tokens + new.accepted_tokens,
                tuple(map(sum, places)),
            )
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class KVTierStatistics:
    """What is kept in a tier, see the setting ``kv_tiers``. A page is a block of the KV cache."""

    tier: str  # "host", "disk:/path", or the name of a store
    num_pages: int  # pages that are there now; of a disk and a store, those that this engine has brought there
    num_bytes: int  # bytes of these; of a disk those of all that is there
    num_saved: int  # pages that were brought there
    num_fetched: int  # pages that came from there because a request began with them
    num_lost: int  # pages that should have come, and were computed again

    @classmethod
    def sums(cls, each: Iterable[KVTierStatistics]) -> tuple[KVTierStatistics, ...]:
        """Return one for each tier."""
        found: dict[str, list[int]] = {}
        for one in each:
            _, *numbers = astuple(one)
            found[one.tier] = [a + b for a, b in zip(found.get(one.tier, [0] * len(numbers)), numbers, strict=True)]
        return tuple(cls(tier, *numbers) for tier, numbers in found.items())


@dataclass(frozen=True, slots=True)
class GraphStatistics:
    """How steps of one kind were launched."""

    mode: str  # "FULL": as CUDA graphs; "PIECEWISE": in part; "NONE": op by op, as all on a CPU
    has_prompts: bool  # steps in which a prompt was computed; else decodes, with or without drafts
    num_steps: int
    num_tokens: int  # tokens that these steps computed
    num_paddings: int  # tokens beside them that graphs computed for nothing

    @classmethod
    def sums(cls, each: Iterable[Counter[tuple[int, bool, str]]]) -> tuple[GraphStatistics, ...]:
        """Return one for each kind of step. ``each``: the counts of a replica, by the mode's place in `GRAPH_MODES`,
        ``has_prompts`` and the name of the count."""
        total = sum(map(Counter, each), Counter())  # copies: other threads count on
        kinds = sorted({(mode, has_prompts) for mode, has_prompts, _ in total})
        names = [field.name for field in fields(cls)][2:]
        return tuple(cls(GRAPH_MODES[mode], has, *(total[mode, has, name] for name in names)) for mode, has in kinds)


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica of the model at one moment. Counts are since the engine's start."""

    state: str  # "running"; "restarting": its worker has died; "failed": so often that it is not started again
    num_running: int  # requests with a row on its worker
    num_waiting: int  # requests that wait there for a row
    num_blocks: int  # KV blocks in all
    num_free_blocks: int
    num_swapped_blocks: int  # blocks of preempted requests in the host's memory
    swapped_bytes: int  # bytes of these on all of its ranks
    num_restarts: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found in the prefix cache
    num_kept_blocks: int  # KV blocks that are kept for the next turns of sessions, idle or in use
    kept_block_hits: int  # times that such a block, idle, was found by a request
    num_drafts: int  # times that tokens were drafted for a request in a step, and verified
    drafted_tokens: int  # tokens of these drafts
    accepted_tokens: int  # those of them that the request got
    drafts: tuple[DraftStatistics, ...]  # the same by proposer
    kv_tiers: tuple[KVTierStatistics, ...]  # nearest first


@dataclass(frozen=True, slots=True)
class AdapterStatistics:
    """The adapters of an engine at one moment."""

    max_loras: int = 0  # places on the device
    num_known: int = 0  # adapters that requests may name
    num_loads: int = 0  # adapters that were brought into a place since the start
    running: tuple[str, ...] = ()  # names of those that requests use; the first hundred
    waiting: tuple[str, ...] = ()  # names of those that requests wait for; the first hundred


MAX_SHOWN_TENANTS = 32
"""Tenants that are shown by name: those of the settings, then those who came first. All others are "*"."""


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """What one tenant has had since the engine's start. Tokens count when a request ends."""

    name: str  # "": requests that name none; "*": all tenants that are not shown by name
    num_running: int  # requests with a row now
    num_open: int  # requests that have not ended
    num_requests: int  # accepted so far
    num_rejected: int  # calls that were refused because a quota was used up
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    generated_tokens: int


_SUMS = {one.name for one in fields(ReplicaStatistics)} - {"state", "num_waiting", "num_restarts", "drafts", "kv_tiers"}


def sums_of(replicas: Sequence[ReplicaStatistics]) -> dict[str, Any]:
    """Return those fields of `Statistics` that are sums of its replicas'."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in replicas) for name in _SUMS}
    return sums | {
        "drafts": DraftStatistics.sums(each for one in replicas for each in one.drafts),
        "kv_tiers": KVTierStatistics.sums(each for one in replicas for each in one.kv_tiers),
    }


@dataclass(frozen=True, slots=True)
class Statistics:
    """Numbers of the engine at one moment. Counts are since its start."""

    num_running: int  # requests with a row on the worker
    num_waiting: int  # requests whose first step has not been made, and those that were preempted
    sleep_level: int  # 0: awake; 1: asleep with workers; 2: asleep, and a worker at least has ended
    num_blocks: int  # KV blocks in all
    num_free_blocks: int  # KV blocks that no request uses (the prefix cache may still remember their content)
    num_swapped_blocks: int  # blocks of preempted requests in the host's memory, see `swap_space_bytes`
    swapped_bytes: int  # bytes of these
    block_size: int  # tokens in a block; of the KV group with the smallest ones
    num_preemptions: int
    num_restarts: int  # worker processes started again
    num_requests: int  # accepted so far
    num_finished: int  # requests that ended by themselves
    num_aborted: int  # requests that their callers ended
    num_failed: int  # requests that ended by an error
    num_steps: int
    graphs: tuple[GraphStatistics, ...]  # how these were launched
    prompt_tokens: int  # prompt tokens of accepted requests
    generated_tokens: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found in the prefix cache
    num_kept_blocks: int  # KV blocks that are kept for the next turns of sessions, idle or in use
    kept_block_hits: int  # times that such a block, idle, was found by a request
    num_drafts: int  # times that tokens were drafted for a request in a step, and verified
    drafted_tokens: int  # tokens of these drafts
    accepted_tokens: int  # those of them that the request got
    drafts: tuple[DraftStatistics, ...]  # the same by proposer
    kv_tiers: tuple[KVTierStatistics, ...]  # KV that is kept beyond the device, nearest first
    adapters: AdapterStatistics
    tenants: tuple[TenantStatistics, ...]  # empty until a request or a setting names a tenant
    loop_lag: float  # seconds by which the host's loop was late lately, at worst; 0.0 when idle
    num_rejected: int  # calls that were refused because the queue was full
    finish_reasons: dict[str, int]  # requests by FinishReason; one with n completions counts by its first
    restarts: tuple[WorkerRestart, ...]  # the last few, the latest last
    worker_memory_bytes: int | None  # resident memory of the worker processes; None while there is none
    device_memory_bytes: int | None  # GPU memory that the worker has taken: weights, KV and all else; None on a CPU
    device_memory_total_bytes: int | None  # GPU memory that the GPU has; None on a CPU
    histograms: Histograms
    replicas: tuple[ReplicaStatistics, ...]  # as many as data_parallel_size; the numbers above are sums over them


@dataclass(slots=True)
class Counters:
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_restarts: int = 0
    num_rejected: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class HistogramCount:
    """A histogram that is being filled."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.sum)


class HistogramCounts:
    """The `Histograms` of one engine, being filled."""

    def __init__(self) -> None:
        self.time_to_first_token = HistogramCount(_SECONDS)
        self.inter_token_latency = HistogramCount(_SECONDS_PER_TOKEN)
        self.time_per_output_token = HistogramCount(_SECONDS_PER_TOKEN)
        self.request_latency = HistogramCount(_REQUEST_SECONDS)
        self.queue_time = HistogramCount(_REQUEST_SECONDS)
        self.prefill_time = HistogramCount(_REQUEST_SECONDS)
        self.decode_time = HistogramCount(_REQUEST_SECONDS)
        self.prompt_tokens = HistogramCount(_TOKENS)
        self.generation_tokens = HistogramCount(_TOKENS)

    def add_request(self, end: RequestEnd) -> None:
        timings, usage = end.timings, end.usage
        total, first = timings.total, timings.first_token
        assert total is not None, "it has ended"
        self.request_latency.add(total)
        self.prompt_tokens.add(usage.prompt_tokens)
        self.generation_tokens.add(usage.completion_tokens)
        if first is None:
            return
        self.time_to_first_token.add(first)
        self.decode_time.add(total - first)
        if timings.prefill is not None and timings.queued is not None:
            self.queue_time.add(timings.queued)
            self.prefill_time.add(timings.prefill)
        if timings.per_token is not None:
            self.time_per_output_token.add(timings.per_token)

    def snapshot(self) -> Histograms:
        return Histograms(**{name: count.snapshot() for name, count in vars(self).items()})


class LoopLag:
    """Delay of the host's loop in running timers, sampled ten times a second while requests run, and not when idle."""

    PERIOD = 0.1
    DECAY = 0.9  # share of the remembered worst that is kept each period: a stall fades in a few seconds

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._worst = 0.0

    @property
    def worst(self) -> float:
        return self._worst

    def resume(self) -> None:
        if self._timer is None:
            self._arm()

    def pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._worst = 0.0

    def _arm(self) -> None:
        due = self._loop.time() + self.PERIOD
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._worst = max(self._worst * self.DECAY, self._loop.time() - due)
        self._arm()
