"""What speculation costs the host: microseconds a stream and step. One JSON line for each text and number of streams.

    python benchmarks/proposals.py [--streams 1 16 64 256] [--steps 200] [--prompt 2000] [--repeats 3]

The engine's scheduler and the proposer ``--method``, with no worker: answers are made of texts that are known
beforehand, and said to come after 5 ms and 20 us for each position of a step; the budget by cost gives drafts out.

  edit        the answer is the prompt once more, with one token in 20 another: most guesses are right
  open        the answer does not occur in the prompt, nor twice: hardly anything is guessed
  few words   the answer is of three random tokens, so that there are guesses at each place, and most are wrong

"proposal": `Proposing.note_answer` and `propose`, which the step loop calls once a step: lookup, chances, budget.
"scheduler": what `schedule` and `update` take more than without drafts. "first": a stream's first step, in which its
prompt is put into the table. Each is the best of --repeats.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from typing import Any

from aengine.config import EngineConfig
from aengine.engine.pacing.steps_in_flight import StepsInFlight
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.speculation.budget import CostBudget
from aengine.engine.speculation.drafts import Drafts, Speculation
from aengine.engine.speculation.proposer import new_history
from aengine.engine.speculation.proposing import Proposing
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, SchedulerOutput, int32
from aengine.params import SamplingParams

VOCAB_SIZE = 128_000
BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0)


def texts(kind: str, rng: random.Random, prompt: int, tokens: int) -> tuple[list[int], list[int]]:
    """Return a prompt and the answer to it."""
    first = [rng.randrange(3, VOCAB_SIZE) for _ in range(prompt)]
    if kind == "edit":
        again = first * (1 + tokens // prompt)
        return first, [rng.randrange(3, VOCAB_SIZE) if rng.random() < 0.05 else one for one in again[:tokens]]
    if kind == "few words":
        return first, [rng.choice(first[:3]) for _ in range(tokens)]
    return first, [rng.randrange(3, VOCAB_SIZE) for _ in range(tokens)]


class Loop:
    """A scheduler, what drafts for it, and the answers to its steps."""

    def __init__(self, args: argparse.Namespace, kind: str, streams: int, *, speculates: bool) -> None:
        most = args.steps * 17 + 64
        blocks = streams * ((args.prompt + most) // BLOCK_SIZE + 2)
        limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 1 << 20}
        self.scheduler = Scheduler(num_blocks=blocks, kv_groups=[KVCacheGroup("full", BLOCK_SIZE)], **limits)
        self.scheduler.rows.lookahead = Drafts(self.scheduler.rows)
        self.speculation = Speculation()
        if speculates:
            chosen = EngineConfig.create("model", {"speculation": args.method}).speculation_settings
            made = new_history(chosen, VOCAB_SIZE)
            self.speculation = Proposing(self.scheduler, StepsInFlight(1), CostBudget(256, 0.01), args.method, made)
        rng = random.Random(streams)
        self.answers: dict[Request, list[int]] = {}
        for number in range(streams):
            prompt, answer = texts(kind, rng, args.prompt, most)
            limit: Any = {"max_num_tokens": len(prompt) + most, "stop_token_ids": frozenset[int]()}
            request = Request(str(number), prompt, PARAMS, seed=0, **limit)
            self.answers[request] = answer
            self.scheduler.add_request(request)
        self.now = 0.0
        self.tokens = self.steps = self.drafts = 0
        self.proposing = self.scheduling = 0.0  # seconds

    def turn(self) -> None:
        begun = time.perf_counter()
        self.speculation.propose()
        proposed = time.perf_counter()
        out = self.scheduler.schedule()
        scheduled = time.perf_counter()
        assert out is not None
        step = self.scheduler.oldest_step
        assert step is not None
        positions = sum(out.num_scheduled_tokens)
        answer = self._answer(out, step.batch)
        self.now += 0.005 + 20e-6 * positions
        answered = time.perf_counter()
        sampled = self.scheduler.update(answer).sampled
        updated = time.perf_counter()
        self.speculation.note_answer(step, self.now, sampled)
        self.proposing += proposed - begun + time.perf_counter() - updated
        self.scheduling += scheduled - proposed + updated - answered
        self.tokens += len(answer.token_ids)
        self.drafts += positions - len(out.req_idx)
        self.steps += 1

    def _answer(self, out: SchedulerOutput, batch: list[Request]) -> ModelRunnerOutput:
        counts, token_ids, given = int32(), int32(), iter(())
        if out.drafts is not None:
            given = iter(out.drafts.token_ids)
        for place, request in enumerate(batch):
            drafts = [next(given) for _ in range(out.drafts.counts[place])] if out.drafts is not None else []
            done = len(request.token_ids) - request.num_prompt_tokens
            if request.num_computed_tokens < request.num_prompt_tokens:  # of its prompt there is more
                counts.append(0)
                continue
            wanted = self.answers[request][done : done + 1 + len(drafts)]
            right = next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=False)) if a != b), len(drafts))
            counts.append(1 + right)
            token_ids.extend(wanted[: 1 + right])
        if out.drafts is None:
            ids = iter(token_ids)
            return ModelRunnerOutput(out.step_id, int32(next(ids) if count else -1 for count in counts))
        return ModelRunnerOutput(out.step_id, token_ids, counts=counts)


def run(args: argparse.Namespace, kind: str, streams: int, *, speculates: bool) -> dict[str, float]:
    loop = Loop(args, kind, streams, speculates=speculates)
    while loop.scheduler.num_waiting or loop.scheduler.rows.catching_up:
        loop.turn()
    first = 1e6 * loop.proposing / streams
    loop.turn()
    first = max(first, 1e6 * loop.proposing / streams)
    loop.proposing = loop.scheduling = 0.0
    loop.tokens = loop.steps = loop.drafts = 0
    gc.collect()
    for _ in range(args.steps):
        loop.turn()
    of_stream = 1e6 / (args.steps * streams)
    figures = {"proposal": loop.proposing * of_stream, "scheduler": loop.scheduling * of_stream, "first": first}
    return figures | {
        "drafts": loop.drafts / args.steps / streams,
        "tokens": loop.tokens / args.steps / streams,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=["edit", "open", "few words"])
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for kind in args.kinds:
        for streams in args.streams:
            runs = [run(args, kind, streams, speculates=True) for _ in range(args.repeats)]
            plain = [run(args, kind, streams, speculates=False) for _ in range(args.repeats)]
            best = {key: min(one[key] for one in runs) for key in runs[0]}
            best["scheduler"] -= min(one["scheduler"] for one in plain)
            line = {key: round(value, 2) for key, value in best.items()}
            print(json.dumps({"text": kind, "streams": streams} | line), flush=True)


if __name__ == "__main__":
    main()
