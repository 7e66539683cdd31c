"""Which replica a request should go to: the engine's rule beside others, by a simulation. A table to stdout.

    python benchmarks/routing.py [--replicas 2] [--requests 2000] [--seed 0]

Real routers and schedulers over workers whose steps take _STEP + _PROMPT_TOKEN x prompt tokens + _ROW x requests that
decode, in simulated time: the figures depend on nothing but the seed. KV memory is scarce: what all replicas cache
alike is missing for something else.

  rules      router: the engine's; round robin; least: the fewest completions; one: a single replica with the memory
             of all that is as many times as fast, which no rule can beat
  chats      clients that ask again some seconds after each answer; histories grow; one of eight system prompts
  agents     few long beginnings, of which some are asked for much more than others
  unrelated  prompts that have nothing in common, from 50 to 4,000 tokens
  burst      all at once, half of them with the same beginning

hit rate: share of the prompt tokens that were cached. Times in simulated milliseconds.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from aengine.engine.replicas.load_balancer import LoadBalancer
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, SchedulerOutput, int32
from aengine.params import SamplingParams

_BLOCK_SIZE = 16
_NUM_BLOCKS = 6_000  # of each replica: some 100,000 tokens
_STEP, _PROMPT_TOKEN, _ROW = 4e-3, 15e-6, 15e-6  # seconds; about a model of 8B on a large GPU


class Replica:
    """A scheduler and a worker, whose steps are one after the other."""

    def __init__(self, num_blocks: int, speed: float) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            kv_groups=[KVCacheGroup("full", _BLOCK_SIZE)],
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=32768,
        )
        self.is_busy = False
        self._speed = speed
        self._left: dict[int, int] = {}  # row: tokens to compute before it samples
        self._answer: ModelRunnerOutput | None = None

    def begin_step(self, rng: random.Random) -> float | None:
        """Begin one. Returns its seconds; None: there is nothing to do."""
        out = self.scheduler.schedule()
        if out is None:
            return None
        self.is_busy = True
        self._answer = self._compute(out, rng)
        num_prompt = sum(n for n in out.num_scheduled_tokens if n > 1)
        return (_STEP + _PROMPT_TOKEN * num_prompt + _ROW * len(out.req_idx)) / self._speed

    def _compute(self, out: SchedulerOutput, rng: random.Random) -> ModelRunnerOutput:
        for new in out.new_requests:
            self._left[new.req_idx] = len(new.token_ids) - new.num_computed_tokens
        token_ids = int32()
        for row, num_tokens in zip(out.req_idx, out.num_scheduled_tokens, strict=True):
            self._left[row] = max(0, self._left[row] - num_tokens)
            token_ids.append(-1 if self._left[row] else rng.randrange(3, 30_000))
        return ModelRunnerOutput(out.step_id, token_ids)

    def end_step(self) -> list[Request]:
        """End it. Returns the requests that got a token."""
        assert self._answer is not None
        self.is_busy = False
        return [request for request, _, _ in self.scheduler.update(self._answer)[0]]


class Ask(NamedTuple):
    """A request of a workload."""

    prompt: list[int]
    num_tokens: int
    client: int = -1  # whose next one follows the answer


class Workload:
    """What is asked, and when: ``first`` at a time each; ``follow`` after an answer."""

    def __init__(self, name: str, num_requests: int, rng: random.Random) -> None:
        self._rng = rng
        self._left = num_requests
        self.first: list[tuple[float, Ask]] = list(getattr(self, f"_{name}")(num_requests))

    def follow(self, ask: Ask, tokens: list[int]) -> tuple[float, Ask] | None:
        """What the client asks after an answer, and how many seconds later. ``tokens``: the prompt and the answer."""
        if ask.client < 0 or self._left <= 0:
            return None
        self._left -= 1
        history = tokens if len(tokens) < 6000 else self._system[ask.client % 8]
        return self._rng.expovariate(1 / 4), Ask(history + self._ids(20, 200), self._rng.randint(50, 250), ask.client)

    def _ids(self, least: int, most: int) -> list[int]:
        return [self._rng.randrange(3, 30_000) for _ in range(self._rng.randint(least, most))]

    def _chats(self, num_requests: int) -> Iterator[tuple[float, Ask]]:
        self._system = [self._ids(300, 1500) for _ in range(8)]
        clients = max(1, num_requests // 12)
        self._left -= clients
        for client in range(clients):
            prompt = self._system[client % 8] + self._ids(20, 200)
            yield self._rng.random() * 10, Ask(prompt, self._rng.randint(50, 250), client)

    def _agents(self, num_requests: int) -> Iterator[tuple[float, Ask]]:
        beginnings = [self._ids(2000, 6000) for _ in range(40)]
        for time in self._arrivals(num_requests, 60):
            beginning = beginnings[min(39, int(self._rng.expovariate(1 / 10)))]
            yield time, Ask(beginning + self._ids(20, 300), self._rng.randint(20, 100))

    def _unrelated(self, num_requests: int) -> Iterator[tuple[float, Ask]]:
        for time in self._arrivals(num_requests, 40):
            yield time, Ask(self._ids(50, self._rng.choice((200, 1000, 4000))), self._rng.randint(10, 400))

    def _burst(self, num_requests: int) -> Iterator[tuple[float, Ask]]:
        beginning = self._ids(3000, 3000)
        for _ in range(num_requests // 4):
            yield (
                0.0,
                Ask((beginning if self._rng.random() < 0.5 else []) + self._ids(100, 800), self._rng.randint(50, 400)),
            )

    def _arrivals(self, num_requests: int, rate: float) -> Iterator[float]:
        time = 0.0
        for _ in range(num_requests):
            time += self._rng.expovariate(rate)
            yield time


Choose = Callable[[Request], int]


def simulate(name: str, rule: str, num_replicas: int, num_requests: int, seed: int) -> list[str]:
    """One row of the table."""
    rng = random.Random(seed)
    workload = Workload(name, num_requests, rng)
    scale = num_replicas if rule == "one" else 1
    replicas = [Replica(_NUM_BLOCKS * scale, scale) for _ in range(num_replicas // scale)]
    router = LoadBalancer([replica.scheduler for replica in replicas])
    turns = count()

    def choose(request: Request) -> int:
        if rule == "router":
            return router.route(request, range(len(replicas)))
        if rule == "least":
            return min(range(len(replicas)), key=lambda i: replicas[i].scheduler.num_running + len(waiting[i]))
        return next(turns) % len(replicas)

    events: list[tuple[float, int, Ask | int]] = []  # an Ask arrives, or the step of a replica ends
    order = count()
    for time, ask in workload.first:
        heapq.heappush(events, (time, next(order), ask))
    asked: dict[Request, tuple[float, Ask]] = {}
    waiting: list[set[Request]] = [set() for _ in replicas]
    to_first: list[float] = []
    now = 0.0
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Ask):
            request = Request(
                str(next(order)),
                event.prompt,
                SamplingParams(),
                seed=0,
                max_num_tokens=len(event.prompt) + event.num_tokens,
                stop_token_ids=frozenset(),
                arrival_time=now,
            )
            asked[request] = now, event
            index = choose(request)
            waiting[index].add(request)
            replicas[index].scheduler.add_request(request)
        else:
            index = event
            for request in replicas[index].end_step():
                begun, ask = asked[request]
                if len(request.token_ids) == len(ask.prompt) + 1:
                    to_first.append(now - begun)
                if request.finish_reason is not None:
                    if rule == "router":
                        router.loads[index].remove(request.request_id)
                    following = workload.follow(ask, list(request.token_ids))
                    if following is not None:
                        heapq.heappush(events, (now + following[0], next(order), following[1]))
        replica = replicas[index]
        if not replica.is_busy:
            seconds = replica.begin_step(rng)
            if seconds is not None:
                heapq.heappush(events, (now + seconds, next(order), index))
                newest = replica.scheduler.newest_step
                for request in newest.newcomers if newest is not None else ():
                    waiting[index].discard(request)
                    if rule == "router":
                        router.loads[index].begin(request.request_id)
    hits = sum(replica.scheduler.prefix_cache_hits for replica in replicas)
    queries = sum(replica.scheduler.prefix_cache_queries for replica in replicas)
    ends = statistics.quantiles(to_first, n=100)
    figures = hits / queries, statistics.mean(to_first) * 1e3, ends[49] * 1e3, ends[98] * 1e3, now
    return [name, rule, f"{figures[0]:.3f}", *(f"{value:.0f}" for value in figures[1:4]), f"{figures[4]:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    heads = ["workload", "rule", "hit rate", "first token: mean", "median", "p99", "all done after (s)"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for name in ("chats", "agents", "unrelated", "burst"):
        for rule in ("router", "round robin", "least", "one"):
            print("| " + " | ".join(simulate(name, rule, args.replicas, args.requests, args.seed)) + " |", flush=True)


if __name__ == "__main__":
    main()
