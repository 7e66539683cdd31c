"""Shared by the tests of several ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
sys.path.append(str(Path(__file__).parents[1] / "runner"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from tiny import write_tiny_model


@pytest.fixture(autouse=True)
def one_thread(quick_interpreter: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(arch, **overrides) -> folder``; each variant is written once a session."""
    root = tmp_path_factory.mktemp("tiny-shared")
    made: dict[str, Path] = {}

    def make(arch: str, **overrides: Any) -> Path:
        key = json.dumps([arch, overrides], sort_keys=True)
        if key not in made:
            made[key] = write_tiny_model(root / f"{arch}-{len(made)}", arch, **overrides)
        return made[key]

    return make
