"""Which idle KV blocks to give away: rules compared on agents' traffic; a table, or JSON with --json.

    python benchmarks/eviction.py [--seconds 200] [--pools 0.15,0.25,0.5] [--mixes agents,mixed] [--policies lru,...]

The scheduler is the engine's own; the worker is a clock: a step takes --step-seconds, and --token-seconds more for each
token. Sessions come and go, so that --agents of them are there at any time, with the turns and gaps of agent_traces.py.

  agents     these alone
  mixed      and requests that never come back, of 2,000 tokens, half of them the beginning of all, --singles a second
  tools      a third of the gaps are 5 times shorter, another third 5 times longer, and keep= says so
  half       every other session does not say what it is

  lru          the last use longest ago goes first
  touched      as lru, and a request that is queued counts as a use of what it will find
  segmented F  blocks that were found since they were computed go after the others, F of the pool at most
  kept F       KeptBlocks with keep= of every session, F of the pool at most; a session's last turn has none
  unsaid F     as kept, but the last turn has it too: what nobody will ask for stays kept for 2 minutes
  survival     the session whose chance to come back in 10 s, by the time since its last turn, is least goes first
  soonest      the session whose keep ends first goes first
  slowest      the session whose last turn, less the seconds of keep, is longest ago goes first
  oracle       the session whose next turn comes last goes first: it knows when

hit: tokens found of those that earlier turns of the session had computed; hit_silent: of every other session. again:
tokens computed a second time. first_mean, first_p99: seconds to the first token of a turn that is not the first.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from agent_traces import LONG_GAP, MEDIAN_GAP, Agent, draw_agents
from engine_bench import pct

from aengine.engine.keeping.keeping import blocks_to_keep
from aengine.engine.keeping.kept_blocks import KeptBlocks, KeptHits, Session
from aengine.engine.scheduler.block_pool import IdleBlocks
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, SchedulerOutput, int32
from aengine.params import SamplingParams

BLOCK_SIZE = 32
PARAMS = SamplingParams()
KEEP = 120.0
POLICIES = "lru,touched,segmented 0.5,kept 0.5,kept 0.75,kept 0.9,kept 1,unsaid 0.9,survival,soonest,slowest,oracle"


@dataclass
class Visit:
    """A request under way: a turn of an agent, or one that never comes back (``agent`` is None)."""

    request: Request
    agent: Agent | None
    number: int  # which turn it is
    arrival: float
    num_known: int  # tokens of its prompt that its session has had computed before
    first: float = 0.0  # when its first token came


class Segmented(IdleBlocks):
    """Blocks that were found by a request since they were computed go after those that never were; the former are a
    share of the pool at most, beyond which the one whose last use is longest ago counts as never found."""

    __slots__ = ("_found", "_most", "_protected")

    def __init__(self, num_blocks: int, share: float) -> None:
        super().__init__(num_blocks)
        self._most = int(num_blocks * share)
        self._found: set[int] = set()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        yield from self._order
        yield from self._protected

    def add(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            (self._protected if block_id in self._found else self._order)[block_id] = None
            if len(self._protected) > self._most:
                oldest, _ = self._protected.popitem(last=False)
                self._found.discard(oldest)
                self._order[oldest] = None

    def remove(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._found.add(block_id)
            del (self._protected if block_id in self._protected else self._order)[block_id]

    def pop(self) -> int:
        block_id, _ = (self._order or self._protected).popitem(last=False)
        self._found.discard(block_id)
        return block_id


class Ranked(KeptBlocks):
    """All that comes back is kept, and the session that ``rank`` puts highest gives way first."""

    __slots__ = ("rank",)

    def __init__(self, num_blocks: int, rank: Callable[[float], float]) -> None:
        super().__init__(num_blocks, 1.0, KeptHits())
        self.rank = rank

    def _let_one_go(self) -> int:
        self._giving = max(self._sessions, key=lambda session: self.rank(self._sessions[session].until))
        return super()._let_one_go()


@dataclass
class Simulation:
    """One run. Times are virtual."""

    args: argparse.Namespace
    policy: str
    mix: str
    pool_share: float
    now: float = 0.0
    visits: dict[int, Visit] = field(default_factory=dict)  # by id() of their requests
    done: list[Visit] = field(default_factory=list)

    def __post_init__(self) -> None:
        args = self.args
        self.order = count()
        self.rng = random.Random(args.seed)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        num_blocks = int(args.agents * args.mean * self.pool_share) // BLOCK_SIZE
        self.scheduler = Scheduler(
            num_blocks=max(num_blocks, 2 * args.most // BLOCK_SIZE),
            kv_groups=[KVCacheGroup("full", BLOCK_SIZE)],
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=2 * args.most,
            new_idle=self._new_idle(),
        )
        self.to_go: dict[int, int] = {}  # row -> tokens still to compute before it samples
        self.batch = 0
        self._new_agents(args.agents, spread=30.0)
        if self.mix == "mixed":
            self._at(0.0, self._single)

    def _new_idle(self) -> Callable[[int], IdleBlocks]:
        name, _, share = self.policy.partition(" ")
        if name in ("kept", "unsaid"):
            return partial(KeptBlocks, fraction=float(share), hits=KeptHits())
        if name == "segmented":
            return partial(Segmented, share=float(share))
        if name == "oracle":
            return partial(Ranked, rank=lambda next_turn: next_turn)
        if name == "survival":
            return partial(Ranked, rank=lambda last_turn: -chance(self.now - last_turn, float(share or 10)))
        if name == "soonest":
            return partial(Ranked, rank=lambda until: -until)
        if name == "slowest":
            return partial(Ranked, rank=lambda begin: -begin)
        return IdleBlocks

    # -- traffic

    def _at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.order), do))

    def _new_agents(self, number: int, spread: float) -> None:
        args = self.args
        self.batch += 1
        sizes = {name: getattr(args, name) for name in ("least", "most", "mean", "shared")}
        drawn = draw_agents(
            number, seed=args.seed * 1000 + self.batch, num_turns=None, num_out=32, spread=spread, **sizes
        )
        for agent in drawn:
            agent.name = f"{self.batch}-{agent.name}"
            agent.prefix[: args.shared] = beginning(args.shared)
            agent.turns = agent.turns[: max(2, len(agent.turns) // args.fewer_turns)]
            hints = random.Random(agent.name)
            for turn in agent.turns:
                turn.hint = hints.choice((0.2, 1.0, 5.0)) if self.mix == "tools" else 1.0
                turn.gap *= turn.hint
            self._at(self.now + agent.start, partial(self._ask, agent, 0, list(agent.prefix), 0))

    def _single(self) -> None:
        args = self.args
        own = [self.rng.randrange(100, 10_000) for _ in range(1000)]
        self._add(None, 0, beginning(1000) + own, 32, 0)
        self._at(self.now + self.rng.expovariate(args.singles), self._single)

    def _ask(self, agent: Agent, number: int, context: list[int], num_known: int) -> None:
        self._add(agent, number, context, agent.turns[number].num_out, num_known)

    def _add(self, agent: Agent | None, number: int, prompt: list[int], num_out: int, num_known: int) -> None:
        request = Request(
            str(next(self.order)),
            prompt,
            PARAMS,
            seed=0,
            max_num_tokens=len(prompt) + num_out,
            stop_token_ids=frozenset(),
            arrival_time=self.now,
        )
        self.visits[id(request)] = Visit(request, agent, number, self.now, num_known)
        self.scheduler.add_request(request)
        pool = self.scheduler.rows.kv.pool
        if agent is not None and isinstance(pool.idle, KeptBlocks):
            name = self.policy.partition(" ")[0]  # it is here: nothing that waits is expected sooner
            pool.idle.keep_until(session_of(agent), {"oracle": -1.0}.get(name, self.now + 10 * KEEP))
        if self.policy == "touched":
            for block_id in reversed(blocks_to_keep(self.scheduler, [request])):
                pool.idle.touch(block_id)

    def _end(self, visit: Visit) -> None:
        self.done.append(visit)
        agent, number, request = visit.agent, visit.number, visit.request
        kv = self.scheduler.rows.kv
        goes_on = agent is not None and number + 1 < len(agent.turns)
        next_turn = self.now + agent.turns[number].gap if agent is not None and goes_on else math.inf
        if agent is not None and isinstance(kv.pool.idle, KeptBlocks):
            name = self.policy.partition(" ")[0]
            keep = KEEP * (agent.turns[number].hint if goes_on else 1.0)
            places = {"oracle": next_turn, "survival": self.now, "slowest": self.now - keep}
            until = places.get(name, self.now + keep)
            kv.pool.idle.end(session_of(agent))
            if (goes_on or name == "unsaid") and not (self.mix == "half" and is_silent(agent)):
                kv.pool.idle.keep(session_of(agent), blocks_to_keep(self.scheduler, [request]), until)
        if agent is None:
            return
        if not goes_on:
            self._new_agents(1, spread=5.0)
            return
        new = [self.rng.randrange(100, 10_000) for _ in range(agent.turns[number + 1].num_new)]
        context = list(request.token_ids) + new
        self._at(next_turn, partial(self._ask, agent, number + 1, context, len(request.token_ids) - 1))

    # -- the worker

    def run(self) -> dict[str, Any]:
        args, scheduler = self.args, self.scheduler
        while self.now < args.seconds:
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            idle = scheduler.rows.kv.pool.idle
            if isinstance(idle, KeptBlocks) and not isinstance(idle, Ranked):
                idle.expire(self.now)
            output = scheduler.schedule()
            if output is None:
                self.now = max(self.now, self.events[0][0])
                continue
            answer = self._answer(output)
            self.now += args.step_seconds + sum(output.num_scheduled_tokens) * args.token_seconds
            for request, _, _ in scheduler.update(answer).sampled:
                visit = self.visits[id(request)]
                visit.first = visit.first or self.now
                if request.finish_reason is not None:
                    self._end(self.visits.pop(id(request)))
        return self._figures()

    def _answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for new in output.new_requests:
            self.to_go[new.req_idx] = len(new.token_ids) - new.num_computed_tokens
        ids = []
        for row, number in zip(output.req_idx, output.num_scheduled_tokens, strict=True):
            left = self.to_go[row] = max(self.to_go[row] - number, 0)
            ids.append(-1 if left else self.rng.randrange(100, 10_000))
        return ModelRunnerOutput(output.step_id, int32(ids))

    def _figures(self) -> dict[str, Any]:
        seen = [visit for visit in self.done if visit.arrival > self.args.seconds / 5]
        back = [visit for visit in seen if visit.number]
        firsts = [visit.first - visit.arrival for visit in back]
        silent = [visit for visit in back if visit.agent is not None and is_silent(visit.agent)]
        (known, found), (known_silent, found_silent) = known_and_found(back), known_and_found(silent)
        computed = sum(visit.request.num_prompt_tokens - visit.request.num_cached_tokens for visit in seen)
        return {
            "mix": self.mix,
            "pool": self.pool_share,
            "policy": self.policy,
            "turns": len(back),
            "hit": round(found / known, 4),
            "hit_silent": round(found_silent / known_silent, 4),
            "again": known - found,
            "computed": computed,
            "first_mean": round(statistics.mean(firsts), 3),
            "first_p99": round(pct(firsts, 0.99) or 0.0, 3),
            "preempted": self.scheduler.rows.num_preemptions,
        }


def known_and_found(visits: list[Visit]) -> tuple[int, int]:
    """Return how many tokens of their prompts had been computed before, and how many were found."""
    found = sum(min(visit.request.num_cached_tokens, visit.num_known) for visit in visits)
    return sum(visit.num_known for visit in visits), found


def is_silent(agent: Agent) -> bool:
    """Whether it is one of those that ask for nothing to be kept, in the mix "half"."""
    return agent.name[-1] in "13579"


def beginning(number: int) -> list[int]:
    """Return the first tokens of a prompt that all begin with."""
    return [100 + i % 4000 for i in range(number)]


def session_of(agent: Agent) -> Session:
    return b"", agent.name, ""


def chance(age: float, seconds: float) -> float:
    """Return the chance that a turn comes in the next ``seconds``, ``age`` after the last one, if none has come."""
    return 1 - survival(age + seconds) / max(survival(age), 1e-12)


def survival(age: float) -> float:
    spread = math.log(LONG_GAP / MEDIAN_GAP) / 2.326
    return math.erfc(math.log(max(age, 1e-3) / MEDIAN_GAP) / spread / math.sqrt(2)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--pools", default="0.25,0.5", help="shares of the tokens that all agents have")
    parser.add_argument("--mixes", default="agents,mixed,tools,half")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--least", type=int, default=2000)
    parser.add_argument("--most", type=int, default=16_000)
    parser.add_argument("--mean", type=int, default=5000)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument(
        "--fewer-turns", type=int, default=4, help="sessions have so many times fewer turns than published"
    )
    parser.add_argument("--singles", type=float, default=3.0, help="a second, in the mix")
    parser.add_argument("--step-seconds", type=float, default=0.008)
    parser.add_argument("--token-seconds", type=float, default=1 / 20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for mix in args.mixes.split(","):
        for share in map(float, args.pools.split(",")):
            for policy in args.policies.split(","):
                found.append(Simulation(args, policy, mix, share).run())
                if not args.json:
                    print(*([] if found[1:] else heads(found[0])), line(found[-1].values()), sep="\n", flush=True)
    if args.json:
        print(json.dumps({"benchmark": "eviction", "args": vars(args), "runs": found}))


def heads(figures: dict[str, Any]) -> list[str]:
    return [line(figures), "|---" * len(figures) + "|"]


def line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in cells)} |"


if __name__ == "__main__":
    main()
