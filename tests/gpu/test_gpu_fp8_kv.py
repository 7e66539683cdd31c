"""Keys and values in FP8 on a GPU: near those of 16 bits, and the same tokens alone, together, in graphs, with drafts.

One request of a batch may have other tokens: it has met a number that is in the middle between two codes, but for
rounding.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from searches import every_step_has_a_search  # noqa: F401
from test_gpu_drafts import KINDS, params_of
from test_gpu_engine import GREEDY, all_at_once, running, some_prompts
from test_gpu_logits import random_prompts, relative_error
from tiny import VOCAB_SIZE

from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.runner.graphs.cuda_graphs import graph_sizes
from aengine.runner.speculation.graphs import draft_sizes

pytestmark = pytest.mark.gpu
MakeCheckpoint = Callable[..., Checkpoint]
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}


def check_same(outcomes: list[list[Any]]) -> None:
    first, *others = outcomes
    for outcome in others:
        assert sum(found != wanted for found, wanted in zip(outcome, first, strict=True)) <= 1


@pytest.mark.parametrize("scales", ["calibrated", "one"])
@pytest.mark.parametrize(
    ("arch", "size"), [("llama", "medium"), ("llama", "heads of 256"), ("qwen3", "14 heads"), ("gpt_oss", "tiny")]
)
def test_logits_are_near_those_of_16_bits(
    checkpoint: MakeCheckpoint, arch: str, size: str, scales: str, rng: random.Random
) -> None:
    """Of prompts in one step, and of the tokens after them, that read all from the cache; also of one request."""
    dtype = "bfloat16" if DEVICE != "cpu" else "float32"
    model = checkpoint(arch, dtype, size)
    lengths = [30, 1, 7, 64, 12] if size == "tiny" or DEVICE == "cpu" else [1300, 600, 1, 15, 40, 64]
    prompts = random_prompts(rng, model, lengths)
    longest = max(lengths) + 10
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": longest, "block_size": 16}
    settings |= {"kv_cache_memory_bytes": 256 * MIB, "max_num_batched_tokens": 4096}
    for count in (len(prompts), 1):
        found = {}
        for name, how in (("plain", dict[str, Any]()), ("fp8", FP8 | {"kv_cache_scales": scales})):
            runner = make_runner(model.folder, **settings, **how)
            found[name] = Batch(runner, longest).tokens_and_logits(prompts[-count:], 0)[1].float()
            del runner
        off = relative_error(list(found["fp8"]), list(found["plain"]))
        print(f"{arch} {size}, scales {scales}, {count} requests: relative error {off:.2e}")
        assert 0 < off < (0.5 if arch == "gpt_oss" else 0.1), "random experts are chosen by a hair"


@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss", "gemma2"])
async def test_the_same_tokens(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    """Alone and together, in graphs and without, in chunks, and from the prefix cache; of windows too."""
    model, prompts = checkpoint(arch), some_prompts(rng)
    outcomes = []
    for how in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}):
        async with running(model.folder, **FP8, **how) as engine:
            described = engine.describe()
            assert (described["kv_cache_dtype"], described["kv_cache_scales"]) == ("fp8", "calibrated")
            if DEVICE != "cpu":
                assert bool(described["num_graphs"]) != bool(how.get("enforce_eager"))
            if not outcomes:
                outcomes.append([(await engine.generate(prompt, GREEDY)).token_ids for prompt in prompts])
            at_once = [await all_at_once(engine, prompts) for _ in range(2)]
            outcomes += [[completion.token_ids for completion in completions] for completions in at_once]
    check_same(outcomes)


@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss"])
async def test_drafts_change_no_token(
    checkpoint: MakeCheckpoint, arch: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    folder = checkpoint(arch).folder
    some = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 7))] * 4 for _ in KINDS]
    work = [(prompt, params_of(kind, i)) for i, (prompt, kind) in enumerate(zip(some, KINDS, strict=True))]
    outcomes = []
    for speculation in ("none", "ngram", "ngram_worker"):
        async with running(folder, speculation=speculation, **FP8) as engine:
            together = await asyncio.gather(*(engine.generate(*one) for one in work))
            outcomes.append([completion.token_ids for completion in together])
            statistics, ready = engine.statistics(), engine.describe()
        if DEVICE != "cpu":
            wanted = (len(graph_sizes(64)), len(draft_sizes(64)) if speculation != "none" else 0)
            assert (ready["num_graphs"], ready["num_draft_graphs"]) == wanted
        assert (statistics.accepted_tokens > 0) == (speculation != "none")
    check_same(outcomes)
