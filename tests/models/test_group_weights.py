"""Weights of 4 and 8 bits with scales of groups: each way in which checkpoints keep them is the dequantised model.

The writers here follow the formats' own definitions, bit by bit. group_weights.json has what compressed-tensors 0.20
packed of one matrix, and a digest of the numbers that it made of that again.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from driver import CPU, Driver, check_near, load, no_progress, source_of
from safetensors.torch import load_file, save_file

from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.runner.startup.estimate import estimate
from aengine.runner.weights.expert_weights import StackedExperts
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.plain import PlainFormat, PlainWeight
from aengine.runner.weights.quantised import unpacked
from aengine.runner.weights.quantised.awq import AwqFormat
from aengine.runner.weights.quantised.gptq import GptqFormat
from aengine.runner.weights.quantised.grouped import CodedExperts, numbers
from aengine.runner.weights.quantised.unpacked import DequantisedExperts, UnpackedFormat, grouped_codes
from aengine.runner.weights.quantised.unpacked import numbers as unpacked_numbers
from aengine.runner.weights.scope import Place
from aengine.runner.weights.sources.loader import load_weights
from aengine.runner.weights.sources.reading import Target
from aengine.runner.weights.weight import NotMultiplied

Tensors = dict[str, torch.Tensor]
TOKENS = list(range(40, 70))
FP8 = torch.float8_e4m3fn
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {**SIZES, "head_dim": 16, "moe_intermediate_size": 64}


def packed(codes: torch.Tensor, bits: int, dim: int, places: list[int] | None = None) -> torch.Tensor:
    """int32 words of codes along a dimension: code i of a word at bit ``bits * places[i]``."""
    per_word = 32 // bits
    codes = codes.long().movedim(dim, -1)
    parts = codes.reshape(*codes.shape[:-1], -1, per_word)
    words = sum(parts[..., i] << bits * (places[i] if places else i) for i in range(per_word))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


class Grouped(NamedTuple):
    """Integers from 0 on with scales and zeros of groups, and what they mean."""

    codes: torch.Tensor  # int64 [N, K]
    scale: torch.Tensor  # float16 [N, G]
    zero: torch.Tensor  # int64 [N, G]
    g_idx: torch.Tensor  # int64 [K]

    @property
    def exact(self) -> torch.Tensor:
        return (self.codes - self.zero[:, self.g_idx]).float() * self.scale.float()[:, self.g_idx]


def grouped(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, order: torch.Tensor | None = None
) -> Grouped:
    """``order``: of columns, by which neighbours are one group."""
    _, k = weight.shape
    order = torch.arange(k) if order is None else order
    g_idx = torch.empty(k, dtype=torch.long)
    g_idx[order] = torch.arange(k) // group
    parts = weight[:, order].unflatten(1, (-1, group))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    most = 2**bits - 1
    scale = (2 * torch.maximum(-low, high) if symmetric else high - low) / most
    scale = (scale + 1e-4).half()
    zero = torch.full(scale.shape, 2 ** (bits - 1)) if symmetric else (-low / scale.float()).round().long()
    codes = ((weight / scale.float()[:, g_idx]).round().long() + zero[:, g_idx]).clamp(0, most)
    return Grouped(codes, scale, zero.clamp(1, most), g_idx)


def awq(name: str, weight: torch.Tensor, group: int = 32) -> tuple[Tensors, torch.Tensor]:
    own = grouped(weight, 4, group)
    places = [0, 4, 1, 5, 2, 6, 3, 7]
    tensors = {
        f"{name}.qweight": packed(own.codes.t(), 4, 1, places),
        f"{name}.qzeros": packed(own.zero.t(), 4, 1, places),
        f"{name}.scales": own.scale.t(),
    }
    return tensors, own.exact


def gptq(
    name: str,
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    less: int = 1,
    sym: bool = False,
    act: bool = False,
    seed: int = 0,
) -> tuple[Tensors, torch.Tensor]:
    k = weight.shape[1]
    group = k if group < 0 else group
    # Matrices of one input have one order, unless their seeds differ.
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k + seed)) if act else None
    own = grouped(weight, bits, group, symmetric=sym, order=order)
    tensors = {
        f"{name}.qweight": packed(own.codes.t(), bits, 0),
        f"{name}.qzeros": packed(own.zero.t() - less, bits, 1),
        f"{name}.scales": own.scale.t(),
        f"{name}.g_idx": own.g_idx.int(),
    }
    return tensors, own.exact


def integers(
    name: str,
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    act: bool = False,
    pack: bool = True,
) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors'."""
    k = weight.shape[1]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act else None
    own = grouped(weight, bits, group or k, symmetric=sym, order=order)
    tensors = {f"{name}.weight_scale": own.scale}
    middle = 2 ** (bits - 1)
    if pack:
        tensors[f"{name}.weight_packed"] = packed(own.codes, bits, 1)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    else:
        tensors[f"{name}.weight"] = (own.codes - middle).to(torch.int8)
    if not sym:
        zero = packed(own.zero, bits, 0) if pack else (own.zero - middle).to(torch.int8)
        tensors[f"{name}.weight_zero_point"] = zero
    if act:
        tensors[f"{name}.weight_g_idx"] = own.g_idx.int()
    return tensors, own.exact


def whole_integers(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A scale a matrix."""
    scale = weight.abs().amax() / 127
    codes = (weight / scale).round()
    return {f"{name}.weight": codes.to(torch.int8), f"{name}.weight_scale": scale.view(1)}, codes * scale


def fp4(name: str, weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    group = 32 if kind == "mxfp4" else 16
    parts = weight.unflatten(1, (-1, group))
    largest = parts.abs().amax(2)
    whole = weight.abs().amax() / (6 * 448)
    if kind == "mxfp4":
        stored = largest.div(6).log2().ceil().add(127).to(torch.uint8)
        scale = torch.exp2(stored.float() - 127)
    else:
        stored = (largest / 6 / whole).to(FP8)
        scale = stored.float() * whole
    codes = (parts.abs() / scale[..., None].clamp(min=1e-30)).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    codes = (codes | (parts < 0).long() << 3).flatten(1)
    exact = (E2M1[codes & 7] * (1 - 2 * (codes >> 3))).unflatten(1, (-1, group)) * scale[..., None]
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {
        f"{name}.weight" if kind == "modelopt" else f"{name}.weight_packed": pairs,
        f"{name}.weight_scale": stored,
    }
    if kind == "modelopt":
        tensors |= {f"{name}.weight_scale_2": whole, f"{name}.input_scale": torch.tensor(0.5)}
    if kind == "nvfp4":
        tensors |= {f"{name}.weight_global_scale": 1 / whole.view(1), f"{name}.input_global_scale": torch.ones(1)}
    return tensors, exact.flatten(1)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


def of_gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, **fields}


def of_modelopt(layers: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACK, INT = "pack-quantized", "int-quantized"
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
KINDS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq, AWQ),
    "awq, whole rows": (lambda n, w: awq(n, w, w.shape[1]), {**AWQ, "group_size": -1}),
    "gptq": (gptq, of_gptq()),
    "gptq, symmetric": (lambda n, w: gptq(n, w, sym=True), of_gptq(sym=True)),
    "gptq 8": (lambda n, w: gptq(n, w, bits=8), of_gptq(bits=8, checkpoint_format="gptq")),
    "gptq 8, symmetric": (lambda n, w: gptq(n, w, bits=8, sym=True), of_gptq(bits=8, sym=True)),
    "gptq, whole rows": (lambda n, w: gptq(n, w, group=-1), of_gptq(group_size=-1, desc_act=True)),
    "gptq_v2": (lambda n, w: gptq(n, w, less=0), of_gptq(checkpoint_format="gptq_v2")),
    "gptq, act-order": (lambda n, w: gptq(n, w, act=True), of_gptq(desc_act=True)),
    "gptq, act-order of each": (
        lambda n, w: gptq(n, w, act=True, seed=zlib.crc32(n.encode())),
        of_gptq(desc_act=True),
    ),
    "int4": (integers, compressed(PACK)),
    "int4, zeros": (lambda n, w: integers(n, w, sym=False), compressed(PACK, symmetric=False)),
    "int4, act-order": (lambda n, w: integers(n, w, act=True), compressed(PACK, actorder="group")),
    "int4, channel": (lambda n, w: integers(n, w, group=0), compressed(PACK, strategy="channel", group_size=None)),
    "int4, channel, zeros": (
        lambda n, w: integers(n, w, group=0, sym=False),
        compressed(PACK, strategy="channel", group_size=-1, symmetric=False),
    ),
    "int8": (lambda n, w: integers(n, w, 8), compressed(PACK, num_bits=8)),
    "int8, zeros": (lambda n, w: integers(n, w, 8, sym=False), compressed(PACK, num_bits=8, symmetric=False)),
    "int8, plain": (lambda n, w: integers(n, w, 8, pack=False), compressed(INT, num_bits=8)),
    "int8, plain, zeros": (
        lambda n, w: integers(n, w, 8, group=0, sym=False, pack=False),
        compressed(INT, num_bits=8, symmetric=False, strategy="channel", group_size=None),
    ),
    "int8, tensor": (whole_integers, compressed(INT, num_bits=8, strategy="tensor", group_size=None)),
    "nvfp4": (
        lambda n, w: fp4(n, w, "nvfp4"),
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4": (lambda n, w: fp4(n, w, "mxfp4"), compressed("mxfp4-pack-quantized", type="float")),
    "modelopt": (
        lambda n, w: fp4(n, w, "modelopt"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    ),
}


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_stars_of_modelopt_stand_for_letters(method: str) -> None:
    config = {"quant_method": method, "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]}
    matrices = choose_formats("float32", torch.device("cpu"), {"quantization_config": config}, stored=None).quantised
    assert matrices is not None
    assert matrices.of("model.layers.3.mlp.gate") is None and matrices.of("model.layers.3.mlp.gate_proj") is not None


def is_quantised(name: str) -> bool:
    return name.endswith("proj.weight")


def write(
    folder: Path,
    kind: str,
    spoil: Callable[[Tensors], object] = lambda _: None,
    config: dict[str, Any] | None = None,
    only: Callable[[str], bool] = is_quantised,
) -> Tensors:
    """Write the folder's matrices as codes; returns all tensors as numbers again, by name."""
    writer, own_config = KINDS[kind]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    exact = dict(tensors)
    for full in filter(only, list(tensors)):
        codes, exact[full] = writer(full.removesuffix(".weight"), tensors.pop(full).float())
        tensors |= codes
    spoil(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    set_config(folder, own_config if config is None else config)
    return {name: tensor.contiguous() for name, tensor in exact.items()}


def set_config(folder: Path, config: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def logits(folder: Path) -> torch.Tensor:
    driver = Driver(load(source_of(folder), "float32")[0], random.Random(0))
    return torch.cat([driver.step({"a": part})["a"] for part in (TOKENS[:20], TOKENS[20:21], TOKENS[21:])])


@pytest.fixture
def copied(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(arch: str = "llama", **fields: Any) -> Path:
        folder = tmp_path / f"{arch}-{len(list(tmp_path.iterdir()))}"
        sizes = MOE if arch == "qwen3_moe" else SIZES
        return Path(shutil.copytree(tiny_model(arch, seed=3, **sizes, **fields), folder))

    return copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_a_quantised_checkpoint_is_the_dequantised_model(arch: str, kind: str, copied: Callable[..., Path]) -> None:
    fields = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    folder, plain = copied(arch, **fields), copied(arch, **fields)
    save_file(write(folder, kind), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    assert load(source_of(folder))[1].num_parameters == load(source_of(plain))[1].num_parameters


def test_a_format_of_each_matrix(copied: Callable[..., Path]) -> None:
    """As ModelOpt names them, in a model for images and text as well."""
    folder, plain = copied(), copied()
    tensors = load_file(folder / "model.safetensors")
    exact, layers = dict(tensors), {}
    for name in [name.removesuffix(".weight") for name in tensors if is_quantised(name) and "o_proj" not in name]:
        weight = tensors.pop(f"{name}.weight").float()
        if "self_attn" in name:
            scale = weight.abs().amax() / 448
            codes = {f"{name}.weight": (weight / scale).to(FP8), f"{name}.weight_scale": scale}
            exact[f"{name}.weight"] = codes[f"{name}.weight"].float() * scale
        else:
            codes, exact[f"{name}.weight"] = fp4(name, weight, "modelopt")
        tensors |= codes
        form = {"quant_algo": "FP8"} if "self_attn" in name else {"quant_algo": "NVFP4", "group_size": 16}
        layers[name if "down" in name else name.replace("model.", "model.language_model.", 1)] = form
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, plain / "model.safetensors")
    set_config(folder, of_modelopt(layers))
    check_near(logits(folder), logits(plain))
    assert load(source_of(folder))[0].weights.formats.name == "fp8, nvfp4"


def test_gptq_without_an_order_may_lack_g_idx(copied: Callable[..., Path]) -> None:
    def without(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]

    folder, plain = copied(), copied()
    save_file(write(folder, "gptq", without), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    set_config(folder, of_gptq(desc_act=True))
    with pytest.raises(ModelLoadError, match=r"lacks \d+ tensors .*g_idx"):
        load(source_of(folder))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("int8, tensor",)])
def test_codes_for_a_gpu_mean_the_same(kind: str) -> None:
    """`GroupedCodes`, with the order of the columns, of one matrix and of two below each other."""
    writer, config = KINDS[kind]
    formats = choose_formats("float32", torch.device("cuda"), {"quantization_config": config}, stored={"a.qweight"})
    form = formats.of("a")
    assert isinstance(form, UnpackedFormat)
    gen = torch.Generator().manual_seed(5)
    below = []
    for rows in (64, 32):
        tensors, exact = writer("a", torch.randn(rows, 128, generator=gen))
        own = {}
        for stored in form.tensors(rows, 128, False):
            tensor = tensors[f"a.{stored.suffix}"]
            assert tuple(tensor.shape) == stored.shape or (tensor.numel() == 1 and stored.shape == ())
            tensor = tensor.expand(rows, 1) if stored.shape == () else tensor.t() if stored.turned else tensor
            own[stored.suffix] = tensor
        below.append((own, exact))
    joined = {name: torch.cat([own[name] for own, _ in below]) for name in below[0][0]}
    for own, exact in (*below, (joined, torch.cat([exact for _, exact in below]))):
        codes, order = grouped_codes(form.unpack(own))
        made = numbers(codes)
        if order is not None:
            made = made[:, order.argsort()]
        torch.testing.assert_close(made, exact.float(), rtol=2e-6, atol=1e-7)
        assert codes.scale.element_size() <= 2, "as small as the checkpoint's"
    assert ("act-order" in kind) == (order is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stay_codes_for_compiled_kernels(kind: str) -> None:
    """But for those whose columns are in an order: they are numbers of 16 bits."""
    pytest.importorskip("llvmlite")
    from aengine.runner.weights.compiled import CompiledWeight

    writer, config = KINDS[kind]
    formats = choose_formats("auto", CPU, {"quantization_config": config}, stored={"a.qweight"}, is_compiled=True)
    tensors, exact = writer("a", torch.randn(80, 128, generator=torch.Generator().manual_seed(5)))
    own = {}
    for stored in formats.of("a").tensors(80, 128, False):
        tensor = tensors[f"a.{stored.suffix}"]
        own[stored.suffix] = tensor.t() if stored.turned else tensor
    made = formats.of("a").make(own)
    assert isinstance(made, CompiledWeight)
    is_ordered = "act-order" in kind
    assert (made.packed.memory.nbytes < 2 * exact.numel()) is not is_ordered
    x = torch.randn(3, 128)
    torch.testing.assert_close(made.multiply(x), x @ exact.float().T, atol=2e-2 if is_ordered else 1e-4, rtol=0)


def test_what_a_gpu_can_not_keep(copied: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 24 columns are codes for no kernel: an error with the matrix' name and the cure, or numbers."""
    unpacked.log_dequantised.cache_clear()
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    tensors, exact = awq("a", weight, 24)
    own = {name[2:]: tensor.t() for name, tensor in tensors.items()}
    plain = PlainFormat(torch.float32)
    with pytest.raises(NotMultiplied, match=r"96 columns in groups of 24 .*on_unsupported_format='dequantise'"):
        AwqFormat(plain, False, False, 24).make(own)
    form = AwqFormat(plain, False, True, 24)
    for _ in range(2):
        made = form.make(own)
    assert isinstance(made, PlainWeight)
    torch.testing.assert_close(made.weight, exact)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["awq"], "one line"
    (first, *_) = form.tensors(64, 96, False)
    assert first.kept == torch.float32, "what memory is needed is that of the numbers"

    def put(tensor: torch.Tensor) -> None:
        AwqFormat(plain, False, False, 24).make(own)

    place = Place("model.a.qweight", (96, 8), torch.int32, 96 * 64, put)
    with pytest.raises(ModelLoadError, match=r"model\.a\.qweight, or .*'dequantise' \(16 bits\), or a CPU$"):
        Target({place.name: place}, CPU).put([place], own["qweight"])


def test_experts_of_a_gpu_become_numbers() -> None:
    """Where `on_unsupported_format` says so, and again as they are loaded again."""
    gpu, plain = torch.device("cuda"), PlainFormat(torch.float32)
    form = AwqFormat(plain, False, False, 32)
    assert isinstance(form.make_experts(2, form.tensors(64, 64, False), gpu), CodedExperts)
    ordered = GptqFormat(plain, False, False, 4, 32, True, False, True)
    with pytest.raises(ModelLoadError, match=r"experts in gptq: .*desc_act.*on_unsupported_format='dequantise'"):
        ordered.make_experts(2, ordered.tensors(64, 64, False), gpu)
    odd = AwqFormat(plain, False, True, 24)
    assert isinstance(odd.make_experts(2, odd.tensors(64, 96, False), gpu), DequantisedExperts)
    stored = [one._replace(shape=one.shape[::-1]) for one in form.tensors(64, 64, False)]
    experts = DequantisedExperts(form._expert_numbers, plain, 2, stored, CPU)
    for seed in (0, 1):
        gen = torch.Generator().manual_seed(seed)
        wanted = []
        for expert in range(2):
            tensors, exact = awq("a", torch.randn(64, 64, generator=gen))
            wanted.append(exact)
            for one in stored:
                experts.room(expert, one.suffix, slice(None)).t().copy_(tensors[f"a.{one.suffix}"])
            experts.finish(expert)
        inner = experts._inner
        assert isinstance(inner, StackedExperts) and inner.matrices is not None
        torch.testing.assert_close(inner.matrices.weight, torch.stack(wanted))


def test_several_groups_by_name_pattern_and_class(copied: Callable[..., Path]) -> None:
    """A name goes before a pattern, a pattern before the class; what is ignored is plain; a head may be quantised."""
    folder, plain = copied(), copied()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    exact = dict(tensors)
    for full in [name for name in tensors if is_quantised(name) or name == "lm_head.weight"]:
        name = full.removesuffix(".weight")
        if name.endswith("layers.1.mlp.up_proj"):
            continue
        kind = "int4"
        if name.endswith("layers.0.mlp.down_proj"):
            kind = "nvfp4"
        elif "down_proj" in name or name == "lm_head":
            kind = "int8, plain"
        codes, exact[full] = KINDS[kind][0](name, tensors.pop(full).float())
        tensors |= codes
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    groups = {}
    for kind, targets in (
        ("int4", ["Linear"]),
        ("int8, plain", ["re:.*down_proj$", "re:lm_head"]),
        ("nvfp4", ["model.layers.0.mlp.down_proj"]),
    ):
        config = KINDS[kind][1]
        groups[kind] = {**config["config_groups"]["group_0"], "targets": targets, "format": config["format"]}
    set_config(
        folder,
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": groups,
            "ignore": ["model.layers.1.mlp.up_proj"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
    )
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    assert load(source_of(folder))[0].weights.formats.name == "int4, int8, nvfp4"


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_stack_of_experts_in_numbers_is_no_codes(kind: str) -> None:
    """Whether the list has it or not: it is no Linear, which writers list. One with a scale is codes."""
    stored = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"]
    stored.append(f"{stored[1]}_scale_inv")
    formats = choose_formats("float32", CPU, {"quantization_config": KINDS[kind][1]}, stored=stored)
    found = [formats.of(f"model.layers.{i}.mlp.experts.0.up_proj").name for i in range(2)]
    assert found == ["float32", kind]


def test_targets_of_groups() -> None:
    """A class is of its own modules; of equal targets the last counts; a group that no matrix has may be anything."""
    config = compressed(PACK)
    int4 = config["config_groups"]["group_0"]
    int8, none = ({**int4, "weights": {**int4["weights"], "num_bits": bits}} for bits in (8, 3))
    config["config_groups"] |= {
        "1": {**none, "targets": ["re:.*vision_tower.*", "re:.*k_proj"]},
        "2": {**int8, "targets": ["Embedding", "re:.*v_proj"]},
        "3": {**int4, "targets": ["re:.*v_proj"]},
    }
    formats = choose_formats("float32", CPU, {"quantization_config": config}, stored=[])
    of_activations = compressed(PACK) | {"config_groups": {"0": {"targets": ["Linear"], "weights": None}}}
    assert choose_formats("float32", CPU, {"quantization_config": of_activations}).quantised is None
    names = ["model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    assert [formats.of(name).name for name in names] == ["int8", "int4", "int4"]
    with pytest.raises(ModelLoadError, match=r"config_groups: 1: format 'pack-quantized', int weights in 3 bits"):
        formats.of("model.layers.0.self_attn.k_proj")


def test_rules_of_gptqmodel(copied: Callable[..., Path]) -> None:
    """The first rule that fits says what is other than in the config; a matrix may be left plain, the head not."""
    folder, plain = copied(), copied()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    exact = dict(tensors)
    for full in [name for name in tensors if is_quantised(name) or name == "lm_head.weight"]:
        if "o_proj" in full:
            continue
        kind = "gptq 8" if ".1.mlp.down" in full else "gptq"
        codes, exact[full] = KINDS[kind][0](full.removesuffix(".weight"), tensors.pop(full).float())
        tensors |= codes
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    dynamic = {r"+:.*\.1\.mlp\.down_proj": {"bits": 8}, r"-:.*o_proj": {}, r".*mlp": {"bits": 4}}
    set_config(folder, of_gptq(lm_head=True, dynamic=dynamic))
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, plain / "model.safetensors")
    check_near(logits(folder), logits(plain))


WRONG: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "negative": (
        "awq",
        lambda t: t[f"{DOWN}.scales"].neg_(),
        r"/llama-0: \S+\.down_proj\.scales has a scale that is neg",
    ),
    "infinite": ("gptq", lambda t: t[f"{UP}.scales"].fill_(torch.inf), r"up_proj\.scales has a scale that is negative"),
    "nan": ("int4", lambda t: t[f"{UP}.weight_scale"].fill_(torch.nan), r"up_proj\.weight_scale has a scale that is"),
    "nan in e4m3": ("nvfp4", lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8).fill_(127), "weight_scale has a sc"),
    "nan in e8m0": ("mxfp4", lambda t: t[f"{DOWN}.weight_scale"].fill_(255), "weight_scale has a scale"),
    "zero to divide by": ("nvfp4", lambda t: t[f"{DOWN}.weight_global_scale"].zero_(), "weight_global_scale has a sc"),
    "rows' scale": ("int8, tensor", lambda t: t[f"{DOWN}.weight_scale"].neg_(), r"down_proj\.weight_scale has a scale"),
    "g_idx": ("gptq, act-order", lambda t: t[f"{UP}.g_idx"].add_(1), r"up_proj\.g_idx names a group that is none"),
    "g_idx below": ("gptq, act-order", lambda t: t[f"{DOWN}.g_idx"].sub_(1), r"down_proj\.g_idx names a group"),
    "order": ("gptq", lambda t: t[f"{DOWN}.g_idx"].copy_(t[f"{DOWN}.g_idx"].flip(0)), r"down_proj\.g_idx has an order"),
    "no scale": ("int4", lambda t: t.pop(f"{DOWN}.weight_scale"), r"lacks a tensor .*down_proj\.weight_scale"),
    "no zeros": ("awq", lambda t: t.pop(f"{DOWN}.qzeros"), r"lacks a tensor .*down_proj\.qzeros"),
    "shape": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_shape": torch.tensor([128, 64])}),
        r"down_proj\.weight_shape is another shape than that of the codes beside it: fetch",
    ),
    "truncated": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"][:, :5]}),
        r"down_proj.weight_packed has the shape \[64, 5\], but by the config it is \[64, 16\]",
    ),
    "other group": (
        "awq",
        lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"][:2]}),
        r"down_proj.scales has the shape \[2, 64\], but by the config it is \[4, 64\]",
    ),
    "other codes": (
        "nvfp4",
        lambda t: t.update({f"{DOWN}.weight_packed": torch.ones(64, 64)}),
        "is stored as F32.*it is U8",
    ),
}


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "zeros": ("int4, zeros", compressed(PACK), r"weight_zero_point has zeros, .* symmetric: fetch"),
    "order": ("int4, act-order", compressed(PACK), r"weight_g_idx has an order of columns, and by the quantization_c"),
    "gptq's zeros": ("gptq", of_gptq(sym=True), r"llama-0: \S+\.qzeros has zeros that are not symm.*says sym=true"),
    "gptq's version": ("gptq_v2", of_gptq(sym=True), r"\.qzeros has zeros that are not symmetric"),
    "awq's zeros": (
        "awq",
        {**AWQ, "zero_point": False},
        r"\.qzeros has zeros that are not symm.*says zero_point=false",
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_tensors_that_say_more_than_the_config_are_refused(what: str, copied: Callable[..., Path]) -> None:
    kind, config, message = CONTRADICTIONS[what]
    folder = copied()
    write(folder, kind, config=config)
    with pytest.raises(ModelLoadError, match=message):
        load(source_of(folder))


def test_an_expert_in_another_format_is_named(copied: Callable[..., Path]) -> None:
    """Also where the config says so."""
    folder = copied("qwen3_moe")
    config = compressed(PACK)
    config["ignore"].append(r"re:.*experts\.3\.")
    write(folder, "int4", config=config, only=lambda name: is_quantised(name) and "experts.3." not in name)
    with pytest.raises(
        ModelLoadError, match=r"experts\.3\.\w+\.weight is in another format than .*first expert.*: give"
    ):
        load(source_of(folder))


def test_an_expert_in_another_group_is_named(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3_moe")
    config = compressed(PACK)
    int4 = config["config_groups"]["group_0"]
    int8 = {**int4, "targets": [r"re:.*experts\.3\."], "weights": {**int4["weights"], "num_bits": 8}}
    config["config_groups"]["group_1"] = int8
    own = {"model.layers.0.mlp.experts.3.up_proj.weight"}
    write(folder, "int8", config=config, only=lambda name: name in own)
    write(folder, "int4", config=config, only=lambda name: is_quantised(name) and name not in own)
    with pytest.raises(
        ModelLoadError, match=r"experts\.3\.\S+ is in int8, and the layer's first expert in int4.*: give"
    ):
        load(source_of(folder))


def test_a_matrix_that_is_there_twice_is_refused(copied: Callable[..., Path]) -> None:
    folder = copied()
    write(folder, "gptq", lambda t: t.update({f"{UP}.weight": torch.ones(128, 64)}))
    with pytest.raises(ModelLoadError, match=r"has both \S+up_proj\.weight and \S+up_proj\.qweight, and"):
        load(source_of(folder))


def test_tensors_that_say_no_more_than_the_config(copied: Callable[..., Path], caplog: Any) -> None:
    """As older versions of llm-compressor and AutoGPTQ write them."""

    def more(tensors: Tensors) -> None:
        for name in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
            rows, groups = tensors[f"{name}.weight_scale"].shape
            tensors[f"{name}.weight_zero_point"] = torch.zeros(rows, groups, dtype=torch.int8)
            tensors[f"{name}.weight_g_idx"] = torch.arange(32 * groups, dtype=torch.int32) // 32
            tensors[f"{name}.bias"] = torch.zeros(rows)

    folder, plain, ordered = copied(), copied(), copied()
    save_file(write(folder, "int4", more), plain / "model.safetensors")
    check_near(logits(folder), logits(plain))
    with caplog.at_level("WARNING", logger="aengine"):
        load(source_of(folder))
    assert "does not use" not in caplog.text

    def unordered(tensors: Tensors) -> None:
        more(tensors)
        tensors |= {name: g_idx.fill_(-1) for name, g_idx in tensors.items() if name.endswith("g_idx")}

    write(ordered, "int4", unordered, config=compressed(PACK, actorder="group"))
    check_near(logits(ordered), logits(plain))


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tensors_are_refused_by_name(what: str, copied: Callable[..., Path]) -> None:
    kind, spoil, message = WRONG[what]
    folder = copied()
    write(folder, kind, spoil)
    with pytest.raises(ModelLoadError, match=message):
        load(source_of(folder))


@pytest.mark.parametrize("what", ["", "no scale", "truncated", "other codes"])
def test_what_headers_show_is_found_without_loading(what: str, copied: Callable[..., Path]) -> None:
    kind, spoil, message = WRONG[what] if what else ("gptq", lambda _: None, "")
    folder = copied()
    write(folder, kind, spoil)
    config = EngineConfig.create(str(folder), {"device": "cpu"})
    if not what:
        assert estimate(config)["weight_bytes"] > 0
        return
    with pytest.raises(ModelLoadError, match=message):
        estimate(config)


@pytest.mark.parametrize("kind", ["gptq", "int4"])
def test_codes_without_a_config_are_told(kind: str, copied: Callable[..., Path]) -> None:
    """As of older files, beside which a quantize_config.json lies."""
    folder = copied()
    write(folder, kind, config={})
    with pytest.raises(
        ModelLoadError, match=r"lacks 21 tensors .*_proj\.\w+ is of .* no quantization_config: give the"
    ):
        load(source_of(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**AWQ, "version": "gemv"}, "AWQ of version 'gemv' in 4 bits .*read: give the checkpoint in 16 or 32 bits"),
        ({**AWQ, "bits": 8}, "AWQ of version 'gemm' in 8 bits"),
        ({**AWQ, "group_size": 0}, "group_size=0 must be -1 or above 0"),
        ({**AWQ, "group_size": 48}, r"layers\.0\.\S+ in awq: .*no multiples of .*group_size=48; give"),
        (of_gptq(bits=3), "GPTQ in 3 bits of checkpoint_format 'gptq'"),
        (of_gptq(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (of_gptq(dynamic={"re(": {}}), "dynamic: aengine can't read the pattern"),
        (of_gptq(dynamic={f"{i}": {} for i in range(257)}), "dynamic has 257 patterns: 256 at most"),
        (of_gptq(dynamic=[]), "dynamic=.* must be an object"),
        (compressed(PACK, num_bits=2), "format 'pack-quantized', int weights in 2 bits"),
        (compressed("marlin-24"), "format 'marlin-24'"),
        (compressed(PACK, group_size=48), r"layers\.0\.\S+ in int4: .*48 columns"),
        ({**compressed(PACK), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config has weights"),
        ({**compressed(PACK), "config_groups": {}}, "config_groups=.* names no matrices .*: give the checkpoint in 16"),
        ({"quant_method": "compressed-tensors"}, "config_groups=None names no matrices"),
        (of_modelopt({UP: {"quant_algo": "W4A16_AWQ"}}), r"quantized_layers: \S+up_proj in 'W4A16_AWQ'.*: give the"),
        (of_modelopt({UP: {"quant_algo": "NVFP4", "group_size": 32}}), "in NVFP4 with a scale for 32 columns"),
        (of_modelopt({UP: 8}), f"{UP}=8 must be an object"),
        (of_modelopt({}), "quantized_layers={} names no matrices"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"config.json: modelopt W4A8_AWQ\) in a way that"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"bitsandbytes\).*reads GGUF.*give the checkpoint in 16",
        ),
    ],
)
def test_what_no_format_reads_is_refused(config: dict[str, Any], message: str, copied: Callable[..., Path]) -> None:
    folder = copied()
    message = rf"{folder}\S*: .*{message}"
    kind = {"awq": "awq", "gptq": "gptq", "compressed-tensors": "int4"}.get(config["quant_method"])
    if kind is None:
        set_config(folder, config)
    else:
        write(folder, kind, config=config)
    with pytest.raises(ModelLoadError, match=message):
        load(source_of(folder))


@pytest.mark.parametrize("below", ["language_model.model", "model.language_model"])
def test_names_of_a_model_for_images_and_text(below: str) -> None:
    """Its config has what the text model's matrices are called in the whole."""
    name, escaped = f"{below}.layers.0.mlp.down_proj", below.replace(".", r"\.")
    config = {**compressed(PACK), "ignore": [rf"re:{escaped}\.layers\.2\..*"]}
    config["config_groups"]["group_0"]["targets"] = [name, rf"re:{escaped}\.layers\.[12]\."]
    formats = choose_formats("float32", CPU, {"quantization_config": config})
    found = [formats.of(f"model.layers.{i}.mlp.down_proj").name for i in range(4)]
    assert found == ["int4", "int4", "float32", "float32"]
    gptq = of_gptq(dynamic={rf"-:{escaped}\..*down_proj": {}})
    formats = choose_formats("float32", CPU, {"quantization_config": gptq}, stored=[f"{DOWN}.qweight", f"{UP}.qweight"])
    assert [formats.of(name).name for name in (DOWN, UP)] == ["float32", "gptq"]


def test_nothing_is_made_of_a_matrix_that_is_too_large(copied: Callable[..., Path]) -> None:
    """What the numbers take is known before one is read."""
    folder, plain = copied(), copied()
    save_file(write(folder, "int4"), plain / "model.safetensors")
    needed = [
        sum(first.kept_bytes for first, *_ in load(source_of(one))[0].weights.places.values())
        for one in (folder, plain)
    ]
    assert needed[1] <= needed[0] < 1.1 * needed[1], "with the scales"


@pytest.mark.parametrize("kind", ["int4, zeros", "int4, channel, zeros", "mxfp4"])
def test_what_compressed_tensors_packed(kind: str) -> None:
    """Its bytes are its numbers, to the last bit."""
    packed = json.loads((Path(__file__).parent / "group_weights.json").read_text())[kind]
    form = choose_formats("float32", CPU, {"quantization_config": KINDS[kind][1]}).of("a")
    assert isinstance(form, UnpackedFormat)
    tensors = {}
    for stored in form.tensors(16, 64, False):
        tensors[stored.suffix] = torch.tensor(packed["tensors"][stored.suffix], dtype=stored.dtype)
        assert tuple(tensors[stored.suffix].shape) == stored.shape
    made = unpacked_numbers(form.unpack(tensors), torch.float32)
    assert hashlib.sha256(bytes(made.numpy().tobytes())).hexdigest()[:16] == packed["sha256"]


@pytest.mark.parametrize("kind", ["gptq, act-order", "nvfp4"])
def test_loaded_again(kind: str, copied: Callable[..., Path]) -> None:
    """Into the memory that the weights have."""
    folder, other, plain = copied(), copied(), copied()
    write(folder, kind)
    path = other / "model.safetensors"
    save_file({name: -tensor if is_quantised(name) else tensor for name, tensor in load_file(path).items()}, path)
    save_file(write(other, kind), plain / "model.safetensors")
    model, _ = load(source_of(folder))
    load_weights(model, source_of(other), 0, no_progress)
    check_near(Driver(model, random.Random(0)).step({"a": TOKENS})["a"][-1:], logits(plain)[-1:])
