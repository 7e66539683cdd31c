"""The client of traffic.py: sends requests when they are due to the adapter of any engine, and sums up what came.

Standard library only, so that it runs wherever an engine does. All clocks are `time.perf_counter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from engine_bench import pct

FIRST_TOKEN_LIMIT_MS = 200.0
BETWEEN_TOKENS_LIMIT_MS = 20.0
_BIN_SECONDS = 0.2  # of the series of gaps that a plot shows


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it."""

    due: float  # when it should be sent; the first token's time counts from here
    sent: float  # when the engine got it
    num_prompt_tokens: int
    times: list[float] = field(default_factory=list)  # of each chunk
    sizes: list[int] = field(default_factory=list)  # tokens in each chunk
    token_ids: list[int] = field(default_factory=list)  # only if they were asked for
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes)

    @property
    def first_token_ms(self) -> float:
        return (self.times[0] - self.due) * 1e3

    @property
    def mean_gap_ms(self) -> float:
        """Mean time between two tokens; 0 for a single token."""
        return (self.times[-1] - self.times[0]) * 1e3 / max(self.num_tokens - 1, 1)

    @property
    def max_gap_ms(self) -> float:
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:])), default=0.0) * 1e3

    def gaps(self, since: float = -math.inf, until: float = math.inf) -> Iterator[tuple[float, float]]:
        """(end, milliseconds) of each time between two tokens that overlaps with the window. The tokens of one chunk
        came together: 0 ms between them."""
        previous = None
        for end, size in zip(self.times, self.sizes):
            if previous is not None and end > since and previous < until:
                yield end, (end - previous) * 1e3
            if since < end < until:
                for _ in range(size - 1):
                    yield end, 0.0
            previous = end


class Client:
    """Sends token ids to an adapter (engine_bench.py says what that is)."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self._ids = count(1)

    async def request(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        due: float | None = None,
        temperature: float = 0.6,
        sampling: dict[str, Any] | None = None,
        wants_ids: bool = False,
        into: RequestRecord | None = None,
    ) -> RequestRecord:
        """Send one request and read it to its end. An error is kept in its record, not raised.

        ``sampling``: further parameters by OpenAI's names. ``into``: a record to fill, for who watches meanwhile.
        """
        params = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True, "sampling": sampling}
        record = into or RequestRecord(0.0, 0.0, len(prompt))
        record.sent = time.perf_counter()
        record.due = record.sent if due is None else due
        request_id = f"r{next(self._ids)}"
        wants_ids = wants_ids and hasattr(self.adapter, "stream_ids")
        stream = (self.adapter.stream_ids if wants_ids else self.adapter.stream)(prompt, params, request_id)
        try:
            async with contextlib.aclosing(stream):
                async for chunk in stream:
                    size = len(chunk) if wants_ids else chunk
                    if size <= 0:
                        continue
                    record.times.append(time.perf_counter())
                    record.sizes.append(size)
                    if wants_ids:
                        record.token_ids.extend(chunk)
            if record.num_tokens != max_tokens:
                record.error = f"{record.num_tokens} of {max_tokens} tokens"
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"[:200]
        return record

    async def at_once(self, requests: Iterable[tuple[list[int], int]]) -> list[RequestRecord]:
        """Send all of these (prompt, max_tokens) now; each is due now."""
        due = time.perf_counter()
        return await asyncio.gather(*(self.request(prompt, most, due=due) for prompt, most in requests))

    async def open_loop(self, arrivals: Sequence[tuple[float, list[int], int]]) -> list[RequestRecord]:
        """Send (seconds from now, prompt, max_tokens), in order of time, each at its time, without awaiting answers."""
        begun = time.perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for offset, prompt, most in arrivals:
                due = begun + offset
                while (delay := due - time.perf_counter()) > 0:  # uvloop's timers round to milliseconds: perhaps twice
                    await asyncio.sleep(delay)
                tasks.append(group.create_task(self.request(prompt, most, due=due)))
        return [task.result() for task in tasks]

    @contextlib.asynccontextmanager
    async def steady(
        self, prompts: Sequence[list[int]], max_tokens: int, *, temperature: float = 0.6, ready_after: int = 10
    ) -> AsyncIterator[list[RequestRecord]]:
        """Streams that run while the block does, and are aborted at its end. Entered when each has so many tokens."""
        records = [RequestRecord(0.0, 0.0, len(prompt)) for prompt in prompts]
        tasks = [
            asyncio.create_task(self.request(prompt, max_tokens, temperature=temperature, into=record))
            for prompt, record in zip(prompts, records)
        ]
        try:
            while any(len(record.times) < ready_after and not task.done() for record, task in zip(records, tasks)):
                await asyncio.sleep(0.01)
            yield records
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Cpu:
    """CPU seconds of this process and of its children, the engine's workers, since this was made."""

    def __init__(self) -> None:
        self._host, self._workers = time.process_time(), descendants_cpu()

    def used(self) -> dict[str, float]:
        return {
            "host_cpu_s": round(time.process_time() - self._host, 3),
            "worker_cpu_s": round(descendants_cpu() - self._workers, 3),
        }


def descendants_cpu() -> float:
    """CPU seconds, of all threads, of every live process that descends from this one."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(name)] = int(fields[1])
        seconds[int(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(seconds.get(pid, 0.0) for pid in mine - {os.getpid()})


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p99 and the largest; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {"p50": round(pct(ordered, 0.5), 3), "p99": round(pct(ordered, 0.99), 3), "max": round(ordered[-1], 3)}


def failures(records: Iterable[RequestRecord]) -> dict[str, int]:
    return dict(Counter(record.error for record in records if record.error is not None))


def is_good(record: RequestRecord, *, every_gap: bool = False) -> bool:
    """Within both limits: by its mean time between tokens, or by its longest one."""
    if record.error is not None or not record.times:
        return False
    gap = record.max_gap_ms if every_gap else record.mean_gap_ms
    return record.first_token_ms <= FIRST_TOKEN_LIMIT_MS and gap <= BETWEEN_TOKENS_LIMIT_MS


def summary(records: Sequence[RequestRecord], since: float, until: float) -> dict[str, Any]:
    """Figures of requests that ran from ``since`` to ``until``. Those that failed count as such, and as not good."""
    seconds = until - since
    whole = [record for record in records if record.error is None]
    good = sum(map(is_good, records))
    num_tokens = sum(record.num_tokens for record in whole)
    return {
        "requests": len(records),
        "failures": failures(records),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(record.num_prompt_tokens for record in records),
        "output_tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds, 1),
        "requests_per_s": round(len(whole) / seconds, 2),
        "first_token_ms": spread(record.first_token_ms for record in whole),
        "between_tokens_ms": spread(gap for record in whole for _, gap in record.gaps()),
        "mean_gap_ms": spread(record.mean_gap_ms for record in whole if record.num_tokens > 1),
        "longest_gap_ms": spread(record.max_gap_ms for record in whole if record.num_tokens > 1),
        "good_share": round(good / len(records), 4) if records else None,
        "good_per_s": round(good / seconds, 2),
        "good_share_by_every_gap": (
            round(sum(is_good(record, every_gap=True) for record in records) / len(records), 4) if records else None
        ),
        "client_late_ms": spread((record.sent - record.due) * 1e3 for record in records),
    }


def series(records: Sequence[RequestRecord], since: float) -> dict[str, Any]:
    """What a plot shows over time: each request, and the times between tokens in bins."""
    bins: dict[int, list[float]] = {}
    for record in records:
        for end, gap in record.gaps():
            bins.setdefault(int((end - since) / _BIN_SECONDS), []).append(gap)
    return {
        "requests_over_time": {
            "columns": ["due_s", "first_token_ms", "longest_gap_ms", "prompt_tokens", "output_tokens"],
            "rows": [
                [
                    round(record.due - since, 4),
                    round(record.first_token_ms, 2),
                    round(record.max_gap_ms, 2),
                    record.num_prompt_tokens,
                    record.num_tokens,
                ]
                for record in records
                if record.times
            ],
        },
        "gaps_over_time": {
            "columns": ["s", "p50_ms", "max_ms"],
            "rows": [
                [round((i + 0.5) * _BIN_SECONDS, 2), round(pct(gaps, 0.5), 3), round(max(gaps), 3)]
                for i, gaps in sorted(bins.items())
            ],
        },
    }
