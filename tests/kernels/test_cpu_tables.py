"""Rows of packed matrices as numbers, compared with the gguf package's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("llvmlite")
gguf = pytest.importorskip("gguf")

# ruff: noqa: E402
from aengine.kernels.cpu.codes import embed, pack
from aengine.kernels.cpu.packed.layouts import LAYOUTS, NUMBERS

BY_GGUF = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")
"""Types that the gguf package writes."""


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind.upper() in gguf.GGMLQuantizationType.__members__])
def test_rows_of_codes(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    length, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    if kind in BY_GGUF:
        blocks = gguf.quants.quantize(np.random.randn(77, 512).astype(np.float32), type_)
    else:  # random codes with scales of 1
        blocks = np.random.randint(0, 256, (77, 512 // length, num_bytes), np.uint8)
        for place in {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,)}.get(
            kind, (0, 2)
        ):
            blocks[..., place : place + 2] = np.array([1], np.float16).view(np.uint8)
        blocks = blocks.reshape(77, -1)
    stored = torch.from_numpy(blocks).reshape(77, -1, num_bytes)
    ids = torch.randint(0, 77, (9,))
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, type_))[ids] * 1.5
    torch.testing.assert_close(embed(pack(kind, stored), ids, 1.5), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", NUMBERS)
def test_rows_of_numbers(kind: str) -> None:
    weight = torch.randn(77, 50).to(getattr(torch, kind))
    ids = torch.randint(0, 77, (9,))
    torch.testing.assert_close(embed(pack(kind, weight), ids, 0.5), weight[ids].float() * 0.5)
