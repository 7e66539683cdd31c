"""Formats of weights: what one that only multiplies gets for nothing, and 8-bit integers kept as they are stored."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import CPU, Driver, build, check_near, load, no_progress, source_of
from safetensors.torch import load_file, save_file

from aengine.errors import ModelLoadError
from aengine.runner.models import build_model, read_config
from aengine.runner.weights.formats import WeightFormats, choose_formats
from aengine.runner.weights.plain import PlainFormat, PlainWeight
from aengine.runner.weights.quantised.scaled import ScaledWeight
from aengine.runner.weights.sources.loader import load_weights
from aengine.runner.weights.weight import Weight

TinyModel = Callable[..., Path]
TOKENS = list(range(40, 70))
KINDS = ["int-quantized", "pack-quantized"]
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


class OnlyMultiplies(Weight):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight, self.bias = weight, bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


@pytest.mark.parametrize("rows", [1, 7])
def test_a_weight_that_only_multiplies_has_all_verbs(rows: int, rng: random.Random) -> None:
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    weight, bias = torch.randn(64, 48, generator=gen), torch.randn(64, generator=gen)
    x, residual = torch.randn(rows, 48, generator=gen), torch.randn(rows, 64, generator=gen)
    norm = SimpleNamespace(weight=torch.rand(48, generator=gen) + 0.5, eps=0.1)
    outcomes = []
    for made in (PlainWeight(weight, bias), OnlyMultiplies(weight, bias)):
        added = residual.clone()
        made.add_to(added, x)
        wider = made.after_norm(x, norm, torch.float64)
        assert wider.dtype == torch.float64
        outcomes.append([made.multiply(x), made.after_norm(x, norm), made.gated_after_norm(x, norm), added, wider])
    for plain, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)
    normed = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    gate, up = (normed @ weight.t() + bias).chunk(2, -1)
    torch.testing.assert_close(outcomes[1][2], gate * up / (1 + (-gate).exp()), rtol=1e-4, atol=1e-4)


def quantise(folder: Path, kind: str, ignored: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Write the folder's matrices as codes; returns all tensors as numbers again, by name."""
    path = folder / "model.safetensors"
    tensors, exact = load_file(path), {}
    for name, tensor in list(tensors.items()):
        exact[name] = tensor.clone()
        if not name.endswith("proj.weight") or any(part in name for part in ignored):
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 127
        codes = (tensor / scale).round()
        exact[name] = codes * scale
        del tensors[name]
        if kind == "pack-quantized":
            parts = (codes.long() + 128).view(len(codes), -1, 4)
            words = sum(parts[..., i] << 8 * i for i in range(4))
            tensors[f"{name}_packed"] = torch.where(words >= 2**31, words - 2**32, words).int()
            tensors[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            tensors[name] = codes.to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    set_quantization(folder, {**CONFIG, "format": kind, "ignore": [*CONFIG["ignore"], *(f"re:.*{i}" for i in ignored)]})
    return exact


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    driver = Driver(load(source_of(folder), dtype)[0], random.Random(0))
    return torch.cat([driver.step({"a": part})["a"] for part in (TOKENS[:20], TOKENS[20:21], TOKENS[21:])])


@pytest.fixture
def copied(tiny_model: TinyModel, tmp_path: Path) -> Callable[..., Path]:
    return lambda arch, **fields: Path(
        shutil.copytree(tiny_model(arch, seed=3, **fields), tmp_path / f"{arch}-{len(list(tmp_path.iterdir()))}")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_int8_is_the_dequantised_model(
    arch: str, fields: dict[str, Any], kind: str, copied: Callable[..., Path]
) -> None:
    folder, plain = copied(arch, **fields), copied(arch, **fields)
    save_file(quantise(folder, kind), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    coarse, wanted = logits(folder, "bfloat16"), logits(plain, "bfloat16")
    assert float((coarse - wanted).norm() / wanted.norm()) < 0.03
    model, loaded = load(source_of(folder))
    assert loaded.num_parameters == load(source_of(plain))[1].num_parameters
    assert model.weights.formats.name == "int8"
    layer: Any = model.layers[0]  # type: ignore[attr-defined]
    for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(linear.weight, ScaledWeight) and linear.weight.codes.dtype == torch.int8
    assert isinstance(model.lm_head.weight, PlainWeight)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_product(rows: int, dtype: torch.dtype, rng: random.Random) -> None:
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    codes = torch.randint(-128, 128, (80, 96), generator=gen).to(torch.int8)
    scale, bias = torch.rand(80, generator=gen) / 127, torch.randn(80, generator=gen)
    x = torch.randn(rows, 96, generator=gen).to(dtype)
    wanted = x.double() @ (codes.double() * scale[:, None].double()).t() + bias
    out = ScaledWeight(codes, scale, bias).multiply(x)
    assert out.dtype == dtype
    off = float((out.double() - wanted).norm() / wanted.norm())
    assert off < {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}[dtype]


@pytest.mark.parametrize("size", [1e-7, 1e-4, 0.3, 1.0, 300.0])
def test_int8_in_float16_has_the_range_of_its_outputs(size: float) -> None:
    """A sum over codes is 127 / max |w| times the output, and would be infinite long before that is."""
    gen = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (16, 256), generator=gen).to(torch.int8)
    scale = size / 127 * (1 + torch.arange(16) / 7)
    x = (codes[3].float() * (30_000 / (codes[3].float().square().sum() * scale[3])))[None]  # the output is 30,000 there
    x = x.clamp(-60_000, 60_000).half()
    wanted = x.double() @ (codes.double() * scale[:, None].double()).t()
    out = ScaledWeight(codes, scale, None).multiply(x)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), wanted, rtol=4e-3, atol=0.1 * float(wanted.abs().max()) / 100)
    nothing = ScaledWeight(codes, torch.zeros(16), None).multiply(x)
    assert torch.equal(nothing, torch.zeros_like(nothing)), "a row of zeros has a scale of zero"


def float16_model(folder: Path) -> torch.Tensor:
    """Logits with activations in float16, as on a GPU; a CPU's own are float32."""
    source = source_of(folder)
    quantised = choose_formats("float32", CPU, source.hf_config).quantised
    formats = WeightFormats(torch.float16, torch.float16, PlainFormat(torch.float16), quantised)
    model = build_model(read_config(source.hf_config), formats)
    load_weights(model, source, 0, no_progress)
    return Driver(model, random.Random(0)).step({"a": TOKENS})["a"]


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_int8_in_float16_with_a_large_activation(arch: str, copied: Callable[..., Path]) -> None:
    """One channel of the residual stream has 300, as those of trained models have; plain float16 holds that easily."""
    folder, plain = copied(arch), copied(arch)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name] *= 0.02 / tensors[name].std()
    size = tensors["model.layers.0.self_attn.o_proj.weight"].shape[1]
    values = [name for name in tensors if name.endswith("layers.0.self_attn.v_proj.weight")]
    tensors[values[0]][:] = 0.4
    tensors["model.layers.0.self_attn.o_proj.weight"][5] = 300 / (0.4 * size * 6)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].abs()
    save_file(tensors, path)
    save_file(quantise(folder, "int-quantized", ignored=("mlp.gate$",)), plain / "model.safetensors")
    out, wanted = float16_model(folder), float16_model(plain)
    assert wanted.isfinite().all() and out.isfinite().all()
    assert float((out - wanted).norm() / wanted.norm()) < 1e-2


def test_a_scaled_product_in_float16_has_the_range_of_its_outputs() -> None:
    """The product is 102,400 before it is scaled (Granite's residual multiplier)."""
    weight, x = torch.full((8, 64), 16.0), torch.full((2, 64), 100.0).half()
    for made in (PlainWeight(weight.half(), None), ScaledWeight(torch.ones(8, 64).to(torch.int8), weight[:, 0], None)):
        residual = torch.ones(2, 8).half()
        made.add_scaled_to(residual, x, 0.22)
        torch.testing.assert_close(residual, torch.full((2, 8), 1 + 102_400 * 0.22).half(), rtol=1e-3, atol=0)


def test_what_the_config_ignores_is_plain(copied: Callable[..., Path]) -> None:
    folder, plain = copied("llama"), copied("llama")
    save_file(quantise(folder, "int-quantized", ignored=("o_proj", "mlp")), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ignore": [5]}, "quantization_config: ignore=.* must be a list of texts"),
        ({"ignore": ["re:(a"]}, "quantization_config: ignore: aengine can't read the pattern '\\(a'"),
        ({"quant_method": "y" * 5000}, r"\(quantization_config of config.json: y{80}\)"),
    ],
)
def test_a_quantization_that_can_not_be_read_is_named(
    fields: dict[str, Any], problem: str, copied: Callable[..., Path]
) -> None:
    folder = copied("llama")
    set_quantization(folder, {**CONFIG, "format": "int-quantized", **fields})
    with pytest.raises(ModelLoadError, match=problem):
        build(source_of(folder))


def test_each_matrix_has_its_own_format(copied: Callable[..., Path]) -> None:
    """Also among those that are multiplied together: of q, k and v the last is plain, of gate and up the first."""
    folder, plain = copied("llama", attention_bias=True), copied("llama", attention_bias=True)
    save_file(quantise(folder, "int-quantized", ignored=("v_proj", "gate_proj")), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    model, loaded = load(source_of(folder))
    assert loaded.num_parameters == load(source_of(plain))[1].num_parameters
    layer: Any = model.layers[0]  # type: ignore[attr-defined]
    kinds = [[type(part) for part in linear.weight.parts] for linear in (layer.attention.qkv, layer.mlp.gate_up)]
    assert kinds == [[ScaledWeight, PlainWeight], [PlainWeight, ScaledWeight]]


def test_tensors_that_contradict_the_config(copied: Callable[..., Path]) -> None:
    folder = copied("llama")
    quantise(folder, "int-quantized")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, path)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight is stored as F32.*it is I8"):
        load(source_of(folder))
    del tensors[f"{name}_scale"]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight is stored as I8.* scale is missing"):
        load(source_of(folder))


@pytest.mark.parametrize("change", [{"num_bits": 3}, {"type": "float"}, {"strategy": "block"}])
def test_other_integers_are_refused(change: dict[str, Any], copied: Callable[..., Path]) -> None:
    folder = copied("llama")
    groups = {"group_0": {"targets": ["Linear"], "weights": CONFIG["config_groups"]["group_0"]["weights"] | change}}
    set_quantization(folder, {**CONFIG, "format": "pack-quantized", "config_groups": groups})
    with pytest.raises(ModelLoadError, match=r"config_groups: group_0: format 'pack-quantized'.*16 or 32 bits"):
        build(source_of(folder))


def test_rotated_weights_are_refused(copied: Callable[..., Path]) -> None:
    """Their activations would have to be rotated as well."""
    folder = copied("llama")
    set_quantization(folder, {**CONFIG, "format": "int-quantized", "transform_config": {"config_groups": {"u": {}}}})
    with pytest.raises(ModelLoadError, match=r"transform_config rotates .*16 or 32 bits"):
        build(source_of(folder))
