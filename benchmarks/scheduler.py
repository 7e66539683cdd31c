"""Host CPU that the scheduler takes for each token; one JSON object on stdout.

    python benchmarks/scheduler.py [--steps N] [--repeats K]

Two steps in flight, as in the engine; the worker's answers are made beforehand. Microseconds a token, schedule() and
update() together; the best of K, as other work on the machine can only make it worse.

  decode      N steps of 1, 64, 256 and 1024 running requests, blocks of 16, nobody joins or leaves
  churn       256 rows, completions of 64 tokens: each step a few end and as many new prompts of 128 tokens begin
  shared      as churn, and the prompts begin with the same 1024 tokens: hits of 64 blocks each
  pressure    256 rows on a third of the blocks that they would need: preempting and resuming all the time
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import time
from collections import deque
from functools import partial

from aengine.engine.keeping.kept_blocks import KeptBlocks, KeptHits
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, SchedulerOutput, int32
from aengine.params import SamplingParams

BLOCK_SIZE = 16
TOKEN = 7
PARAMS = SamplingParams()


def make_scheduler(num_running: int, num_blocks: int) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        kv_groups=[KVCacheGroup("full", BLOCK_SIZE)],
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        max_model_len=32768,
        new_idle=partial(KeptBlocks, fraction=0.9, hits=KeptHits()),
    )


class Feed:
    """Plays the worker; keeps as many requests in the scheduler as wanted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.answers: deque[ModelRunnerOutput] = deque()
        self.num_tokens = 0
        self.seconds = 0.0
        self._num_added = 0
        self._known: dict[int, list[int]] = {}  # row -> tokens still to compute before it samples

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._num_added += 1
        self.scheduler.add_request(
            Request(
                str(self._num_added),
                prompt,
                PARAMS,
                seed=0,
                max_num_tokens=len(prompt) + max_tokens,
                stop_token_ids=frozenset({0, 2}),
                arrival_time=float(self._num_added),
            )
        )

    def turn(self) -> int:
        """Schedule one step, take the answer of the one before. Returns how many requests ended."""
        start = time.perf_counter()
        out = self.scheduler.schedule()
        self.seconds += time.perf_counter() - start
        if out is not None:
            self.answers.append(self._answer(out))
            if len(self.answers) < 2:
                return 0
        answer = self.answers.popleft()
        start = time.perf_counter()
        sampled = self.scheduler.update(answer)[0]
        self.seconds += time.perf_counter() - start
        self.num_tokens += len(sampled)
        return sum(request.finish_reason is not None for request, _, _ in sampled)

    def _answer(self, out: SchedulerOutput) -> ModelRunnerOutput:
        to_go = self._known
        for new in out.new_requests:
            to_go[new.req_idx] = [len(new.token_ids) - new.num_computed_tokens]
        token_ids = int32([TOKEN]) * len(out.req_idx)
        if out.new_requests or any(count > 1 for count in out.num_scheduled_tokens):
            for i, (row, count) in enumerate(zip(out.req_idx, out.num_scheduled_tokens, strict=True)):
                left = to_go[row]
                left[0] = max(left[0] - count, 0)
                if left[0] > 0:
                    token_ids[i] = -1
        return ModelRunnerOutput(out.step_id, token_ids)


def decode(num_running: int, num_steps: int) -> float:
    blocks_each = (64 + num_steps) // BLOCK_SIZE + 2
    feed = Feed(make_scheduler(num_running, num_running * blocks_each))
    rng = random.Random(num_running)
    for _ in range(num_running):
        feed.add([rng.randrange(3, 1000) for _ in range(rng.randint(16, 32))], num_steps + 32)
    while feed.scheduler.num_waiting or feed.scheduler.rows.catching_up:
        feed.turn()
    feed.seconds, feed.num_tokens = 0.0, 0
    for _ in range(num_steps):
        feed.turn()
    assert feed.scheduler.num_running == num_running
    return feed.seconds / feed.num_tokens * 1e6


def churn(num_steps: int, *, common: int = 0, num_blocks: int = 65536) -> tuple[float, Scheduler]:
    feed = Feed(make_scheduler(256, num_blocks))
    rng = random.Random(common)
    beginning = [rng.randrange(3, 1000) for _ in range(common)]

    def add() -> None:
        feed.add(beginning + [rng.randrange(3, 1000) for _ in range(128)], rng.randint(32, 96))

    for _ in range(288):
        add()
    for i in range(num_steps * 2):
        if i == num_steps:
            feed.seconds, feed.num_tokens = 0.0, 0
        for _ in range(feed.turn()):
            add()
    return feed.seconds / feed.num_tokens * 1e6, feed.scheduler


def measure(num_steps: int) -> dict[str, float]:
    figures = {f"decode_{n}": decode(n, num_steps) for n in (1, 64, 256, 1024)}
    figures["churn_256"], _ = churn(num_steps)
    figures["shared_256"], scheduler = churn(num_steps, common=1024)
    assert scheduler.prefix_cache_hits > scheduler.prefix_cache_queries // 2
    figures["pressure_256"], scheduler = churn(num_steps, num_blocks=256 * 14 // 3)
    assert scheduler.rows.num_preemptions
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeats):
        gc.collect()
        runs.append(measure(options.steps))
    best = {name: round(min(run[name] for run in runs), 3) for name in runs[0]}
    machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "scheduler", "unit": "us_per_token", **best, "machine": machine}))


if __name__ == "__main__":
    main()
