"""Models whose preempted requests come back from the host's memory: transformers' tokens in every scenario."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import some
from scenarios import Engine, check_scenarios, settings_of_torch_kept
from test_hybrids import MODELS
from test_phi3 import PHI4, by_length
from tiny import load_reference

from aengine.errors import ModelLoadError

TinyModel = Callable[..., Path]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    some(
        itertools.product(["qwen3", "gemma2", "qwen3-next"], [1 << 24, 1 << 15]),
        ("qwen3", 1 << 15),
        ("gemma2", 1 << 24),
        ("qwen3-next", 1 << 15),
    ),
)
def test_every_scenario(name: str, num_bytes: int, tiny_model: TinyModel) -> None:
    """Keys and values of all tokens, of a window, and states; a place for every page, and for some."""
    arch, fields = MODELS.get(name, (name, {"sliding_window": 9} if name == "gemma2" else {}))
    folder = tiny_model(arch, seed=7, **fields)
    engine = check_scenarios(folder, load_reference(folder, arch), swap_space_bytes=num_bytes)
    assert engine.num_restored or num_bytes < 1 << 24


def test_both_sides_of_longrope(tiny_model: TinyModel) -> None:
    """What was kept of a request is of no use beyond the border."""
    folder = tiny_model("phi3", seed=7, **PHI4, sliding_window=None)
    engine = check_scenarios(folder, by_length(load_reference(folder, "phi3")), swap_space_bytes=1 << 24)
    assert engine.num_restored


@pytest.mark.parametrize("num_bytes", [7, 1 << 50])
def test_a_space_that_is_of_no_use_is_refused_at_the_start(num_bytes: int, tiny_model: TinyModel) -> None:
    with (
        settings_of_torch_kept(),
        pytest.raises(ModelLoadError, match=f"^swap_space_bytes={num_bytes} .*(set 0|lower)"),
    ):
        Engine(tiny_model("qwen3", seed=7), swap_space_bytes=num_bytes)
