"""Drafts on a GPU: the tokens of a run without, in graphs of several positions a row; and nothing is compiled late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from searches import every_step_has_a_search  # noqa: F401
from test_gpu_engine import running
from test_gpu_hazards import compiled
from tiny import VOCAB_SIZE

from aengine import SamplingParams
from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.ipc.messages import DraftColumns, int32
from aengine.runner.speculation.graphs import draft_sizes

__all__ = ["compiled"]  # a fixture

pytestmark = pytest.mark.gpu

MakeCheckpoint = Callable[..., Checkpoint]
LENGTH = 48
FEW = dict.fromkeys((5, 9, 11), 60.0)
"""A bias that leaves three tokens: such texts repeat, whatever is drawn."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.05},
    "penalties": {"logit_bias": FEW, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_tokens": 20},
    "cutoffs": {"logit_bias": FEW, "top_p": 0.9, "top_k": 20},
    "log-probabilities": {"temperature": 0.0, "logprobs": 2},
    "bad words": {"logit_bias": FEW, "bad_words": ["a b"]},
}


def params_of(kind: str, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=seed, **({"temperature": 1.0} | KINDS[kind]))


async def check_drafts_change_no_token(folder: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests of every kind, alone and together, whatever steps with drafts cost."""
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    work = []
    for i, kind in enumerate(KINDS):
        some = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 7))]
        work.append((some * 4, params_of(kind, i)))
    outcomes = []
    for speculation in ("none", "suffix", "ngram_worker"):
        async with running(folder, speculation=speculation) as engine:
            alone = [await engine.generate(*one) for one in work[:3]]
            together = await asyncio.gather(*(engine.generate(*one) for one in work))
            outcomes.append([c.token_ids for c in (*alone, *together)])
            statistics, ready = engine.statistics(), engine.describe()
        if DEVICE != "cpu":
            assert ready["num_draft_graphs"] == (len(draft_sizes(64)) if speculation != "none" else 0)
        assert (statistics.accepted_tokens > 0) == (speculation != "none")
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss"])
async def test_drafts_change_no_token(
    checkpoint: MakeCheckpoint, arch: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt_oss: experts, sinks, windows, and attention in two groups."""
    await check_drafts_change_no_token(checkpoint(arch).folder, rng, monkeypatch)


@pytest.mark.parametrize("size", ["tiny", "one key-value head"])
async def test_drafts_of_a_model_change_no_token(
    checkpoint: MakeCheckpoint, rng: random.Random, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """A model that drafts for itself is right, in graphs too; one whose heads are of other sizes has its own KV group.
    Prompts are long enough to be found in the prefix cache, and run as graphs of batches."""
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    folder, other = checkpoint("qwen3").folder, checkpoint("qwen3", size=size).folder
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    work = [(shared[:length] + [rng.randrange(VOCAB_SIZE)] * 3, params_of("greedy", length)) for length in range(2, 20)]
    work += [(one, params_of(kind, i)) for i, kind in enumerate(KINDS) for one, _ in work[:2]]
    outcomes = []
    for speculation in ("none", {"method": "draft_model", "model": str(other), "tokens": 4}):
        async with running(folder, speculation=speculation) as engine:
            alone = [await engine.generate(*one) for one in work[:6]]
            greedy = engine.statistics()
            together = await asyncio.gather(*(engine.generate(*one) for one in work))
            outcomes.append([c.token_ids for c in (*alone, *together)])
            statistics = engine.statistics()
    print(greedy.drafts, statistics.drafts)
    assert outcomes[0] == outcomes[1]
    assert statistics.drafted_tokens > 400
    assert size != "tiny" or greedy.accepted_tokens > 0.95 * greedy.drafted_tokens > 100


async def test_many_positions_in_a_step(
    checkpoint: MakeCheckpoint, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 64 positions, in the largest graphs, tokens are those of a run without drafts too."""
    most = 0

    class Granted(DraftBudget):
        def grant(self, num_rows: int, chances: Sequence[Sequence[float]], *, is_gated: bool = False) -> list[int]:
            nonlocal most
            counts = super().grant(num_rows, chances)
            most = max(most, num_rows + sum(counts))
            return counts

    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: Granted(most_positions))
    folder, work, outcomes = checkpoint("qwen3").folder, [], []
    for i in range(40):
        some = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 3))]
        work.append((some * 8, params_of(rng.choice(["greedy", "seeded", "cutoffs"]), i)))
    for speculation in ("none", "suffix"):
        async with running(folder, speculation=speculation, max_num_seqs=256) as engine:
            outcomes.append([c.token_ids for c in await asyncio.gather(*(engine.generate(*one) for one in work))])
    assert outcomes[0] == outcomes[1]
    assert most > 128 if DEVICE != "cpu" else most == 64


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled")
def test_drafts_compile_nothing(checkpoint: MakeCheckpoint, rng: random.Random, compiled: list[str]) -> None:
    model = checkpoint("llama", "bfloat16", "14 heads")
    runner = make_runner(
        model.folder, dtype="bfloat16", speculation="suffix", kv_cache_memory_bytes=64 * MIB, max_num_seqs=16
    )
    batch = Batch(runner)
    compiled.clear()
    for count, longest in ((1, 3), (1, 15), (3, 5), (12, 4), (16, 1)):
        prompts = [[rng.randrange(model.vocab_size) for _ in range(20)] for _ in range(count)]
        batch.start(prompts, temperature=[rng.choice((0.0, 1.0)) for _ in range(count)])
        counts = [longest, *(rng.randint(0, longest) for _ in range(count - 1))]
        ids = int32(rng.randrange(model.vocab_size) for _ in range(sum(counts)))
        drafts = DraftColumns(int32(counts), ids, int32([0] * count))
        answer, _ = batch._step(range(count), [1 + k for k in counts], drafts=drafts)
        assert answer.counts is not None and min(answer.counts) >= 1 and not answer.errors
        batch.end(range(count))
    assert not compiled, compiled
