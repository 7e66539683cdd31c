"""Layers that differ in heads, ropes, windows, soft caps and sinks on the GPU, in graphs and without."""

from __future__ import annotations

import random

import pytest
import torch
from test_attention_layers import Model, make_runner, run

from aengine.runner.platforms.choice import choose_platform

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [False, True])
def test_layers_that_differ(rng: random.Random, eager: bool) -> None:
    """Short and long requests of longrope are in the same batches, decodes and prompts in the same graphs."""
    platform = choose_platform("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu, gen = platform.is_accelerator, torch.Generator().manual_seed(rng.getrandbits(60))
    for _ in range(3):
        model = Model(gen, platform.device)
        run(make_runner(model, like_gpu=is_gpu, graphs=is_gpu, platform=platform, eager=eager), model, rng)
