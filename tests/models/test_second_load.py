"""A second load into the memory of the first: captured graphs hold the addresses of weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from counted_memory import META, counted
from driver import Driver, build, load, no_progress, source_of
from gguf import GGMLQuantizationType as Q
from scenarios import Engine, settings_of_torch_kept
from test_fp8_weights import write_quantised
from test_gguf_weights import SIZES, write_gguf
from test_weight_formats import quantise
from tiny import make_tiny_model, write_tiny_model

from aengine.errors import InvalidRequestError
from aengine.kernels.policy import KernelPolicy
from aengine.runner.models import build_model, read_config
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.gguf_source import GgufMatrices
from aengine.runner.weights.sources.loader import load_weights

TinyModel = Callable[..., Path]
TOKENS = list(range(40, 70))
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}


def tensors_of(thing: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model by the way to them."""
    seen = set() if seen is None else seen
    if isinstance(thing, torch.Tensor):
        yield path, thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, dict | list | tuple):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        for key, value in items:
            yield from tensors_of(value, f"{path}.{key}", seen)
    elif isinstance(thing, FunctionType) and thing.__closure__:  # a layer that is a function
        for cell in thing.__closure__:
            yield from tensors_of(cell.cell_contents, f"{path}.{id(cell)}", seen)
    elif type(thing).__module__.startswith("aengine.runner") and "weights.scope" not in type(thing).__module__:
        names = {name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())}
        for name in sorted(names | set(getattr(thing, "__dict__", ()))):
            if hasattr(thing, name):
                yield from tensors_of(getattr(thing, name), f"{path}.{name}", seen)


def logits(model: Any) -> torch.Tensor:
    return Driver(model, random.Random(0)).step({"a": TOKENS})["a"]


def check_second_load(first: Path, second: Path, dtype: str, **how: Any) -> None:
    wanted = logits(load(source_of(second), dtype, **how)[0])
    model, _ = load(source_of(first), dtype, **how)
    assert not torch.allclose(logits(model), wanted)
    before = {path: tensor.data_ptr() for path, tensor in tensors_of(model)}
    for _ in range(2):
        load_weights(model, source_of(second), 0, no_progress)
        assert {path: tensor.data_ptr() for path, tensor in tensors_of(model)} == before
        assert torch.equal(logits(model), wanted)
    assert len(before) > 5


@pytest.mark.parametrize(
    ("arch", "fields", "dtype", "how"),
    [
        ("llama", {"attention_bias": True}, "float32", {}),
        ("llama", {}, "auto", {}),
        ("llama", {}, "bfloat16", {"policy": KernelPolicy(batch_invariant=True)}),
        ("gemma3", {"head_dim": 16}, "float32", {}),
        ("qwen3", {"tie_word_embeddings": True}, "bfloat16", {}),
        ("qwen3_moe", EXPERTS, "float32", {}),
        ("qwen3_moe", EXPERTS, "auto", {}),
        ("gpt_oss", {}, "float32", {}),
        ("qwen3_next", EXPERTS | {"num_experts_per_tok": 2}, "float32", {}),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "float32", {}),
        ("olmo2", {}, "float32", {}),
        ("cohere", {}, "float32", {}),
    ],
)
def test_every_tensor_stays_where_it_is(
    arch: str, fields: dict[str, Any], dtype: str, how: dict[str, Any], tiny_model: TinyModel
) -> None:
    check_second_load(tiny_model(arch, seed=3, **fields), tiny_model(arch, seed=4, **fields), dtype, **how)


def test_in_several_formats(tmp_path: Path) -> None:
    for seed in (1, 2):
        quantise(write_tiny_model(tmp_path / str(seed), "llama", seed=seed), "pack-quantized", ignored=("v_proj",))
        with torch.no_grad():
            model = make_tiny_model("llama", seed=seed, **SIZES)
            write_gguf(tmp_path / f"{seed}.gguf", model, "llama", [Q.Q4_0, Q.Q8_0, Q.F32])
    check_second_load(tmp_path / "1", tmp_path / "2", "float32")
    for seed in (3, 4):
        write_quantised(write_tiny_model(tmp_path / str(seed), "llama", seed=seed), "parts of blocks")
    check_second_load(tmp_path / "3", tmp_path / "4", "float32")
    source = source_of(tmp_path / "1.gguf")
    packed = GgufMatrices.of_file(source.path, build(source).gguf)
    check_second_load(tmp_path / "1.gguf", tmp_path / "2.gguf", "float32", packed=packed)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_it_takes_the_memory_of_one_weight(arch: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = EXPERTS if arch == "qwen3_moe" else {}
    source = source_of(tiny_model(arch, seed=3, num_hidden_layers=3, **fields))
    with counted(monkeypatch) as memory:
        group: Any = SimpleNamespace(rank=0, size=1)
        model = build_model(read_config(source.hf_config), choose_formats("bfloat16", META, source.hf_config), group)
        load_weights(model, source, 0, no_progress)
        weights = memory.most = memory.now
        load_weights(model, source, 0, no_progress)
        places = [first for first, *_ in model.weights.places.values()]
        # Each thread may hold a tensor, or the weight that is joined of two or three.
        largest = sorted((2 * prod(place.shape) for place in places), reverse=True)
        assert memory.now == weights and memory.most <= weights + sum(largest[:9])
        assert memory.most < 1.7 * weights


def test_the_workers_call(tiny_model: TinyModel) -> None:
    """What `collective_rpc("reload_weights", path)` does: tokens are those of the other model, and errors name it."""
    with settings_of_torch_kept():
        first, second = (tiny_model("llama", seed=seed) for seed in (3, 4))
        engines = [Engine(folder) for folder in (first, second)]
        for engine in engines:
            engine.begin()
        wanted = engines[1].generate([TOKENS])
        assert engines[0].generate([TOKENS]) != wanted
        assert engines[0].model.reload_weights(str(second)) > 0
        engines[0].begin()  # an empty cache
        assert engines[0].generate([TOKENS]) == wanted
        with pytest.raises(InvalidRequestError, match=r"reload_weights: .* has the shape"):
            engines[0].model.reload_weights(str(tiny_model("llama", vocab_size=200)))
        with pytest.raises(InvalidRequestError, match="reload_weights: .*nowhere"):
            engines[0].model.reload_weights("/nowhere")
        engines[0].model.reload_weights()
