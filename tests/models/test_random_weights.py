"""Models without files of weights (``load_format="dummy"``), in each format that a config.json can describe."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_fp8_weights
import test_group_weights
import torch
from driver import CPU, Driver, load, source_of
from pairs import some
from test_group_weights import MOE, SIZES, set_config

from aengine.runner.weights.scope import Place
from aengine.runner.weights.sources import random_source
from aengine.runner.weights.weight import Drawn

PLAIN = ["lm_head", "re:.*mlp.gate$"]
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: config for kind, (_, config) in test_group_weights.KINDS.items()},
    **{f"fp8, {kind}": {**config, "ignore": PLAIN} for kind, (_, _, config) in test_fp8_weights.KINDS.items()},
}
TOKENS = list(range(40, 70))
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_bench.py"


def engine_bench() -> Any:
    spec = importlib.util.spec_from_file_location("engine_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(folder: Path, seed: int = 1) -> torch.Tensor:
    """Logits, finite and of a size as those of 16 bits."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    model = load(source_of(folder, "dummy"), seed=seed)[0]
    logits = Driver(model, random.Random(0)).step({"a": TOKENS})["a"]
    assert logits.isfinite().all() and 1e-3 < float(logits.std()) < 100
    return logits


ARCHS = ("llama", "qwen3_moe")


@pytest.mark.parametrize(
    ("arch", "kind"),
    some(itertools.product(ARCHS, CONFIGS), *((ARCHS[i % 2], kind) for i, kind in enumerate(CONFIGS))),
)
def test_a_model_in_each_format(arch: str, kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    sizes = MOE if arch == "qwen3_moe" else SIZES
    (tmp_path / "config.json").write_bytes((tiny_model(arch, seed=3, **sizes) / "config.json").read_bytes())
    plain = check(tmp_path)
    set_config(tmp_path, CONFIGS[kind])
    logits = check(tmp_path)
    assert not torch.equal(logits, plain), "the matrices are in that format"
    assert torch.equal(logits, check(tmp_path)) and not torch.equal(logits, check(tmp_path, seed=2))


def test_experts_in_mxfp4(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model("gpt_oss", seed=3) / "config.json").read_bytes())
    plain = check(tmp_path)
    set_config(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert not torch.equal(check(tmp_path), plain)


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe", "tiny-gpt-oss"])
def test_formats_of_the_benchmark(shape: str, tmp_path: Path) -> None:
    """engine_bench.py --quant."""
    script = engine_bench()
    config, path = script.SHAPES[shape], tmp_path / "config.json"
    path.write_text(json.dumps(config))
    plain, sizes = check(tmp_path), [script.decode_bytes(config, "")]
    for name in ["mxfp4"] if shape == "tiny-gpt-oss" else script.QUANT:
        path.write_text(json.dumps(config | {"quantization_config": script.QUANT[name][0](config)}))
        assert not torch.equal(check(tmp_path), plain), name
        sizes.append(script.decode_bytes(config, name))
    assert max(sizes[1:]) < sizes[0] and min(sizes) > sizes[0] / 4


@pytest.mark.parametrize(
    ("dtype", "drawn", "least", "most", "num_values"),
    [
        (torch.int32, None, -(2**31), 2**31 - 1, 4000),
        (torch.uint8, None, 0, 255, 256),
        (torch.int8, None, -128, 127, 256),
        (torch.float8_e4m3fn, None, -448, 448, 100),
        (torch.float8_e4m3fn, (224.0, 448.0), 224, 448, 9),
        (torch.uint8, (119.0, 121.0), 119, 121, 2),
        (torch.float32, (2**-8, 2**-7), 2**-8, 2**-7, 100),
    ],
)
def test_codes_have_all_values(
    dtype: torch.dtype, drawn: Drawn | None, least: float, most: float, num_values: int
) -> None:
    place = Place("a", (64, 70), dtype, 0, lambda tensor: None, drawn=drawn)
    made = random_source._make(place, torch.Generator().manual_seed(1), CPU)
    values = made.float()
    assert made.dtype == dtype and made.shape == (64, 70) and values.isfinite().all()
    assert least <= float(values.min()) and float(values.max()) <= most
    assert len(values.unique()) >= num_values
    assert torch.equal(values.half().float(), values) or dtype == torch.int32, "scales are as exact as 16 bits"
