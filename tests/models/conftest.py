"""Shared by the tests of the models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny_model


@pytest.fixture(autouse=True)
def one_thread(quick_interpreter: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(arch, **overrides) -> folder``; each variant is written once a session."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(arch: str, **overrides: Any) -> Path:
        key = json.dumps([arch, overrides], sort_keys=True)
        if key not in made:
            made[key] = write_tiny_model(root / f"{arch}-{len(made)}", arch, **overrides)
        return made[key]

    return make
