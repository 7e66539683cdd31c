"""Products with packed matrices on a CPU, beside the dequantised weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("llvmlite")

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from aengine.kernels.cpu import codes, tape
from aengine.kernels.cpu.codes import Activations, PackedMatrix

FLOAT16_AT: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
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
K_QUANTS = ("q4_k", "q5_k", "q6_k", "iq4_xs")


def matrix(kind: str, out_features: int, in_features: int) -> tuple[PackedMatrix, Tensor]:
    """A matrix of random codes, and what they mean."""
    if kind == "int8":
        weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
        scale = torch.rand(out_features)
        return codes.pack(kind, weight, scale), weight * scale[:, None]
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
    return (of.x.unflatten(1, (-1, 32)).double() * scales).flatten(1)


def close(own: Tensor, expected: Tensor) -> None:
    assert (own - expected).abs().max() <= 1e-5 * expected.abs().max()


MODES = [(kind, as_codes) for kind in KINDS for as_codes in (True, False)] + [(kind, False) for kind in NUMBERS]


@pytest.mark.parametrize(("kind", "as_codes"), MODES)
def test_a_product_is_that_of_the_stored_weights(kind: str, as_codes: bool) -> None:
    for rows, out_features, size in ((1, 7, 1), (70, 100, 3), (13, 160, 8)):
        in_features = size * (256 if kind in K_QUANTS else 32)
        if kind in NUMBERS:
            in_features += 13 - size
        packed, meaning = matrix(kind, out_features, in_features)
        of = codes.activations(torch.randn(rows, in_features), as_codes=as_codes)
        close(codes.multiply(packed, of), numbers(of) @ meaning.double().T)


def test_bias_and_scale_of_what_is_added() -> None:
    packed, meaning = matrix("q4_1", 100, 64)
    of = codes.activations(torch.randn(11, 64))
    bias, residual = torch.randn(100), torch.randn(11, 200)[:, :100]
    expected = numbers(of) @ meaning.double().T + bias
    close(codes.multiply(packed, of, bias), expected)
    total = residual + 0.5 * expected
    codes.add_to(residual, packed, of, 0.5, bias)
    close(residual, total)


@pytest.mark.parametrize(("kind", "as_codes"), [("q4_1", True), ("q6_k", True), ("q5_0", False), ("bfloat16", False)])
def test_a_row_does_not_depend_on_those_beside_it(kind: str, as_codes: bool) -> None:
    packed, _ = matrix(kind, 48, 256)
    x = torch.randn(81, 256)
    together = codes.multiply(packed, codes.activations(x, as_codes=as_codes))
    for begin, end in ((0, 1), (1, 3), (3, 10), (10, 25), (17, 81)):
        own = codes.multiply(packed, codes.activations(x[begin:end].contiguous(), as_codes=as_codes))
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
    assert ((numbers(of) - normed).abs() <= normed.abs().amax() / (127 if as_codes else 1e6))[:4].all()
