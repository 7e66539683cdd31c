"""Weights in FP8: each way in which checkpoints keep them is the dequantised model; those made of 16 bits are near."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driver import CPU, Driver, check_near, load, source_of
from safetensors.torch import load_file, save_file
from test_scenarios import DEEPSEEK_V3

from aengine.checkpoint.early_checks import check_cpu
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.kernels.grouped_codes import numbers
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.plain import PlainFormat
from aengine.runner.weights.quantised import fp8
from aengine.runner.weights.quantised.fp8 import Fp8Format, MadeFp8Experts, MadeFp8Format, quantised
from aengine.runner.weights.quantised.grouped import CodedExperts, GroupedWeight
from aengine.runner.weights.quantised.scaled import ScaledExperts, ScaledWeight
from aengine.runner.weights.quantised.unpacked import DequantisedExperts

FP8 = torch.float8_e4m3fn
TOKENS = list(range(40, 70))
PLAIN = PlainFormat(torch.float32)


def compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": [],
    }


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # what has a scale, its name, the config
    "channel": ("row", "weight_scale", compressed("channel")),
    "tensor": ("matrix", "weight_scale", compressed("tensor")),
    "fbgemm": ("row", "weight_scale", {"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}),
    "modelopt": ("matrix", "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}),
    "fp8": ("matrix", "weight_scale", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []}),
    "one block": ("matrix", "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": None, "ignore": []}),
    "blocks": (
        "block",
        "weight_scale_inv",
        {"quant_method": "fp8", "weight_block_size": [8, 32], "modules_to_not_convert": []},
    ),
    "parts of blocks": (
        "block",
        "weight_scale_inv",
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": []},
    ),
}


def scale_of(tensor: torch.Tensor, what: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale as it is stored, and of the tensor's shape."""
    if what == "row":
        scale = tensor.abs().amax(1, keepdim=True) / 448
        return scale, scale.expand_as(tensor)
    if what == "matrix":
        return tensor.abs().amax() / 448, (tensor.abs().amax() / 448).expand_as(tensor)
    rows, columns = tensor.shape
    whole = F.pad(tensor.abs(), (0, -columns % 32, 0, -rows % size))  # the last block may be smaller
    blocks = whole.view(-(-rows // size), size, -(-columns // 32), 32).amax((1, 3)) / 448
    return blocks, blocks.repeat_interleave(size, 0).repeat_interleave(32, 1)[:rows, :columns]


def write_quantised(folder: Path, kind: str, spoil: Callable[[dict[str, torch.Tensor]], None] = lambda _: None) -> Any:
    """Write the folder's matrices as codes; returns all tensors as numbers again, by name."""
    what, name_of_scale, config = KINDS[kind]
    size, _ = config.get("weight_block_size") or (1, 1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    exact = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        stored, scale = scale_of(tensors[name], what, size)
        codes = (tensors[name] / scale).to(FP8)
        exact[name] = codes.float() * scale
        tensors[name], tensors[name.replace("weight", name_of_scale)] = codes, stored
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    key = next(key for key in ("ignore", "modules_to_not_convert", "ignored_layers") if key in config)
    plain = [f"model.layers.{i}.mlp.gate" for i in range(4)]
    config = config | {key: ["lm_head", *plain]}
    spoil(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return exact


def logits(folder: Path) -> torch.Tensor:
    driver = Driver(load(source_of(folder), "float32")[0], random.Random(0))
    return torch.cat([driver.step({"a": part})["a"] for part in (TOKENS[:20], TOKENS[20:21], TOKENS[21:])])


@pytest.fixture
def copied(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(arch: str, **fields: Any) -> Path:
        folder = tmp_path / f"{arch}-{len(list(tmp_path.iterdir()))}"
        return Path(shutil.copytree(tiny_model(arch, seed=3, **fields), folder))

    return copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_is_the_dequantised_model(arch: str, kind: str, copied: Callable[..., Path]) -> None:
    fields = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen3_moe": {"moe_intermediate_size": 64},
        "deepseek_v3": DEEPSEEK_V3 | {"moe_intermediate_size": 64},  # its latent rows end within a block
    }[arch]
    folder, plain = copied(arch, **fields), copied(arch, **fields)
    save_file(write_quantised(folder, kind), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    model, loaded = load(source_of(folder))
    assert loaded.num_parameters == load(source_of(plain))[1].num_parameters
    assert model.weights.formats.name == "fp8"


def test_what_is_no_number_is_refused_by_name(copied: Callable[..., Path]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def refused(spoil: Callable[[dict[str, torch.Tensor]], Any], message: str, kind: str = "channel") -> None:
        folder = copied("llama")
        write_quantised(folder, kind, spoil)
        with pytest.raises(ModelLoadError, match=message):
            load(source_of(folder))

    refused(
        lambda tensors: tensors[f"{name}_scale"].fill_(torch.nan),
        r"layers\.1\.mlp\.down_proj\.weight_scale has",
    )
    refused(
        lambda tensors: tensors[name].view(torch.uint8).fill_(0xFF),
        r"layers\.1\.mlp\.down_proj\.weight .* is no number",
    )
    refused(lambda tensors: tensors[f"{name}_scale"].neg_(), r"weight_scale has a scale that is negative")
    refused(lambda tensors: tensors.pop(f"{name}_scale"), r"down_proj\.weight is stored as F8_E4M3.* scale is missing")
    refused(lambda tensors: tensors.update({name: tensors[name].float()}), r"stored as F32, .* it is F8_E4M3")
    refused(lambda tensors: tensors.update({f"{name}_scale": torch.ones(3, 1)}), r"has the shape \[3, 1\]")
    refused(lambda tensors: tensors.update({f"{name}_scale": torch.ones(2)}), r"has the shape \[2\]", "tensor")


@pytest.mark.parametrize("kind", ["channel", "modelopt", "blocks"])
def test_numbers_without_a_scale_are_no_codes(kind: str, copied: Callable[..., Path]) -> None:
    """The head, which transformers never lists, and what is below a module that the list names as a whole."""
    folder, plain = copied("llama", tie_word_embeddings=False), copied("llama", tie_word_embeddings=False)
    before = load_file(plain / "model.safetensors")

    def below_attention(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.0.self_attn" in name]:
            whole = before.get(name)
            tensors.pop(name) if whole is None else tensors.update({name: whole})

    exact = write_quantised(folder, kind, below_attention)
    save_file(exact | {k: v for k, v in before.items() if "layers.0.self_attn" in k}, plain / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    for key in ("ignore", "modules_to_not_convert"):
        if key in settings["quantization_config"]:
            settings["quantization_config"][key] = ["model.layers.0.self_attn"]
    (folder / "config.json").write_text(json.dumps(settings))
    check_near(logits(folder), logits(plain))


def stacked(tensors: dict[str, torch.Tensor]) -> None:
    """Make each layer's experts one tensor of matrices and one of scales, as transformers writes them."""
    for stem in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for suffix, end in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                names = [[f"{stem}.experts.{i}.{part}.{suffix}" for part in parts] for i in range(5)]
                if names[0][0] in tensors:
                    rows = [torch.cat([tensors.pop(name).float() for name in own]) for own in names]
                    tensors[f"{stem}.experts.{stack}{end}"] = torch.stack(rows).to(torch.float32 if end else FP8)
    for name in [name for name in tensors if ".experts." in name and name.endswith("input_scale")]:
        del tensors[name]


def test_blocks_of_stacked_experts(copied: Callable[..., Path]) -> None:
    folder, plain = copied("qwen3_moe"), copied("qwen3_moe")
    save_file(write_quantised(folder, "blocks", stacked), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))


def test_a_scale_that_the_first_expert_lacks_is_named(copied: Callable[..., Path]) -> None:
    folder, name = copied("qwen3_moe"), "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    write_quantised(folder, "channel", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=rf"lacks a tensor of the model: {name}; .*fetch the model again"):
        load(source_of(folder))


def test_blocks_wider_than_a_matrix() -> None:
    """What config.json says of them takes no memory."""
    form = Fp8Format(PLAIN, of_rows=False, block=(4, 1 << 62))
    codes, scale = torch.ones(8, 20).to(FP8), torch.tensor([[2.0], [3.0]])
    made = form.make({"weight": codes, "weight_scale": scale})
    assert torch.equal(made.multiply(torch.ones(1, 20)), torch.tensor([[40.0] * 4 + [60.0] * 4]))


def test_parts_of_blocks_of_experts(copied: Callable[..., Path]) -> None:
    """Those of down are read: on a GPU their scales are of fewer rows, as no two experts share one. Those of gate and
    up, which are below each other, are refused."""
    form = Fp8Format(PLAIN, of_rows=False, block=(32, 32))
    stored, gen = form.tensors(80, 64, False), torch.Generator().manual_seed(1)
    experts = CodedExperts(form.expert_codes, 3, stored, CPU)
    wanted = []
    for expert in range(3):
        tensors = {
            "weight": torch.randn(80, 64, generator=gen).to(FP8),
            "weight_scale": torch.rand(3, 2, generator=gen),
        }
        for suffix, tensor in tensors.items():
            experts.room(expert, suffix, slice(None)).copy_(tensor)
        experts.finish(expert)
        scale = tensors["weight_scale"].repeat_interleave(32, 0)[:80].repeat_interleave(32, 1)
        wanted.append(tensors["weight"].float() * scale)
    assert experts.matrices is not None and experts.matrices.codes.rows == 16
    assert torch.equal(numbers(experts.matrices.codes), torch.cat(wanted))
    folder = copied("qwen3_moe", moe_intermediate_size=40)
    write_quantised(folder, "parts of blocks")
    with pytest.raises(ModelLoadError, match=r"experts\.\*, gate_proj and up_proj .* 40 rows of each .* blocks of 32"):
        load(source_of(folder))


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(rows: int, dtype: torch.dtype, rng: random.Random) -> None:
    """Of codes with scales from tiny to large; sums over codes alone pass float16's range."""
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    codes = (torch.randn(80, 96, generator=gen) * 200).clamp(-448, 448).to(FP8)
    scale, bias = 10 ** (torch.rand(80, generator=gen) * 8 - 7), torch.randn(80, generator=gen)
    x = torch.randn(rows, 96, generator=gen).div(20).to(dtype)
    wanted = x.double() @ (codes.double() * scale[:, None].double()).t() + bias
    out = ScaledWeight(codes, scale, bias).multiply(x)
    assert out.dtype == dtype
    sizes = x.double().abs() @ (codes.double().abs() * scale[:, None].double()).t() + bias.abs()
    assert float(((out.double() - wanted).abs() / sizes).max()) < {torch.float32: 2e-6}.get(dtype, 1e-2)


def test_blocks_are_kept_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; the last block of a row may be smaller."""
    monkeypatch.setattr(fp8, "grouped_weight", lambda codes, bias, plain, **how: GroupedWeight(codes, bias, **how))
    gen = torch.Generator().manual_seed(1)
    codes, scale = torch.randn(16, 80, generator=gen).to(FP8), torch.rand(2, 3, generator=gen)
    form = Fp8Format(PLAIN, "weight_scale_inv", of_rows=False, block=(8, 32))
    made = form.make({"weight": codes, "weight_scale_inv": scale})
    assert isinstance(made, GroupedWeight)
    whole = scale.repeat_interleave(8, 0).repeat_interleave(32, 1)[:, :80]
    assert torch.equal(numbers(made.codes), codes.float() * whole)


def test_made_of_16_bits(rng: random.Random) -> None:
    """Each row is off by what FP8 has at most, in experts as in matrices; a row of zeros stays one."""
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    weight = torch.randn(3, 40, 32, generator=gen) * 10 ** torch.randn(3, 40, 1, generator=gen)
    weight[1, 7] = 0
    made = MadeFp8Format(PLAIN).make({"weight": weight[0], "bias": torch.ones(40)})
    assert isinstance(made, ScaledWeight) and made.codes.dtype == FP8 and made.bias is not None
    experts = MadeFp8Format(PLAIN).make_experts(3, PLAIN.tensors(40, 32, False), CPU)
    assert isinstance(experts, MadeFp8Experts)
    for expert in (2, 0, 1):
        for rows in (slice(0, 20), slice(20, 40)):
            experts.room(expert, "weight", rows).copy_(weight[expert, rows])
        experts.finish(expert)
    matrices = experts.matrices
    assert matrices is not None and matrices.scale is not None
    again = matrices.weight.float() * matrices.scale[..., None]
    torch.testing.assert_close(again[0], made.codes.float() * made.scale[:, None])
    largest = weight.abs().amax(2, keepdim=True)
    assert bool(((again - weight).abs() <= (weight.abs() / 16).maximum(largest * 2**-17)).all())
    assert torch.equal(quantised(weight[1])[0][7].float(), torch.zeros(32))


def test_settings() -> None:
    """Only a GPU makes FP8 of 16 bits; a checkpoint in FP8 stays what it is."""
    with pytest.raises(ModelLoadError, match="is for GPUs"):
        check_cpu(EngineConfig(model="m", quantization="fp8"))
    gpu = torch.device("cuda")
    made = choose_formats("bfloat16", gpu, {}, quantization="fp8")
    assert isinstance(made.of("model.layers.0.mlp.gate_proj"), MadeFp8Format)
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"):
        assert isinstance(made.of(name), PlainFormat)
    (weight,) = made.of("a").tensors(8, 4, False)
    assert weight.dtype == torch.bfloat16 and weight.kept == FP8, "what memory is needed is that of FP8"
    stored = choose_formats("bfloat16", gpu, {"quantization_config": KINDS["blocks"][2]}, quantization="fp8")
    assert stored.of("a") == Fp8Format(PlainFormat(torch.bfloat16), "weight_scale_inv", False, (8, 32), True)
    assert isinstance(stored.of("a").make_experts(2, stored.of("a").tensors(16, 64, False), gpu), CodedExperts)
    assert stored.of("a").tensors(12, 40, False)[1].shape == (2, 2), "the last blocks may be smaller"
    with pytest.raises(ModelLoadError, match="quantised"):
        choose_formats("bfloat16", gpu, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})


@pytest.mark.parametrize(
    ("x", "rounds"),
    [
        (None, False),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, True),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, True),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, False),
    ],
    ids=["weights alone", "dynamic", "static", "integers"],
)
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_activations_are_rounded_where_the_recipe_does(
    kind: str, x: dict[str, Any] | None, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compressed-tensors says so; the other methods do it always."""
    config = compressed(kind)
    config["config_groups"]["group_0"] |= {"input_activations": x}
    config["config_groups"]["group_0"]["weights"] |= {"block_structure": [8, 32]} if kind == "block" else {}
    form = choose_formats("bfloat16", torch.device("cuda"), {"quantization_config": config}).of("a")
    monkeypatch.setattr(fp8, "grouped_weight", lambda codes, bias, plain, **how: GroupedWeight(codes, bias, **how))
    scale = torch.ones(2, 2) if kind == "block" else torch.ones(16, 1)
    assert isinstance(form, Fp8Format) and form.quantises_x == rounds
    made = form.make({"weight": torch.ones(16, 64).to(FP8), "weight_scale": scale})
    assert kind != "block" or (isinstance(made, GroupedWeight) and made.quantises_x == rounds)
    experts = form.make_experts(1, form.tensors(16, 64, False), torch.device("meta"))
    assert kind != "block" or (isinstance(experts, CodedExperts) and experts.quantises_x == rounds)


def test_experts_that_a_gpu_does_not_multiply() -> None:
    """In blocks of 24 columns: an error, or numbers."""
    name, gen = "weight_scale_inv", torch.Generator().manual_seed(1)
    form = Fp8Format(PLAIN, name, of_rows=False, block=(8, 24))
    stored = form.tensors(64, 96, False)
    with pytest.raises(ModelLoadError, match="blocks of 24 columns .*'dequantise'"):
        form.make_experts(1, stored, torch.device("meta"))
    experts = replace(form, dequantises=True).make_experts(1, stored, torch.device("meta"))
    assert isinstance(experts, DequantisedExperts)
    codes, scale = torch.randn(64, 96, generator=gen).to(FP8), torch.rand(8, 4, generator=gen)
    made = form._numbers({"weight": codes, name: scale})
    torch.testing.assert_close(made, codes.float() * scale.repeat_interleave(8, 0).repeat_interleave(24, 1))


def test_experts_with_a_scale_a_matrix() -> None:
    """On a GPU: one for each of its rows, so that those of gate and up may differ."""
    form = Fp8Format(PLAIN, "weight_scale_inv", of_rows=False)
    stored = [one._replace(shape=one.shape or (8, 1)) for one in form.tensors(8, 32, False)]
    made = form.make_experts(2, stored, torch.device("meta"))
    assert isinstance(made, ScaledExperts)
    experts = ScaledExperts(2, stored, CPU, "weight_scale_inv")
    for expert in range(2):
        experts.room(expert, "weight", slice(None)).copy_(torch.ones(8, 32))
        for half in range(2):
            experts.room(expert, "weight_scale_inv", slice(4 * half, 4 * half + 4)).copy_(torch.tensor(1.0 + half))
        experts.finish(expert)
    assert experts.matrices is not None and experts.matrices.scale is not None
    assert experts.matrices.scale.tolist() == [[1.0] * 4 + [2.0] * 4] * 2
