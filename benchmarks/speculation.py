"""Tokens a second with and without drafts, in turns over engines in one run: without, and one for each way to propose.
JSON to stdout, a line a task, number of streams and way.

    python benchmarks/speculation.py [--model smollm2-135m] [--tasks edit json free tools] [--streams 1 16]
        [--ways suffix ngram_worker] [--tokens 200] [--rounds 3] [--set KEY=JSON]

``edit``: a file of the prompt once more, with a name changed, after an example of the same; ``json``: an object of a
bounded schema whose keys are long, after an example; ``free``: a story; ``tools``: as many sessions as streams, of 20
turns that follow each other: in each one a tool's result comes, and that of an earlier turn is asked for again. Greedy,
past end-of-sequence tokens but for ``json``, which ends when it is complete. ``ratio``: the rate with drafts by that
without, of the same round, the median of the rounds; ``equal``: the share of requests whose tokens are the same in
both: in 16 bits a step of several tokens may round in another way. The prompts are in the prefix cache, from a round
that does not count. "none" drafts what a grammar forces all the same; "bare" does not, and is in the run for ``json``.
"cpu_ratio" is that of the worker's CPU time, which says more than "ratio" where other programs run and the worker has
one thread (``--threads 1``). "ms_a_step" is from one step to the next, "host_ms" the host's CPU time for it: of the one
beside which the other is measured, and of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

from draft_costs import cpu_seconds

from aengine import AsyncLLM, SamplingParams, StructuredOutput
from aengine.engine.grammar_gate import ALWAYS, IN_SMALL_BATCHES, JumpForward
from aengine.engine.replicas import replica

EXAMPLE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
FILE = '''class Account:
    """What a customer has."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        """Add an amount to the balance."""
        if amount <= 0:
            raise ValueError("an amount is more than 0")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        """Take an amount from the balance."""
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance

    def transfer(self, other, amount):
        """Give an amount to another account."""
        self.withdraw(amount)
        other.deposit(amount)
        self.history.append(("transfer", amount))
        return self.balance
'''
NAMES = ("Account", "Wallet", "Purse", "Deposit", "Ledger", "Safe", "Fund", "Reserve")
KEYS = ("customer_reference_number", "preferred_delivery_address", "estimated_arrival_time", "special_instructions")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": 24} for key in KEYS}
    | {"is_confirmed_by_customer": {"type": "boolean"}, "number_of_parcels_in_total": {"type": "integer"}},
    "required": [*KEYS, "is_confirmed_by_customer", "number_of_parcels_in_total"],
    "additionalProperties": False,
}
STORIES = ("a lighthouse keeper who paints", "two rivers that meet after the rain", "a clock that was never late")


TOWNS = ("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Seoul", "Tunis", "Turin", "Dakar", "Perth", "Sofia")
TURNS = 20


def turn_of(session: int, turn: int) -> tuple[str, str]:
    """Return what a tool said in this turn, and what is asked for behind it: the result of an earlier turn again."""

    def result(number: int) -> str:
        rng = random.Random(100 * session + number)
        town, sky = rng.choice(TOWNS), rng.choice(("clear", "cloudy", "rainy", "windy"))
        return f"```\nget_weather: {town}, {rng.randint(-9, 39)} degrees, {sky}, wind {rng.randint(1, 99)} km/h\n```\n"

    earlier = max(0, turn - 1 - (session + turn) % 3)
    asked = f"\nTool result {turn}:\n{result(turn)}\nTool result {earlier} again:\n"
    return asked, result(earlier)


async def tool_rate(engine: AsyncLLM, sessions: int, tokens: int) -> tuple[float, list[Any]]:
    """Run all sessions, the turns of each one after the other. What the prompt has of earlier turns is right,
    so that all engines get the same prompts."""

    async def session(number: int) -> list[Any]:
        text, answers = "".join(turn_of(number, 0)), []
        for turn in range(1, 1 + TURNS):
            asked, answer = turn_of(number, turn)
            answers.append(await engine.generate(text + asked, params))
            text += asked + answer
        return answers

    params = SamplingParams(temperature=0, max_tokens=min(tokens, 32), ignore_eos=True)
    begun = time.perf_counter()
    answers = [one for some in await asyncio.gather(*map(session, range(sessions))) for one in some]
    return sum(len(one.token_ids) for one in answers) / (time.perf_counter() - begun), answers


def prompt_of(task: str, number: int) -> Any:
    """Return a prompt or a chat."""
    if task == "edit":
        name = NAMES[number % len(NAMES)] + ("" if number < len(NAMES) else str(number))
        code = FILE.replace("Account", name)
        parts = (EXAMPLE, EXAMPLE.replace("values", "numbers"), code)
        first, changed, second = (f"```python\n{part}```" for part in parts)
        return (
            f"{first}\n\nThe same with `values` renamed to `numbers`:\n\n{changed}\n\n{second}\n\n"
            + "The same with `balance` renamed to `credit`:\n\n```python\n"
        )
    if task == "json":
        asked = (
            "An order of four parcels for Mary Hill, 14 Station Road, which should arrive at noon. Describe it as JSON."
        )
        return [{"role": "user", "content": f"Order {number}. {asked}"}]
    return [{"role": "user", "content": f"Tell a story about {STORIES[number % len(STORIES)]}, number {number}."}]


def params_of(task: str, tokens: int) -> SamplingParams:
    if task == "json":
        return SamplingParams(temperature=0, max_tokens=tokens, structured_output=StructuredOutput(json_schema=SCHEMA))
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


async def rate(engine: AsyncLLM, task: str, streams: int, tokens: int) -> tuple[float, list[Any]]:
    if task == "tools":
        return await tool_rate(engine, streams, tokens)
    params = params_of(task, tokens)
    begun = time.perf_counter()
    prompts = [prompt_of(task, i) for i in range(streams)]
    calls = [engine.generate(one, params) if isinstance(one, str) else engine.chat(one, params) for one in prompts]
    answers = await asyncio.gather(*calls)
    return sum(len(one.token_ids) for one in answers) / (time.perf_counter() - begun), list(answers)


async def compare(engines: dict[str, AsyncLLM], task: str, streams: int, args: argparse.Namespace) -> None:
    names = [name for name in engines if task == "json" or name != "bare"]
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}  # the worker's
    answers: dict[str, list[Any]] = {}
    host: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        await rate(engines[name], task, streams, args.tokens)
    before = {name: engines[name].statistics() for name in names}
    for _ in range(args.rounds):
        for name in names:
            begun, begun_host = cpu_seconds(engines[name]), time.process_time()
            value, answers[name] = await rate(engines[name], task, streams, args.tokens)
            rates[name].append(value)
            cpu[name].append(cpu_seconds(engines[name]) - begun)
            host[name].append(time.process_time() - begun_host)
    base = names[0]
    steps = {name: engines[name].statistics().num_steps - before[name].num_steps for name in names}
    lengths = {name: sum(len(one.token_ids) for one in answers[name]) * args.rounds for name in names}
    ms = {name: 1e3 * lengths[name] / statistics.median(rates[name]) / steps[name] for name in names}
    for name in names[1:]:
        after = engines[name].statistics()
        pairs = list(zip(answers[base], answers[name], strict=True))
        num_tokens = after.generated_tokens - before[name].generated_tokens
        result = {
            "task": task,
            "streams": streams,
            "speculation": name,
            "beside": base,
            "tok_s": [round(statistics.median(rates[which]), 1) for which in (base, name)],
            "ratio": round(statistics.median(b / a for a, b in zip(rates[base], rates[name], strict=True)), 3),
            "cpu_ratio": round(statistics.median(a / b for a, b in zip(cpu[base], cpu[name], strict=True)), 3),
            "drafted": after.drafted_tokens - before[name].drafted_tokens,
            "accepted": after.accepted_tokens - before[name].accepted_tokens,
            "tokens": num_tokens,
            "tokens_a_step": round(num_tokens / steps[name], 2),
            # of both: a step, from one to the next, and the host's CPU time for it
            "ms_a_step": [round(ms[one], 3) for one in (base, name)],
            "host_ms": [round(1e3 * sum(host[one]) / steps[one], 3) for one in (base, name)],
            "equal": sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs),
        }
        print(json.dumps(result), flush=True)


async def start(stack: AsyncExitStack, model: str, name: str, settings: dict[str, Any]) -> AsyncLLM:
    for kind, jumps in (("ALWAYS", ALWAYS), ("IN_SMALL_BATCHES", IN_SMALL_BATCHES)):
        setattr(replica, kind, JumpForward(0, 0.0) if name == "bare" else jumps)
    speculation = "none" if name == "bare" else name
    return await stack.enter_async_context(AsyncLLM(model, speculation=speculation, **settings))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tasks", nargs="+", default=["edit", "json", "free"])
    parser.add_argument("--ways", nargs="+", default=["suffix"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--set", action="append", default=[], help="a setting of all engines, KEY=JSON")
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 2 << 30,
    }  # they share a device
    settings |= {"num_threads": args.threads} if args.threads else {}
    settings |= {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    async with AsyncExitStack() as stack:
        names = (*(["bare"] if "json" in args.tasks else []), "none", *args.ways)
        engines = {name: await start(stack, args.model, name, settings) for name in names}
        for engine in engines.values():
            await rate(engine, "free", 1, 8)
            await rate(engine, "json", 1, 8)
        for task in args.tasks:
            for streams in args.streams:
                await compare(engines, task, streams, args)


if __name__ == "__main__":
    asyncio.run(main())
