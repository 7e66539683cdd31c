"""Shared by the tests of the runner."""

from __future__ import annotations

import random

import pytest
import torch
from triton_interpreter import look_up_builtins_once


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    look_up_builtins_once()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def gen(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))
