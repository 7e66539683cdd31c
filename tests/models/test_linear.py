"""The number formats of linear layers against float64."""

from __future__ import annotations

import random

import pytest
import torch
from driver import CPU

from aengine.errors import ModelLoadError
from aengine.runner.layers.linear import Linear
from aengine.runner.weights import float16_cpu
from aengine.runner.weights.float16_cpu import Float16Plan, half_linear
from aengine.runner.weights.formats import WeightFormats, choose_formats
from aengine.runner.weights.plain import PlainFormat
from aengine.runner.weights.scope import WeightScope

# What rounding to the format costs, relative to the size of the output.
TOLERANCES = {"float32": 1e-6, "auto": 2e-3, "float16": 2e-3, "bfloat16": 2e-2}
PLANS = {"small": Float16Plan(None, 0), "large": Float16Plan(half_linear, 1), "both": Float16Plan(half_linear, 8)}


@pytest.fixture
def gen(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def layer(weights: list[torch.Tensor], biases: list[torch.Tensor] | None, dtype: str) -> tuple[Linear, WeightFormats]:
    """Fused from several matrices, whose tensors come in an order of no meaning."""
    formats = choose_formats(dtype, CPU)
    scope = WeightScope(formats)
    parts = {f"part{i}": len(weight) for i, weight in enumerate(weights)}
    made = Linear(scope, weights[0].shape[1], parts, biases is not None)
    tensors = {f"part{i}.weight": weight for i, weight in enumerate(weights)}
    tensors |= {f"part{i}.bias": bias for i, bias in enumerate(biases or [])}
    places = [place for (place,) in scope.places.values()]
    assert {place.name: place.shape for place in places} == {name: tuple(t.shape) for name, t in tensors.items()}
    random.shuffle(places)
    for place in places:
        place.put(place.take(tensors[place.name], CPU))
    return made, formats


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("biased", [False, True])
def test_against_float64(
    dtype: str, biased: bool, plan: str, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float16_cpu, "float16_plan", lambda: PLANS[plan])
    weights = [torch.randn(n, 96, generator=gen) * 0.1 for n in (64, 16, 16)]
    biases = [torch.randn(len(weight), generator=gen) for weight in weights] if biased else None
    made, formats = layer(weights, biases, dtype)
    for rows in (1, 2, 7, 8, 9, 40):
        x = torch.randn(rows, 96, generator=gen).to(formats.dtype)
        wanted = x.double() @ torch.cat(weights).double().t()
        if biases is not None:
            wanted += torch.cat(biases).double()
        out = made.multiply(x)
        assert out.dtype == formats.dtype and out.shape == wanted.shape
        off = float((out.double() - wanted).norm() / wanted.norm())
        assert off < TOLERANCES[dtype], f"{rows} rows: {off:.2g}"


def test_float32_is_exact_enough_to_tell_it_from_the_others(gen: torch.Generator) -> None:
    weight = torch.randn(64, 96, generator=gen)
    x = torch.randn(1, 96, generator=gen)
    wanted = x.double() @ weight.double().t()
    off = {}
    for dtype in ("float32", "auto", "bfloat16"):
        made, formats = layer([weight], None, dtype)
        off[dtype] = float((made.multiply(x.to(formats.dtype)).double() - wanted).norm() / wanted.norm())
    assert off["float32"] < 1e-6 < 1e-5 < off["auto"] < off["bfloat16"]


@pytest.mark.parametrize("plan", PLANS)
def test_float16_outputs_past_its_range(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are float32 and some models have a few of 10**5 and more: they may not become infinite."""
    monkeypatch.setattr(float16_cpu, "float16_plan", lambda: PLANS[plan])
    made, _ = layer([torch.full((16, 64), 8.0)], None, "auto")
    for rows in (1, 40):
        out = made.multiply(torch.full((rows, 64), 1000.0))  # 512,000
        assert out.isfinite().all(), f"{rows} rows: {out[0, 0]}"


def test_the_plan_is_one_of_what_was_measured() -> None:
    plan = float16_cpu.float16_plan()
    assert plan is float16_cpu.float16_plan(), "measured once"
    assert (plan.large is None and plan.first_large == 0) or (plan.large is half_linear and plan.first_large > 1)


def test_without_fbgemm_auto_is_float32(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    """As on arm64, where packing float16 weights is an error of torch's."""
    float16_cpu.float16_plan.cache_clear()
    monkeypatch.setattr(float16_cpu, "has_fbgemm", lambda: False)
    monkeypatch.setattr(torch.ops.quantized, "linear_prepack_fp16", None)
    weight = torch.randn(8, 16, generator=gen)
    made, formats = layer([weight], None, "auto")
    assert formats == WeightFormats(torch.float32, torch.float32, PlainFormat(torch.float32))
    x = torch.randn(3, 16, generator=gen)
    assert torch.equal(made.multiply(x), torch.nn.functional.linear(x, weight))
    with pytest.raises(ModelLoadError, match="dtype='float16' on a CPU needs FBGEMM.*use dtype='auto'"):
        choose_formats("float16", CPU)


def test_fbgemm_is_known_where_it_is() -> None:
    if float16_cpu.has_fbgemm():
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(8, 16), None)
    else:
        with pytest.raises(RuntimeError):
            torch.ops.quantized.linear_prepack_fp16(torch.zeros(8, 16), None)
