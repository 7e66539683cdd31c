"""Products with packed matrices on a CPU, beside the dequantised weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("llvmlite")

from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from aengine.kernels.cpu import codes, tape
from aengine.kernels.cpu.codes import Activations

GGUF_KINDS = ["q4_1", "q8_0"]


def matrix(kind: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """A matrix of random blocks, and what they mean."""
    type_ = GGMLQuantizationType[kind.upper()]
    numbers = torch.randn(out_features, in_features).numpy()
    stored = quantize(numbers, type_)
    meaning = torch.from_numpy(dequantize(stored, type_))
    return torch.from_numpy(stored).view(out_features, in_features // 32, -1), meaning


def numbers(of: Activations) -> Tensor:
    """The activations that codes stand for, float64."""
    scales = of.meta.view(len(of.x), -1, 4)[:, :, :1].double()
    return (of.x.unflatten(1, (-1, 32)).double() * scales).flatten(1)


def close(own: Tensor, expected: Tensor) -> None:
    assert (own - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 7, 32), (70, 100, 96), (13, 160, 512)])
def test_a_product_is_that_of_the_dequantised_weights(
    kind: str, rows: int, out_features: int, in_features: int
) -> None:
    blocks, meaning = matrix(kind, out_features, in_features)
    packed = codes.pack(kind, blocks)
    of = codes.activations(torch.randn(rows, in_features))
    bias, residual = torch.randn(out_features), torch.randn(rows, out_features)
    expected = numbers(of) @ meaning.double().T
    close(codes.multiply(packed, of), expected)
    total = residual.clone()
    codes.add_to(total, packed, of, 0.5, bias)
    close(total, residual + 0.5 * (expected + bias))


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_row_does_not_depend_on_those_beside_it(kind: str) -> None:
    packed = codes.pack(kind, matrix(kind, 48, 128)[0])
    x = torch.randn(81, 128)
    together = codes.multiply(packed, codes.activations(x))
    for begin, end in ((0, 1), (1, 3), (3, 10), (10, 25), (17, 81)):
        own = codes.multiply(packed, codes.activations(x[begin:end].contiguous()))
        assert torch.equal(own, together[begin:end])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates(activation: codes.Activation) -> None:
    blocks, meaning = matrix("q4_1", 96, 64)
    packed = codes.pack("q4_1", blocks)
    of = codes.activations(torch.randn(9, 64) * 3)
    bias = torch.randn(96)
    gate, up = (numbers(of) @ meaning.double().T + bias).chunk(2, 1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    exact = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=approximate)
    close(codes.gated(packed, of, activation, bias), exact * up)
    assert not codes.can_gate(codes.pack("q4_1", blocks[:48]))


def test_a_recorded_product_has_a_norm_before_it() -> None:
    blocks, meaning = matrix("q8_0", 40, 96)
    packed = codes.pack("q8_0", blocks)
    x, weight = torch.randn(6, 96), torch.randn(96)
    with tape.record(rows=6) as recorded:
        of = codes.activations(x, (weight, 1e-5))
        out = codes.multiply(packed, of)
    recorded.run(4)
    close(numbers(of)[:4] @ meaning.double().T, out[:4].double())
    normed = F.rms_norm(x, (96,), weight, 1e-5)
    assert ((numbers(of) - normed).abs() <= normed.abs().amax() / 127)[:4].all()
