"""Drafts for models with states on a GPU: the tokens of a run without, in graphs of several positions a row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from searches import every_step_has_a_search  # noqa: F401
from test_gpu_drafts import check_drafts_change_no_token
from test_hybrids import MODELS
from tiny import write_tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next-experts", "qwen3.5"])
async def test_drafts_change_no_token(
    name: str, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, fields = MODELS[name]
    await check_drafts_change_no_token(write_tiny_model(tmp_path, arch, seed=11, **fields), rng, monkeypatch)
