"""Mixtures of experts in models that run as tapes of compiled ops, on a CPU."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file
from scenarios import PROMPTS, Engine, check_exactly, check_scenarios
from test_expert_layers import mxfp4
from test_gguf_codes import random_quantised
from test_gguf_weights import SIZES, write_gguf
from test_group_weights import MOE, write
from tiny import load_reference, make_tiny_model, write_tiny_model

from aengine.runner.graphs.tape_model import TapeModel

pytest.importorskip("llvmlite")


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": True, "hidden_size": 96, "moe_intermediate_size": 64}),
        ("qwen3_moe", {"num_experts": 33, "num_experts_per_tok": 1, "mlp_only_layers": [1]}),
        ("mixtral", {"head_dim": 16}),
        ("gpt_oss", {"sliding_window": 7, "swiglu_limit": 1.0}),
    ],
)
def test_families(arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_model(tmp_path, arch, seed=7, **fields)
    engine = check_scenarios(tmp_path, load_reference(tmp_path, arch))
    assert isinstance(engine.runner.model, TapeModel)


def test_sixteen_bits(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_moe", seed=7, dtype="bfloat16")
    engine = check_scenarios(tmp_path, load_reference(tmp_path, "qwen3_moe"), dtype="auto")
    assert isinstance(engine.runner.model, TapeModel)


@pytest.fixture
def experts(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return what the log says of the experts of the model that was loaded last."""
    caplog.set_level(logging.INFO, "aengine.runner")

    def found() -> str:
        lines = [record.getMessage() for record in caplog.records if "weights on cpu" in record.getMessage()]
        (own,) = (part for part in lines[-1].split(";") if "experts" in part)
        return own

    return found


def make_gguf(path: Path, arch: str, kinds: list[Q], **fields: Any) -> Any:
    reference = make_tiny_model(arch, seed=3, **SIZES, **fields)
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() >= 2:
                weight.mul_(0.3)
        write_gguf(path, reference, arch, kinds)
    return reference.float()


@pytest.mark.parametrize(
    ("arch", "kinds", "fields"),
    [
        ("qwen3_moe", [Q.Q4_0, Q.Q8_0, Q.Q4_1], {"norm_topk_prob": True, "moe_intermediate_size": 64}),
        ("gpt_oss", [Q.Q8_0], {"sliding_window": 7}),
    ],
)
def test_stacks_of_a_gguf_stay_codes(
    arch: str, kinds: list[Q], fields: dict[str, Any], tmp_path: Path, experts: Callable[[], str]
) -> None:
    path = tmp_path / "model.gguf"
    engine = check_scenarios(path, make_gguf(path, arch, kinds, **fields), quantization="gguf")
    assert isinstance(engine.runner.model, TapeModel)
    assert any(f"{kind.name.lower()} as codes" in experts() for kind in kinds)


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("qwen3_moe", [Q.Q4_K, Q.Q6_K, Q.Q4_K]),
        ("qwen3_moe", [Q.IQ4_NL]),
        ("gpt_oss", [Q.MXFP4]),
    ],
    ids=["q4_k and q6_k", "iq4_nl", "mxfp4"],
)
def test_stacks_of_types_that_the_package_only_reads(
    arch: str, kinds: list[Q], tmp_path: Path, experts: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.quants, "quantize", random_quantised)
    path, fields = tmp_path / "model.gguf", {"norm_topk_prob": True, "moe_intermediate_size": 256}
    reference = make_gguf(path, arch, kinds, **(fields if arch == "qwen3_moe" else {"sliding_window": 7}))
    engine = check_scenarios(path, reference, quantization="gguf")
    assert isinstance(engine.runner.model, TapeModel)
    assert any(f"{kind.name.lower()} as codes" in experts() for kind in kinds)


def test_activations_in_8_bits_are_the_same_alone_batched_in_chunks_and_after_a_preemption(
    tmp_path: Path, experts: Callable[[], str]
) -> None:
    path = tmp_path / "model.gguf"
    make_gguf(path, "qwen3_moe", [Q.Q4_0], norm_topk_prob=True, moe_intermediate_size=64)
    engine = Engine(path, dtype="auto")
    engine.begin()
    assert isinstance(engine.runner.model, TapeModel) and "q4_0 as codes" in experts()
    alone = check_exactly(engine)
    by_op = Engine(path, dtype="auto", enforce_eager=True)
    by_op.begin()
    assert not isinstance(by_op.runner.model, TapeModel)
    assert [len(tokens) for tokens in by_op.generate(PROMPTS)] == [len(tokens) for tokens in alone]


@pytest.mark.parametrize("kind", ["awq", "int8", "int8, plain", "mxfp4"])
def test_codes_with_a_scale_a_group(kind: str, tmp_path: Path, experts: Callable[[], str]) -> None:
    own = write_tiny_model(tmp_path / "own", "qwen3_moe", seed=3, **MOE)
    plain = Path(shutil.copytree(own, tmp_path / "plain"))
    save_file(write(own, kind), plain / "model.safetensors")
    engine = check_scenarios(own, load_reference(plain, "qwen3_moe"))
    assert isinstance(engine.runner.model, TapeModel)
    assert "as codes" in experts() and "float" not in experts()


def test_mxfp4_stays_codes(tmp_path: Path, experts: Callable[[], str]) -> None:
    """With biases, and gate and up in turn."""
    own = write_tiny_model(tmp_path / "own", "gpt_oss", seed=7)
    plain = Path(shutil.copytree(own, tmp_path / "plain"))
    save_file(mxfp4(own), plain / "model.safetensors")
    engine = check_scenarios(own, load_reference(plain, "gpt_oss"))
    assert isinstance(engine.runner.model, TapeModel) and "mxfp4 as codes" in experts()


def test_weights_are_loaded_again_into_what_the_tape_reads(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "first", "qwen3_moe", seed=7)
    second = write_tiny_model(tmp_path / "second", "qwen3_moe", seed=8)
    engine, wanted = Engine(first), Engine(second)
    engine.begin(), wanted.begin()
    assert isinstance(engine.runner.model, TapeModel)
    engine.model.reload_weights(str(second))
    assert engine.generate(PROMPTS) == wanted.generate(PROMPTS)
