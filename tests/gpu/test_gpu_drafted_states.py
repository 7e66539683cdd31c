"""Drafts for models with states on a GPU: the tokens of a run without, in graphs of several positions a row."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from gpu_models import DEVICE
from searches import every_step_has_a_search  # noqa: F401
from test_gpu_drafts import KINDS, params_of
from test_gpu_engine import running
from test_hybrids import MODELS
from tiny import VOCAB_SIZE, write_tiny_model

from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.runner.speculation.graphs import draft_sizes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next-experts", "qwen3.5"])
async def test_drafts_change_no_token(
    name: str, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    arch, fields = MODELS[name]
    folder = write_tiny_model(tmp_path, arch, seed=11, **fields)
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
