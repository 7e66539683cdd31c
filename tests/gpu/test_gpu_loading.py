"""Weights onto a GPU: the same values, no more memory than need be, and what is said when there is too little."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import MEDIUM
from test_weight_formats import quantise
from tiny import make_tiny_model, write_tiny_model

from aengine.checkpoint.source import ModelSource, resolve_model
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.runner.models import build_model, read_config
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.quantised.scaled import ScaledWeight
from aengine.runner.weights.sources import random_source
from aengine.runner.weights.sources.loader import load_weights

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def load(source: ModelSource, dtype: str) -> CausalLM:
    stored = None if source.format == "dummy" else source.hf_config
    model = build_model(read_config(source.hf_config), choose_formats(dtype, GPU, stored))
    load_weights(model, source, 3, lambda *report: None)
    return model


def given(source: ModelSource, dtype: str, device: torch.device) -> dict[str, torch.Tensor]:
    """What the places get, by name, on the CPU in float32."""
    model = build_model(read_config(source.hf_config), choose_formats(dtype, device))
    got: dict[str, torch.Tensor] = {}
    for name, own in model.weights.places.items():
        own[:] = [own[0]._replace(put=partial(got.__setitem__, name))]
    load_weights(model, source, 3, lambda *report: None)
    assert {(t.device.type, t.dtype) for t in got.values()} == {(device.type, getattr(torch, dtype))}
    return {name: tensor.float().cpu() for name, tensor in got.items()}


def source_of(folder: Path, load_format: str = "auto") -> ModelSource:
    return resolve_model(EngineConfig.create(str(folder), {"load_format": load_format}))


def dummy(**fields: Any) -> ModelSource:
    return ModelSource("dummy", "/nowhere", "dummy", {"model_type": "llama", "tie_word_embeddings": False, **fields})


@pytest.fixture
def peak() -> Iterator[Any]:
    """``peak()``: most bytes allocated since the test began, and those that are now."""
    gc.collect()
    torch.zeros(1, device=GPU)  # CUDA is up before anything is asked of it
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    yield lambda: (torch.cuda.max_memory_allocated(GPU) - before, torch.cuda.memory_allocated(GPU) - before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_values_as_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    source = source_of(write_tiny_model(tmp_path, "qwen3", seed=3, max_shard_size="30KB"))
    wanted = given(source, "float32", torch.device("cpu"))
    got = given(source, dtype, GPU)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name].to(getattr(torch, dtype)).float()) for name in got)


@pytest.mark.parametrize("kind", ["int-quantized", "pack-quantized"])
def test_codes_stay_codes(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path, "qwen3", seed=3)
    exact = quantise(folder, kind)
    model: Any = load(source_of(folder), "bfloat16")
    weight = model.layers[1].mlp.down.weight
    assert weight.codes.dtype == torch.int8 and weight.codes.device == GPU
    for rows in (1, 5, 200):
        x = torch.randn(rows, weight.codes.shape[1], device=GPU).bfloat16()
        wanted = x.double() @ exact["model.layers.1.mlp.down_proj.weight"].to(GPU).double().t()
        assert float((weight.multiply(x).double() - wanted).norm() / wanted.norm()) < 6e-3


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_memory_of_a_sharded_checkpoint(tmp_path: Path, stored: str, peak: Any) -> None:
    """A tensor or two a file, so that parts of a matrix lie in files apart, in another format than the model's."""
    fields = {**MEDIUM, "num_hidden_layers": 3, "tie_word_embeddings": False}
    model = make_tiny_model("llama", **fields).to(getattr(torch, stored))
    model.save_pretrained(tmp_path, max_shard_size="10MB")
    wanted = 2 * model.num_parameters()
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    loaded = load(source_of(tmp_path), "bfloat16")
    most, now = peak()
    # torch's allocator leaves up to a MiB beside a tensor unused, and counts it.
    assert loaded.config.num_layers == 3 and wanted <= now < 1.1 * wanted
    assert most <= now + 2**21, f"{most / 2**20:.1f} MiB for a model of {now / 2**20:.1f} MiB"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy(dtype: str, peak: Any) -> None:
    """A billion weights take little more memory than their own while they are made."""
    fields = {**MEDIUM, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "vocab_size": 32000}
    fields |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    begun = time.monotonic()
    model = load(dummy(**fields), dtype)
    torch.cuda.synchronize(GPU)
    seconds = time.monotonic() - begun
    most, now = peak()
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    largest = size * fields["vocab_size"] * fields["hidden_size"]
    print(f"{now / 2**30:.2f} GiB in {seconds:.2f} s, at most {most / 2**30:.2f} GiB")
    assert most <= now + largest + 2**21
    assert model.embed.table.dtype == getattr(torch, dtype)


EXPERTS = {
    **MEDIUM,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("kind", ["dummy", "safetensors", "int-quantized", "pack-quantized"])
def test_memory_of_experts(tmp_path: Path, kind: str, peak: Any) -> None:
    """A matrix an expert in the checkpoint, one tensor for all in memory: never both, and no gaps between."""
    if kind == "dummy":
        source = dummy(**EXPERTS)
    else:
        fields = {name: value for name, value in EXPERTS.items() if name != "model_type"}
        write_tiny_model(tmp_path, "qwen3_moe", max_shard_size="10GB", **fields)
        if kind != "safetensors":
            quantise(tmp_path, kind, ignored=("mlp.gate$",))
        source = source_of(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_reserved(GPU)
    model = load(source, "bfloat16")
    most, now = peak()
    wanted = sum(prod(first.own_shape) * first.dtype.itemsize for first, *_ in model.weights.places.values())
    largest = max(prod(first.shape) * first.dtype.itemsize for first, *_ in model.weights.places.values())
    reserved = torch.cuda.max_memory_reserved(GPU) - before
    print(f"{now / 2**20:.0f} MiB of {wanted / 2**20:.0f}, {most / 2**20:.0f} at most, {reserved / 2**20:.0f} reserved")
    assert wanted <= now < 1.05 * wanted
    chunk = 4 * random_source.CHUNK if kind == "dummy" else 0  # random numbers are made in float32
    assert most <= now + largest + chunk + 2**21
    assert reserved < 1.1 * now + 2**27


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_5_moe_text"])
def test_memory_of_packed_experts(tmp_path: Path, arch: str, peak: Any) -> None:
    """All experts in one tensor of the checkpoint, the first's transposed."""
    fields = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "vocab_size": 640}
    fields |= {"num_attention_heads": 8}
    fields |= {"num_local_experts": 64} if arch == "gpt_oss" else {"num_experts": 64, "num_hidden_layers": 4}
    write_tiny_model(tmp_path, arch, dtype="bfloat16", **fields)
    model = load(source_of(tmp_path), "bfloat16")
    most, now = peak()
    largest = max(prod(first.shape) * first.dtype.itemsize for first, *_ in model.weights.places.values())
    assert most <= now + max(largest, 2**22) + 2**21, f"{most} bytes at most, {now} are kept"


def test_int8_in_float16_with_a_large_activation(tmp_path: Path) -> None:
    """The product of the codes alone would be infinite."""
    codes = torch.randint(-127, 128, (256, 512), device=GPU).to(torch.int8)
    scale = torch.full((256,), 0.1 / 127, device=GPU)
    for rows in (1, 5, 200):
        x = (codes[:1].float() * 0.05).half().expand(rows, -1).contiguous()
        wanted = x.double() @ (codes.double() * scale[:, None].double()).t()
        out = ScaledWeight(codes, scale, None).multiply(x)
        assert out.isfinite().all() and float((out.double() - wanted).norm() / wanted.norm()) < 2e-3
        assert (x.float() @ codes.float().t()).max() > 65504


def test_dummy_is_told_by_the_seed() -> None:
    source = dummy(**{**MEDIUM, "num_hidden_layers": 1})
    one, other = given(source, "bfloat16", GPU), given(source, "bfloat16", GPU)
    assert all(torch.equal(one[name], other[name]) for name in one)
    exact = given(source, "float32", GPU)
    assert all(torch.equal(one[name], exact[name].bfloat16().float()) for name in one)
    assert 0.02 < float(one["lm_head.weight"].std()) < 0.027
    assert abs(float(one["model.norm.weight"].mean()) - 1) < 0.01


@pytest.mark.parametrize("kind", ["dummy", "safetensors"])
def test_too_small_a_gpu(tmp_path: Path, kind: str) -> None:
    if kind == "dummy":
        source = dummy(**{**MEDIUM, "vocab_size": 100_000})
    else:
        make_tiny_model("llama", **MEDIUM).save_pretrained(tmp_path)
        source = source_of(tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + 100 * 2**20) / total, GPU)
    try:
        with pytest.raises(ModelLoadError) as caught:
            load(source, "float32")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    text = str(caught.value)
    assert "do not fit" in text and "dtype='bfloat16'" in text and "larger GPU" in text and "\n" not in text
