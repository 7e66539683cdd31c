"""The workloads of traffic.py. Each is a coroutine that takes a `Run` and its sizes, and reports one or more results.

Lengths, times of arrival and thinking depend on the seed alone; token ids also on the round, so that a prefix cache
finds only what the workload shares on purpose.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import time
from collections.abc import Callable
from typing import Any

from traffic_client import Client, Cpu, RequestRecord, failures, series, spread, summary

RARE = {
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {200: 2.0, 300: -2.0},
    "logprobs": 5,
}


class Run:
    """One workload of one engine: what it draws from, and where its results go."""

    def __init__(
        self, client: Client, name: str, seed: int, round_number: int, report: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.client = client
        self.lengths = random.Random(f"{seed} {name}")
        self._ids = random.Random(f"{seed} {name} {round_number}")
        self._report = report
        self._cpu = Cpu()
        self._statistics = self._engine_statistics()

    def prompt(self, num_tokens: int) -> list[int]:
        """Fresh random token ids."""
        return [self._ids.randint(100, 4000) for _ in range(num_tokens)]

    def lognormal(self, mean: float, sigma: float, low: int, high: int) -> int:
        value = self.lengths.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return min(max(round(value), low), high)

    def report(self, name: str, result: dict[str, Any]) -> None:
        """Report a result, with what CPU it took and what the engine counted meanwhile; the next one begins here."""
        result |= self._cpu.used()
        now = self._engine_statistics()
        if now is not None and self._statistics is not None:
            counted = {key: now[key] - self._statistics[key] for key in now}
            queries = counted.get("prefix_cache_queries", 0)
            hits = counted.get("prefix_cache_hits", 0)
            result["engine_counted"] = counted | {"hit_rate": round(hits / queries, 4) if queries else None}
        waited = getattr(self.client.adapter, "steps_waited", None)
        if waited is not None:
            result["steps_waited"] = waited()
        self._report(name, result)
        self._cpu, self._statistics = Cpu(), self._engine_statistics()

    def _engine_statistics(self) -> dict[str, int] | None:
        statistics = getattr(self.client.adapter, "statistics", None)
        return None if statistics is None else statistics()


async def arrivals(
    run: Run,
    *,
    rate: float,
    seconds: float = 12.0,
    cv: float = 1.0,
    prompt_mean: float = 250,
    output_mean: float = 200,
    sigma: float = 0.8,
    most_prompt: int = 4000,
    most_output: int = 1500,
) -> None:
    """Requests at random times. ``cv``: the coefficient of variation of the times between them, 1 for Poisson arrivals,
    more for bursts (gamma-distributed times). ``sigma``: of the log-normal lengths."""
    shape, offset = 1 / cv**2, 0.0
    plan = []
    while True:
        offset += run.lengths.gammavariate(shape, 1 / (shape * rate))
        if offset >= seconds:
            break
        num_prompt = run.lognormal(prompt_mean, sigma, 8, most_prompt)
        plan.append((offset, run.prompt(num_prompt), run.lognormal(output_mean, sigma, 4, most_output)))
    begun = time.perf_counter()
    records = await run.client.open_loop(plan)
    result = summary(records, begun, time.perf_counter())
    run.report("poisson" if cv == 1 else "bursty", result | series(records, begun))


async def prompts_beside_decodes(
    run: Run,
    *,
    streams: int = 64,
    stream_prompt: int = 128,
    stream_tokens: int = 6000,
    prompts: int = 20,
    prompt_tokens: int = 4096,
    answer_tokens: int = 8,
    interval: float = 0.15,
    quiet: float = 1.0,
) -> None:
    """Long prompts, one every ``interval`` seconds, while streams decode: the prompts' first token, and the streams'
    gaps, beside what these are without prompts."""
    plan = [(i * interval, run.prompt(prompt_tokens), answer_tokens) for i in range(prompts)]
    async with run.client.steady([run.prompt(stream_prompt) for _ in range(streams)], stream_tokens) as steady:
        await asyncio.sleep(quiet)
        begun = time.perf_counter()
        records = await run.client.open_loop(plan)
        await asyncio.sleep(max(0.0, begun + prompts * interval - time.perf_counter()))  # as long for all engines
        ended = time.perf_counter()
    run.report(
        "prompts_beside_decodes",
        {
            "failures": failures([*steady, *records]),
            "seconds": round(ended - begun, 3),
            "first_token_ms": spread(record.first_token_ms for record in records if record.times),
            "between_tokens_ms": _gaps(steady, begun, ended),
            "between_tokens_ms_before": _gaps(steady, begun - quiet, begun),
            "tokens_per_s": _tokens_per_s(steady, begun, ended),
        }
        | series([*steady, *records], begun),
    )


async def shared_prefix(
    run: Run, *, requests: int = 64, prefix_tokens: int = 2500, own_tokens: int = 64, output_tokens: int = 128
) -> None:
    """Requests at once whose prompts begin alike: with nothing in the cache, then again with other ends."""
    prefix = run.prompt(prefix_tokens)
    for state in ("cold", "warm"):
        prompts = [(prefix + run.prompt(own_tokens), output_tokens) for _ in range(requests)]
        begun = time.perf_counter()
        records = await run.client.at_once(prompts)
        run.report(f"shared_prefix_{state}", summary(records, begun, time.perf_counter()))


async def agents(
    run: Run,
    *,
    agents: int = 16,
    turns: int = 20,
    first_prompt: int = 1000,
    answer_tokens: int = 64,
    tool_tokens: int = 200,
    think_seconds: float = 0.1,
) -> None:
    """Agents, each of which adds its answer and a tool's result to its context, after some time, and asks again."""
    records: list[RequestRecord] = []
    plans = [
        [(run.lengths.expovariate(1 / think_seconds), run.prompt(tool_tokens)) for _ in range(turns)]
        for _ in range(agents)
    ]
    first_prompts = [run.prompt(first_prompt) for _ in range(agents)]

    async def agent(context: list[int], plan: list[tuple[float, list[int]]]) -> None:
        for pause, tool_result in plan:
            await asyncio.sleep(pause)
            record = await run.client.request(context, answer_tokens, wants_ids=True)
            records.append(record)
            context = context + (record.token_ids or run.prompt(answer_tokens)) + tool_result

    begun = time.perf_counter()
    await asyncio.gather(*map(agent, first_prompts, plans))
    result = summary(records, begun, time.perf_counter())
    turn_ms = spread((record.times[-1] - record.sent) * 1e3 for record in records if record.times)
    run.report("agents", result | {"turn_ms": turn_ms} | series(records, begun))


async def skewed_lengths(
    run: Run,
    *,
    short: int = 60,
    short_tokens: int = 512,
    long: int = 4,
    long_tokens: int = 8192,
    output_tokens: int = 256,
) -> None:
    """A batch of many short contexts and a few long ones, at once."""
    prompts = [run.prompt(n) for n in [short_tokens] * short + [long_tokens] * long]
    begun = time.perf_counter()
    records = await run.client.at_once([(prompt, output_tokens) for prompt in prompts])
    result = summary(records, begun, time.perf_counter())
    firsts = [record.times[0] for record in records if record.times]
    if firsts:
        since, until = max(firsts), min(record.times[-1] for record in records if record.times)
        if until > since:
            result["decode_between_tokens_ms"] = _gaps(records, since, until)
            result["decode_tokens_per_s"] = _tokens_per_s(records, since, until)
    run.report("skewed_lengths", result)


async def rare_parameters(
    run: Run, *, streams: int = 16, stream_prompt: int = 128, stream_tokens: int = 6000, quiet: float = 0.5
) -> None:
    """The engine's first request with penalties, a bias, top_p and log-probabilities, beside greedy streams: how long
    these wait; then a second one."""
    prompts = [run.prompt(stream_prompt) for _ in range(streams)]
    async with run.client.steady(prompts, stream_tokens, temperature=0.0) as steady:
        for name in ("first", "again"):
            begun = time.perf_counter()
            await asyncio.sleep(quiet)
            asked = time.perf_counter()
            record = await run.client.request(run.prompt(64), 16, temperature=0.8, sampling=RARE)
            ended = time.perf_counter()
            await asyncio.sleep(0.1)  # for gaps that began in this time to end
            run.report(
                f"rare_parameters_{name}",
                {
                    "failures": failures([*steady, record]),
                    "seconds": round(ended - asked, 3),
                    "first_token_ms": spread([record.first_token_ms] if record.times else []),
                    "longest_gap_ms": spread([record.max_gap_ms] if record.times else []),
                    "between_tokens_ms": _gaps(steady, asked, ended),
                    "between_tokens_ms_before": _gaps(steady, begun, asked),
                },
            )


async def blocked_loop(
    run: Run,
    *,
    name: str = "blocked_loop",
    streams: int = 64,
    prompt_tokens: int = 64,
    output_tokens: int = 2000,
    held: float = 0.05,
    free: float = 0.05,
    pairs: int = 1,
) -> None:
    """Tokens a second while other code holds the event loop for ``held`` of every ``held + free`` seconds, against the
    same without."""
    rates: list[tuple[float, float]] = []
    failed: list[RequestRecord] = []
    for _ in range(pairs):
        pair = []
        for held_now in (0.0, held):
            blocker = asyncio.create_task(_hold(held_now, free)) if held_now else None
            try:
                records = await run.client.at_once([(run.prompt(prompt_tokens), output_tokens) for _ in range(streams)])
            finally:
                if blocker is not None:
                    blocker.cancel()
            failed += [record for record in records if record.error]
            whole = [record for record in records if not record.error]
            since, until = max(r.times[0] for r in whole), max(r.times[-1] for r in whole)
            pair.append(_tokens_per_s(whole, since, until))
        rates.append((pair[0], pair[1]))
    ratios = [round(blocked / undisturbed, 4) for undisturbed, blocked in rates]
    run.report(
        name,
        {
            "failures": failures(failed),
            "tokens_per_s_undisturbed": [undisturbed for undisturbed, _ in rates],
            "tokens_per_s": [blocked for _, blocked in rates],
            "ratio": sorted(ratios)[len(ratios) // 2],
            "ratios": ratios,
        },
    )


async def blocked_arrivals(
    run: Run,
    *,
    streams: int = 8,
    stream_prompt: int = 64,
    stream_tokens: int = 6000,
    requests: int = 20,
    pause: float = 0.13,
    held: float = 0.05,
    free: float = 0.05,
) -> None:
    """Requests that come between the blocks of a loop that is often blocked, beside streams: what steps were given
    ahead for these must not keep a request waiting."""
    async with run.client.steady([run.prompt(stream_prompt) for _ in range(streams)], stream_tokens) as steady:
        blocker = asyncio.create_task(_hold(held, free))
        try:
            await asyncio.sleep(1.0)
            begun = time.perf_counter()
            records = []
            for _ in range(requests):
                records.append(await run.client.request(run.prompt(64), 4))
                await asyncio.sleep(pause)
            ended = time.perf_counter()
        finally:
            blocker.cancel()
    result = summary(records, begun, ended)
    run.report("blocked_arrivals", result | {"failures": failures([*steady, *records])})


async def _hold(held: float, free: float) -> None:
    while True:
        time.sleep(held)  # what this measures is a loop that is blocked
        await asyncio.sleep(free)


def _gaps(records: list[RequestRecord], since: float, until: float) -> dict[str, float] | None:
    return spread(gap for record in records for _, gap in record.gaps(since, until))


def _tokens_per_s(records: list[RequestRecord], since: float, until: float) -> float:
    """Tokens that came after ``since``, and not after ``until``, a second."""
    came = sum(size for r in records for at, size in zip(r.times, r.sizes) if since < at <= until)
    return round(came / (until - since), 1)


WORKLOADS: dict[str, Callable[..., Any]] = {
    "rare_parameters": rare_parameters,
    "poisson": arrivals,
    "bursty": arrivals,
    "prompts_beside_decodes": prompts_beside_decodes,
    "shared_prefix": shared_prefix,
    "agents": agents,
    "skewed_lengths": skewed_lengths,
    "blocked_loop": blocked_loop,
    "blocked_arrivals": blocked_arrivals,
}


def all_sizes(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a workload, those that were not given included."""
    parameters = inspect.signature(WORKLOADS[name]).parameters.values()
    return {p.name: given.get(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
