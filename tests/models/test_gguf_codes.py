"""Blocks of GGUF as codes: what they mean against the gguf package, type by type."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from driver import CPU, Driver, build, check_near, load, source_of
from gguf import GGMLQuantizationType as Q
from test_gguf_weights import SIZES, write_gguf
from tiny import VOCAB_SIZE, make_tiny_model

from aengine.checkpoint.gguf_file import GgufFile
from aengine.errors import ModelLoadError
from aengine.kernels import linear
from aengine.kernels.grouped_codes import numbers
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.quantised import gguf as kept
from aengine.runner.weights.quantised.gguf import CODED_TYPES, GgufFormat, grouped_codes
from aengine.runner.weights.quantised.grouped import GroupedWeight
from aengine.runner.weights.sources.gguf_source import GgufMatrices

EXACT = {"Q4_0", "IQ4_NL", "Q4_1", "MXFP4", "Q5_0", "Q5_1", "Q8_0"}
BITS = {
    **dict.fromkeys(("Q4_0", "IQ4_NL", "IQ4_XS"), 4.5),
    **dict.fromkeys(("Q4_1", "Q3_K", "Q4_K"), 5),
    **dict.fromkeys(("Q5_0", "Q8_0"), 8.5),
    **dict.fromkeys(("Q5_1", "Q5_K", "Q6_K"), 9),
    "MXFP4": 4.25,
    "Q2_K": 6,
}
SCALES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


QUANTISE = gguf.quants.quantize


def random_quantised(numbers: np.ndarray, kind: Q) -> np.ndarray:
    """Blocks of a type that the gguf package only reads: any bits, but scales by which the numbers' mean is 0 and their
    size 0.08."""
    if kind.name not in (*SCALES, "IQ4_NL", "MXFP4"):
        return QUANTISE(numbers, kind)
    length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(numbers.tobytes()))
    blocks = rng.integers(0, 256, (numbers.size // length, num_bytes), np.uint8)
    if kind == Q.MXFP4:
        blocks[:, 0] = 119 + blocks[:, 0] % 4
        return blocks.reshape(*numbers.shape[:-1], -1)
    places = SCALES.get(kind.name, (0,))

    def scaled(*scales: float) -> np.ndarray:
        for place, scale in zip(places, scales, strict=True):
            blocks[:, place : place + 2] = np.float16(scale).reshape(1).view(np.uint8)
        return gguf.quants.dequantize(blocks, kind)

    ratios = [1.0]
    if len(places) == 2:
        ratios.append(-float(scaled(1, 0).mean() / scaled(0, 1).mean()))
    scaled(*(0.08 * ratio / float(scaled(*ratios).std()) for ratio in ratios))
    return blocks.reshape(*numbers.shape[:-1], -1)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None, wide_programs: None) -> None:
    """Blocks become codes as on a GPU, and Triton's interpreter multiplies them."""

    def make(form: GgufFormat, tensors: Mapping[str, torch.Tensor]) -> GroupedWeight:
        return GroupedWeight(grouped_codes(tensors["weight"], form.type_code), tensors.get("bias"))

    monkeypatch.setattr(GgufFormat, "make", make)
    monkeypatch.setattr(linear, "uses_triton", lambda x: True)


def random_blocks(name: str, rows: int, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, blocks, bytes], any bits but in the scales, which are numbers of many sizes."""
    random = np.random.default_rng(seed)
    block_len, num_bytes = gguf.GGML_QUANT_SIZES[Q[name]]
    blocks = random.integers(0, 256, (rows, 1024 // block_len, num_bytes), np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = random.integers(100, 140, blocks.shape[:2])
        return torch.from_numpy(blocks)
    for place in SCALES.get(name, (0,)):
        scale = random.standard_normal(blocks.shape[:2]) * 10.0 ** random.uniform(-4, 0, blocks.shape[:2])
        blocks[..., place : place + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(blocks)


def by_the_package(blocks: torch.Tensor, name: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), Q[name]))


@pytest.mark.parametrize("name", CODED_TYPES)
def test_codes_mean_what_the_gguf_package_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_CODES_AT_ONCE", 3 * 1024)  # three rows, and a rest
    blocks = random_blocks(name, 11)
    codes = grouped_codes(blocks, int(Q[name]))
    assert codes.shape == (11, 1024)
    wanted, found = by_the_package(blocks, name), numbers(codes)
    if name in EXACT:
        assert torch.equal(found, wanted)
    else:  # a scale is rounded to float16, at most 2^-11; an offset may take most of it away again
        largest = wanted.abs().amax(1, keepdim=True)
        assert float(((found - wanted).abs() / largest).max()) < 1e-3
    taken = sum(tensor.nbytes for key, tensor in codes.tensors().items() if key != "row_scale")
    assert taken * 8 / (11 * 1024) == BITS[name]


@pytest.mark.parametrize("name", CODED_TYPES)
def test_a_scale_that_is_no_number_is_refused(name: str) -> None:
    blocks = random_blocks(name, 4)
    for place in (0,) if name == "MXFP4" else SCALES.get(name, (0,)):
        damaged = blocks.clone()
        damaged[2, -1, place : place + 2] = 255
        with pytest.raises(ValueError, match=f"{name}, is no number"):
            grouped_codes(damaged, int(Q[name]))
        with pytest.raises(ValueError, match=f"{name}, is no number"):
            GgufFormat(int(Q[name])).make({"weight": damaged})  # on a CPU
    GgufFormat(int(Q[name])).make({"weight": blocks})


def test_rows_without_weights_are_zeros() -> None:
    blocks = torch.zeros(2, 4, 144, dtype=torch.uint8)
    assert not numbers(grouped_codes(blocks, int(Q.Q4_K))).any()
    assert GgufFormat(int(Q.Q4_K)).name == "q4_k"


@pytest.mark.parametrize(
    ("arch", "overrides", "kinds"),
    [
        ("llama", {"attention_bias": True}, [Q.Q4_0, Q.Q8_0]),  # rows of q and k are reordered, each in a type
        ("qwen2", {}, [Q.Q5_0, Q.Q4_1]),
    ],
)
def test_a_model_of_codes(
    arch: str, overrides: dict[str, Any], kinds: list[Q], tmp_path: Path, rng: random.Random, triton: None
) -> None:
    """As on a GPU, by the kernels."""
    reference = make_tiny_model(arch, seed=rng.getrandbits(30), num_hidden_layers=2, **SIZES, **overrides)
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() >= 2:
                weight.mul_(0.3)  # else a layer multiplies what the kernels round in the layer before
        write_gguf(tmp_path / "tiny.gguf", reference, arch, kinds)
    source = source_of(tmp_path / "tiny.gguf")
    packed = GgufMatrices.of_file(source.path, build(source).gguf, CODED_TYPES)
    assert {form.name for form in packed.formats.values()} == {kind.name.lower() for kind in kinds}
    model, _ = load(source, packed=packed)
    assert isinstance(model.layers[0].attention.o.weight, GroupedWeight)  # type: ignore[attr-defined]
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(7)]
    driver = Driver(model, rng)
    found = torch.cat([driver.step({"a": part})["a"] for part in (tokens[:6], tokens[6:])])
    with torch.inference_mode():
        check_near(found, reference(torch.tensor([tokens]), use_cache=False).logits[0])


def test_a_type_without_codes_becomes_numbers(tmp_path: Path) -> None:
    with torch.no_grad():
        write_gguf(tmp_path / "tiny.gguf", make_tiny_model("llama", **SIZES), "llama", [Q.TQ2_0, Q.Q4_0])
    source = source_of(tmp_path / "tiny.gguf")
    names = build(source).gguf
    assert GgufMatrices.of_file(source.path, names, CODED_TYPES).name == "q4_0"
    assert GgufMatrices.of_file(source.path, names).name == "q4_0, tq2_0"
    none = GgufMatrices.of_file(source.path, names, ())
    assert choose_formats("float32", CPU, packed=none).name == "float32", "where no type is kept"


def test_damaged_blocks_are_told_with_the_matrix(tmp_path: Path, triton: None) -> None:
    path = tmp_path / "tiny.gguf"
    with torch.no_grad():
        write_gguf(path, make_tiny_model("llama", **SIZES), "llama", [Q.Q4_0])
    source = source_of(path)
    with GgufFile(path) as file:
        begin = file.tensors["blk.0.ffn_down.weight"].offset
    data = bytearray(path.read_bytes())
    data[begin : begin + 2] = b"\xff\xff"
    path.write_bytes(data)
    packed = GgufMatrices.of_file(source.path, build(source).gguf, CODED_TYPES)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_down\.weight.*Q4_0, is no number; fetch the model"):
        load(source, packed=packed)


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.1.attn_norm.weight"])
def test_damaged_numbers_are_told_with_the_tensor(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with torch.no_grad():
        write_gguf(path, make_tiny_model("llama", **SIZES), "llama", [Q.Q4_0])
    source = source_of(path)
    with GgufFile(path) as file:
        begin = file.tensors[name].offset
    data = bytearray(path.read_bytes())
    data[begin : begin + 4] = b"\x00\x7c\x80\x7f"  # infinity as float16, NaN as float32
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"tensor {name} holds NaN or infinity"):
        load(source)
