"""Shared by the tests of the runner."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(quick_interpreter: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def gen(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))
