"""Shared by the tests of the models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_models


@pytest.fixture(autouse=True)
def one_thread(quick_interpreter: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(arch, **overrides) -> folder``; each variant is written once a session."""
    return tiny_models(tmp_path_factory.mktemp("tiny"))
