"""Native families on the GPU in every scenario of an engine: transformers' tokens in float32, decodes in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_models import DEVICE
from scenarios import check_scenarios
from test_phi3 import PHI4, by_length
from test_scenarios import MODELS
from tiny import load_reference, write_tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
def test_every_scenario(name: str, tmp_path: Path) -> None:
    arch, fields = MODELS[name]
    # transformers before 5.20 computes gpt-oss with a limit of 7, whatever the config says.
    fields = {key: value for key, value in fields.items() if key != "swiglu_limit"}
    folder = write_tiny_model(tmp_path, arch, seed=7, **fields)
    reference = load_reference(folder, arch).to(DEVICE)
    engine = check_scenarios(folder, reference, device=DEVICE, max_num_batched_tokens=256)
    assert DEVICE == "cpu" or engine.runner.graphs is not None


@pytest.mark.parametrize("window", [None, 9])
def test_both_sides_of_longrope(window: int | None, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "phi3", seed=7, **PHI4, sliding_window=window)
    reference = by_length(load_reference(folder, "phi3").to(DEVICE))
    check_scenarios(folder, reference, device=DEVICE, max_num_batched_tokens=256)
