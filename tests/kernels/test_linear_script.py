"""benchmarks/gpu_linear.py --grouped: at a small size, its products are those of what the codes mean."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.grouped_codes import GroupedCodes, numbers

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_linear.py"
SHAPE = (128, 128, 64, 64, 1)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_linear", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GROUPED_ROWS", (1, 3))
    return module


def expected(script: ModuleType, step: partial[Any]) -> torch.Tensor:
    verb, weights, x, norm, residual = step.args
    x, out = x.double(), residual.double()
    for weight, _, scale, _ in weights:
        matrix = numbers(weight).double() if isinstance(weight, GroupedCodes) else weight.double()
        matrix = matrix if scale is None else matrix * scale.double()[:, None]
        if verb == "add":
            out = out + x @ matrix.t()
        else:
            out = F.rms_norm(x, x.shape[1:], norm.double(), script.EPS) @ matrix.t()
    gate, up = out.chunk(2, -1)
    return F.silu(gate) * up if verb == "gated" else out


def test_grouped(script: ModuleType, triton_device: torch.device) -> None:
    off: list[float] = []

    def time(step: partial[Any]) -> float:
        wanted = expected(script, step)
        off.append(float((step().double() - wanted).norm() / wanted.norm()))
        assert 1e-3 < float(wanted.abs().mean()) < 100, "of a size as in a model"
        return 1.0

    how = {"time": time, "device": str(triton_device), "dtype": torch.float16, "graph_bytes": 1}
    results = list(script.measure_grouped("tiny", SHAPE, 1e6, **how))
    assert max(off) < 5e-3 and len(off) == len(script.WEIGHTS) * 4 * 2
    assert len(results) == len(off) + len(script.WEIGHTS) * 2
    layers = {result["kind"]: result["bytes"] for result in results if result["product"] == "layer"}
    bits = {kind: size / layers["16 bits"] * 16 for kind, size in layers.items()}
    assert 8 < bits["fp8, a row"] < 9 and 4 < bits["int4, 128"] < bits["uint4 and offset, 32"] < 6.5
