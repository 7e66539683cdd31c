"""Products with packed matrices on a CPU, beside the dequantised weights."""

from __future__ import annotations

import itertools
import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("llvmlite")

import llvmlite.binding as llvm
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from pairs import some

from aengine.kernels.cpu import codes, tape
from aengine.kernels.cpu.codes import Activations, PackedMatrix
from aengine.kernels.cpu.compiler import target as cpu_target
from aengine.kernels.cpu.compiler.code_cache import CodeCache
from aengine.kernels.cpu.compiler.emit import Module
from aengine.kernels.cpu.compiler.target import Target, host, instructions
from aengine.kernels.cpu.library import Library, write_kernels
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes
from aengine.kernels.grouped_codes import numbers as numbers_of_codes

FLOAT16_AT: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "mxfp4": (),
}
"""Where blocks of GGUF's types have float16 numbers."""
KINDS = [*FLOAT16_AT, "int8"]
NUMBERS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")


def matrix(kind: str, out_features: int, in_features: int) -> tuple[PackedMatrix, Tensor]:
    """A matrix of random codes, and what they mean."""
    if kind == "int8":
        weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
        scale = torch.rand(out_features)
        return codes.pack(kind, weight, scale), weight * scale[:, None]
    if kind == "int16":
        weight = torch.randn(out_features, in_features)
        return codes.pack_int16(weight), numbers(codes.quantise_int16(weight)).float()
    if kind in NUMBERS:
        weight = torch.randn(out_features, in_features).to(NUMBERS[kind])
        return codes.pack(kind, weight), weight.float()
    type_ = GGMLQuantizationType[kind.upper()]
    length, num_bytes = GGML_QUANT_SIZES[type_]
    blocks = torch.randint(0, 256, (out_features, in_features // length, num_bytes), dtype=torch.uint8)
    for place in FLOAT16_AT[kind]:
        scales = torch.randn(*blocks.shape[:2], 1).half()
        blocks[..., place : place + 2] = scales.view(torch.uint8)
    if kind == "mxfp4":
        blocks[..., 0] = blocks[..., 0] % 16 + 120
    meaning = dequantize(blocks.flatten(1).numpy(), type_)
    return codes.pack(kind, blocks), torch.from_numpy(meaning)


def numbers(of: Activations) -> Tensor:
    """The activations that codes stand for, float64."""
    if of.meta is None:
        return of.x.double()
    scales = of.meta.view(len(of.x), -1, 4)[:, :, :1].double()
    return (whole_codes(of).double() * scales).flatten(1)


def whole_codes(of: Activations) -> Tensor:
    """int32 [rows, blocks, 32]."""
    if of.form == "int16":
        return of.x.unflatten(1, (-1, 32)).int()
    high, low = of.x.view(torch.int8).unflatten(1, (-1, 2, 32)).int().unbind(2)
    return 256 * high + low


def activations(kind: str, x: Tensor, as_codes: bool) -> Activations:
    """``x`` as a matrix of a kind is multiplied with it."""
    return codes.quantise_int16(x) if kind == "int16" else codes.activations(x, as_codes=as_codes)


def close(own: Tensor, expected: Tensor) -> None:
    assert (own - expected).abs().max() <= 1e-5 * expected.abs().max()


MODES = [(kind, as_codes) for kind in KINDS for as_codes in (True, False)]
MODES += [(kind, False) for kind in NUMBERS] + [("int16", True)]


@pytest.mark.parametrize(("kind", "as_codes"), MODES)
def test_a_product_is_that_of_the_stored_weights(kind: str, as_codes: bool) -> None:
    for rows, out_features, size in ((1, 7, 1), (70, 100, 3), (13, 160, 8)):
        in_features = size * (256 if kind in K_QUANTS else 32)
        if kind in NUMBERS:
            in_features += 13 - size
        packed, meaning = matrix(kind, out_features, in_features)
        of = activations(kind, torch.randn(rows, in_features), as_codes)
        close(codes.multiply(packed, of), numbers(of) @ meaning.double().T)


def test_int16_is_as_exact_as_float16_and_never_too_large() -> None:
    x, weight = torch.randn(9, 96), torch.randn(48, 96)
    weight[5], x[2] = -3.0, 5.0  # codes are the largest
    weight[6], x[3] = 0.0, 0.0
    own = codes.multiply(codes.pack_int16(weight), codes.quantise_int16(x))
    exact = x.double() @ weight.double().T
    assert (own - exact).norm() < 2e-4 * exact.norm()
    torch.testing.assert_close(own[2, 5].double(), exact[2, 5])
    assert not own[3].any() and not own[:, 6].any()


def test_bias_and_scale_of_what_is_added() -> None:
    packed, meaning = matrix("q4_1", 100, 64)
    of = codes.activations(torch.randn(11, 64))
    bias, residual = torch.randn(100), torch.randn(11, 200)[:, :100]
    expected = numbers(of) @ meaning.double().T + bias
    close(codes.multiply(packed, of, bias), expected)
    total = residual + 0.5 * expected
    codes.add_to(residual, packed, of, 0.5, bias)
    close(residual, total)


GROUPED: list[tuple[CodeKind, int, str]] = [
    ("int4", 64, "row_scale"),
    ("uint4", 32, "zero"),
    ("uint4", 128, "offset"),
    ("e2m1", 16, "row_scale"),
    ("int8", 1024, ""),
    ("uint8", 512, "zero offset"),
]


@pytest.mark.parametrize(("kind", "group", "parts"), GROUPED)
def test_codes_with_a_scale_a_group(kind: CodeKind, group: int, parts: str) -> None:
    of_groups = (41, max(1, 1024 // group))
    limits = (-128, 128, torch.int8) if kind == "int8" else (0, 256, torch.uint8)
    width = 1024 if "8" in kind else 512
    codes_of_matrix = GroupedCodes(
        kind,
        torch.randint(*limits[:2], (41, width), dtype=limits[2]),
        torch.rand(of_groups).half(),
        group,
        zero=torch.randint(0, 16, of_groups, dtype=torch.uint8) if "zero" in parts else None,
        offset=torch.randn(of_groups) if "offset" in parts else None,
        row_scale=torch.rand(41) if "row_scale" in parts else None,
    )
    packed = codes.pack_grouped(codes_of_matrix)
    assert packed is not None
    for as_codes in (True, False):
        of = codes.activations(torch.randn(3, 1024), as_codes=as_codes)
        close(codes.multiply(packed, of), numbers(of) @ numbers_of_codes(codes_of_matrix).double().T)


def test_groups_without_a_layout() -> None:
    assert codes.pack_grouped(GroupedCodes("uint4", torch.zeros(8, 16).byte(), torch.ones(8, 2), 16)) is None
    assert codes.pack_grouped(GroupedCodes("int8", torch.zeros(8, 48).char(), torch.ones(8, 1), 48)) is None


@pytest.mark.parametrize(
    ("kind", "as_codes"), [("q4_1", True), ("q6_k", True), ("q5_0", False), ("bfloat16", False), ("int16", True)]
)
def test_a_row_does_not_depend_on_those_beside_it(kind: str, as_codes: bool) -> None:
    packed, _ = matrix(kind, 48, 256)
    x = torch.randn(81, 256)
    together = codes.multiply(packed, activations(kind, x, as_codes))
    for begin, end in ((0, 1), (1, 3), (3, 10), (10, 25), (17, 81)):
        own = codes.multiply(packed, activations(kind, x[begin:end].contiguous(), as_codes))
        assert torch.equal(own, together[begin:end])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates(activation: codes.Activation) -> None:
    packed, meaning = matrix("q4_1", 96, 64)
    of = codes.activations(torch.randn(9, 64) * 3)
    bias = torch.randn(96)
    gate, up = (numbers(of) @ meaning.double().T + bias).chunk(2, 1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    exact = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=approximate)
    close(codes.gated(packed, of, activation, bias), exact * up)
    close(codes.activated(packed, of, activation, bias)[:, :48], exact)
    assert not codes.can_gate(matrix("q4_1", 48, 32)[0])


@pytest.mark.parametrize("as_codes", [True, False])
def test_a_recorded_product_has_a_norm_before_it(as_codes: bool) -> None:
    packed, meaning = matrix("q8_0", 40, 96)
    x, weight = torch.randn(6, 96), torch.randn(96)
    with tape.record(rows=6) as recorded:
        of = codes.activations(x, (weight, 1e-5), as_codes=as_codes)
        out = codes.multiply(packed, of)
    recorded.run(4)
    close(out[:4].double(), numbers(of)[:4] @ meaning.double().T)
    normed = F.rms_norm(x, (96,), weight, 1e-5)
    code = normed.abs().amax() / 32512  # a number is rounded by half of it, and by one more where low would be -128
    assert ((numbers(of) - normed).abs() <= (1.51 * code if as_codes else code / 30))[:4].all()


HALVES = (("q4_1", "iq4_nl", "float16"), ("q8_0", "q6_k", "int16"))
"""Kinds of matrices, as processors have other instructions for them: one half for each processor in `make test`."""


def other(features: str, tmp_path: Path) -> Library:
    """Kernels for a processor that has less than this one may have."""
    return Library(Target(host().triple, "x86-64", features), 1, CodeCache(tmp_path))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="what AVX lacks is compared with what it has")
@pytest.mark.parametrize(
    ("features", "kinds"),
    some(
        itertools.product(("+avx,+fma,+f16c", "+avx,+fma,+f16c,+avx2"), HALVES),
        *zip(("+avx,+fma,+f16c", "+avx,+fma,+f16c,+avx2"), HALVES, strict=True),
    ),
)
def test_processors_compute_the_same(
    features: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of integers, and of float32 in the same order."""
    lesser = other(features, tmp_path)
    for kind in kinds:
        packed, _ = matrix(kind, 40, 256)
        of = activations(kind, torch.randn(7, 256), kind != "float16")
        own = codes.multiply(packed, of)
        with monkeypatch.context() as context:
            context.setattr(tape, "library", lambda: lesser)
            assert torch.equal(codes.multiply(packed, of), own)


@pytest.mark.parametrize(
    ("triple", "features", "instruction"),
    [
        ("aarch64-unknown-linux-gnu", "+neon,+dotprod", "sdot"),
        ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,+avxvnni", "{vex}\tvpdpbusd"),
    ],
)
def test_dot_products_of_other_processors(triple: str, features: str, instruction: str) -> None:
    """They are compiled, not run."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = Target(triple, "generic" if "aarch64" in triple else "x86-64", features)
    names = ["product_q4_1_planes_add", "product_iq4_xs_planes_store", "product_q8_0_planes_gelu", "pack_q4_k"]
    assert write_assembly(names, target).count(instruction) >= 3 * 7 * 2 * 8


def write_assembly(names: list[str], target: Target) -> str:
    module = Module("products")
    write_kernels(module, names, target)
    parsed = llvm.parse_assembly(str(module.llvm))
    parsed.triple = target.triple
    return str(target.machine().emit_assembly(parsed))


@pytest.mark.parametrize(("kind", "parts"), [("q4_1", 1), ("q6_k", 2)])
def test_tiles_multiply_many_rows_of_codes(kind: str, parts: int) -> None:
    """They are compiled on any machine: for each end, one function multiplies both planes by a block's parts."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    features = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+amx-tile,+amx-int8"
    target = Target("x86_64-unknown-linux-gnu", "x86-64", features)
    assembly = write_assembly([f"product_{kind}_planes_{end}" for end in ("store", "add", "silu")], target)
    assert assembly.count("tdpbssd") == 2 * parts
    assert assembly.count("ldtilecfg") == assembly.count("tilerelease") == 3
    others = ["product_q4_1_float32_store", "product_bfloat16_float32_store", "product_int16_int16_add"]
    assert "ldtilecfg" not in write_assembly(others, target)


@pytest.mark.skipif("AMX int8" not in instructions(), reason="this processor, or the system, has no AMX")
@pytest.mark.parametrize(
    "kind", some(["q4_1", "q8_0", "q2_k", "q4_k", "q6_k", "iq4_nl", "int8"], "q4_1", "q6_k", "int8")
)
def test_tiles_compute_what_vectors_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: rows in whole tiles, in none, and beyond them; more blocks than are unpacked at once."""
    lesser = other("+avx,+fma,+f16c,+avx2", tmp_path)
    for rows, out_features, in_features in ((15, 40, 256), (16, 7, 256), (46, 16, 4096 + 512), (70, 64, 768)):
        packed, meaning = matrix(kind, out_features, in_features)
        of = codes.activations(torch.randn(rows, in_features))
        own, gate = codes.multiply(packed, of), codes.gated(packed, of, "silu") if codes.can_gate(packed) else None
        close(own, numbers(of) @ meaning.double().T)
        with monkeypatch.context() as context:
            context.setattr(tape, "library", lambda: lesser)
            assert torch.equal(codes.multiply(packed, of), own)
            assert gate is None or torch.equal(codes.gated(packed, of, "silu"), gate)


def test_a_system_that_refuses_tiles(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    features = llvm.get_host_cpu_features()
    features |= {"amx-tile": True, "amx-int8": True}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(cpu_target, "_may_use_tiles", lambda: False)
    with caplog.at_level("INFO", "aengine.runner"):
        found = cpu_target.host.__wrapped__()
    assert not found.has("amx-int8") and not found.has("amx-tile")
    assert "AMX is not used" in caplog.text


def test_matrices_lie_beside_each_other() -> None:
    """In mappings of at least 64 MiB: pages of 2 MiB are of no use to a matrix that is smaller."""
    places = [codes.large_memory(*shape) for shape in [(3, 100), (1, 64), (2**13, 2**13 + 4), (5, 7)]]
    for i, place in enumerate(places):
        assert place.data_ptr() % 64 == 0
        place[-1].fill_(i)
    assert [place[-1].unique().tolist() for place in places] == [[0], [1], [2], [3]]
