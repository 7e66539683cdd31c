"""Experts that stay codes on a GPU: loaded so on a CPU, and multiplied by the Triton kernels (here interpreted)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CPU, Driver, build, check_near, load, source_of
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file
from test_expert_layers import TOKENS, TinyModel, logits, mxfp4
from test_fp8_weights import write_quantised
from test_gguf_weights import SIZES as GGUF_SIZES
from test_gguf_weights import write_gguf
from test_group_weights import MOE, write
from tiny import make_tiny_model, write_tiny_model
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.grouped_codes import GroupedCodes, numbers
from aengine.runner.distributed.shares import Share
from aengine.runner.layers.expert_linear import ExpertLinear
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.packed_experts import Mxfp4Codes, Mxfp4Experts
from aengine.runner.weights.quantised.fp8 import Fp8Format
from aengine.runner.weights.quantised.gguf import CODED_TYPES, GgufFormat
from aengine.runner.weights.quantised.grouped import CodedExperts
from aengine.runner.weights.quantised.unpacked import UnpackedFormat, grouped_codes
from aengine.runner.weights.scope import WeightScope
from aengine.runner.weights.sources.gguf_source import GgufMatrices, gguf_types
from aengine.runner.weights.weight import StoredTensor


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, wide_programs: None) -> Iterator[None]:
    def coded(form: Any, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> CodedExperts:
        def codes_of(own: Any) -> GroupedCodes:
            return grouped_codes(form.unpack(own))[0] if isinstance(form, UnpackedFormat) else form._codes(own)

        return CodedExperts(codes_of, num_experts, tensors, device)

    monkeypatch.setattr(Fp8Format, "make_experts", coded)
    monkeypatch.setattr(UnpackedFormat, "make_experts", coded)
    monkeypatch.setattr(GgufFormat, "make_experts", coded)
    monkeypatch.setattr(Mxfp4Experts, "of", lambda layout, formats, in_features: Mxfp4Codes())
    with triton_everywhere():
        yield


def weights_of(folder: Path) -> Any:
    return load(source_of(folder))[0].layers[0].mlp.experts.gate_up.weights  # type: ignore[attr-defined]


def test_mxfp4_of_gpt_oss(tmp_path: Path, tiny_model: TinyModel, as_on_a_gpu: None) -> None:
    """With biases, and gate and up in turn."""
    folders = [
        Path(shutil.copytree(tiny_model("gpt_oss", seed=7, num_hidden_layers=2), tmp_path / name))
        for name in ("codes", "plain")
    ]
    exact = mxfp4(folders[0])
    save_file(exact, folders[1] / "model.safetensors")
    weights = weights_of(folders[0])
    assert isinstance(weights, CodedExperts) and weights.kind == "e2m1" and weights.matrices is not None
    stacked = exact["model.layers.0.mlp.experts.gate_up_proj"].transpose(1, 2)
    assert torch.equal(numbers(weights.matrices.codes), stacked.flatten(0, 1))
    check_near(logits(folders[0]), logits(folders[1]))


def test_experts_in_two_forms(tmp_path: Path, tiny_model: TinyModel) -> None:
    """As codes and as numbers: neither says which of them counts, and codes without a config say what they are."""
    folder = Path(shutil.copytree(tiny_model("gpt_oss", seed=7, num_hidden_layers=2), tmp_path / "model"))
    path, name = folder / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    exact = mxfp4(folder)
    save_file({**load_file(path), name: exact[name].contiguous()}, path)
    with pytest.raises(ModelLoadError, match=r"has both \S+\.down_proj and \S+\.down_proj_blocks, and which"):
        load(source_of(folder))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match=r"lacks 3 tensors .*_blocks is of a quantised one, of which config\.json has"
    ):
        load(source_of(folder))


@pytest.mark.parametrize("kind", ["awq", "nvfp4", "blocks"])
def test_codes_of_a_mixture(kind: str, tmp_path: Path, as_on_a_gpu: None) -> None:
    own = write_tiny_model(tmp_path / "own", "qwen3_moe", seed=3, num_hidden_layers=2, **MOE)
    plain = Path(shutil.copytree(own, tmp_path / "plain"))
    exact = write_quantised(own, kind) if kind == "blocks" else write(own, kind)
    save_file(exact, plain / "model.safetensors")
    assert isinstance(weights_of(own), CodedExperts)
    check_near(logits(own), logits(plain))


@pytest.mark.parametrize(
    ("arch", "overrides", "kinds"),
    [
        ("qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 64}, [Q.Q4_0]),
        ("qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 64}, [Q.Q8_0, Q.Q5_0, Q.Q4_1, Q.Q4_0]),
        ("gpt_oss", {"sliding_window": 7}, [Q.Q8_0]),
    ],
)
def test_stacks_of_a_gguf(
    arch: str, overrides: dict[str, Any], kinds: list[Q], tmp_path: Path, as_on_a_gpu: None
) -> None:
    """Gate and up of different types become numbers."""
    reference, path = (
        make_tiny_model(arch, seed=3, num_hidden_layers=2, **GGUF_SIZES, **overrides),
        tmp_path / "tiny.gguf",
    )
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() >= 2:
                weight.mul_(0.3)
        write_gguf(path, reference, arch, kinds)
    source = source_of(path)
    packed = GgufMatrices.of_file(source.path, build(source).gguf, CODED_TYPES, has_stacks=True)
    model, _ = load(source, packed=packed)
    experts = [layer.mlp.experts for layer in model.layers]  # type: ignore[attr-defined]
    stored = gguf_types(source.path, build(source).gguf)
    for layer, own in enumerate(experts):
        gate, up = (stored[f"model.layers.{layer}.mlp.experts.0.{part}_proj"] for part in ("gate", "up"))
        assert isinstance(own.gate_up.weights, CodedExperts) == (gate == up)
        assert isinstance(own.down.weights, CodedExperts)
    found = Driver(model, random.Random(0)).step({"a": TOKENS})["a"]
    with torch.inference_mode():
        check_near(found, reference(torch.tensor([TOKENS]), use_cache=False).logits[0])


def random_mxfp4(gen: torch.Generator, experts: int, rows: int, columns: int) -> dict[str, Tensor]:
    shape = (experts, rows, columns // 32)
    return {
        "w_blocks": torch.randint(0, 256, (*shape, 16), generator=gen, dtype=torch.uint8),
        "w_scales": torch.randint(119, 126, shape, generator=gen, dtype=torch.uint8),
        "w_bias": torch.randn(experts, rows, generator=gen),
    }


def filled(tensors: dict[str, Tensor], experts: Share, columns: Any, rows: Any) -> CodedExperts:
    scope = WeightScope(choose_formats("float32", CPU))
    linear = ExpertLinear(scope, experts, columns, {"w": rows}, bias=True, layout=Mxfp4Experts())
    for name, (place,) in scope.places.items():
        tensor = tensors[name]
        place.put(tensor if place.part is None else place.part.of(tensor))
    assert isinstance(linear.weights, CodedExperts)
    return linear.weights


def test_shares_of_packed_codes(as_on_a_gpu: None) -> None:
    """Of the experts, of each one's rows, of each one's columns: loaded at first, and again into the same memory."""
    gen = torch.Generator().manual_seed(0)
    for _ in range(2):
        tensors = random_mxfp4(gen, 4, 32, 128)
        whole = filled(tensors, Share(4), 128, 32).matrices
        assert whole is not None and whole.bias is not None
        exact = numbers(whole.codes).view(4, 32, 128)
        for own, wanted, bias in (
            (filled(tensors, Share(2, 1, 2), 128, 32), exact[2:], whole.bias[2:]),
            (filled(tensors, Share(4), 128, Share(16, 1, 2)), exact[:, 16:], whole.bias[:, 16:]),
            (filled(tensors, Share(4), Share(64, 1, 2), 32), exact[..., 64:], whole.bias),
        ):
            assert own.matrices is not None and own.matrices.bias is not None
            assert torch.equal(numbers(own.matrices.codes), wanted.flatten(0, 1))
            assert torch.equal(own.matrices.bias, bias)


def test_groups_are_not_cut() -> None:
    """A rank's columns must be whole groups, or they become numbers."""
    for dequantises in (False, True):
        formats = choose_formats("bfloat16", torch.device("meta"), {}, dequantises=dequantises)
        layout = Mxfp4Experts()
        assert isinstance(layout.of(formats, 96), Mxfp4Codes)
        if dequantises:
            assert layout.of(formats, 48) is layout
            continue
        with pytest.raises(ModelLoadError, match=r"mlp\.experts\.w: 48 columns .*32.*enable_expert_parallel=True"):
            ExpertLinear(
                WeightScope(formats).at("mlp").at("experts"), Share(4), Share(48, 0, 2), {"w": 32}, layout=layout
            )


def test_experts_loaded_again_keep_their_memory() -> None:
    """Of experts whose scales differ in dtype, all are float32; captured graphs know no other memory."""

    def codes_of(own: Any) -> GroupedCodes:
        return GroupedCodes("int8", own["codes"], own["scale"].to(dtypes[int(own["codes"][0, 0])]), 32)

    dtypes = [torch.float16, torch.bfloat16]
    stored = [StoredTensor("codes", (2, 32), torch.int8, 64), StoredTensor("scale", (2, 1), torch.float32, 0)]
    experts = CodedExperts(codes_of, 2, stored, CPU)

    def fill(expert: int, code: int) -> None:
        experts.room(expert, "codes", slice(None)).fill_(code)
        experts.room(expert, "scale", slice(None)).fill_(0.5)
        experts.finish(expert)

    fill(0, 0)
    fill(1, 1)
    assert experts.matrices is not None and experts.matrices.codes.scale.dtype == torch.float32
    assert numbers(experts.matrices.codes)[:, 0].tolist() == [0, 0, 0.5, 0.5]
    memory = experts.matrices.codes.scale
    fill(1, 0)
    assert experts.matrices.codes.scale is memory and numbers(experts.matrices.codes)[:, 0].tolist() == [0] * 4
    experts = CodedExperts(codes_of, 2, stored, CPU)
    for expert in range(2):
        fill(expert, 0)
    with pytest.raises(ValueError, match=r"scales are torch\.bfloat16 now, and were torch\.float16"):
        fill(1, 1)
