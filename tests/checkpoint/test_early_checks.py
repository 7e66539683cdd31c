"""Starts that can't succeed are refused before a worker is started."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from aengine.checkpoint import early_checks
from aengine.checkpoint.early_checks import check_division, check_start
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError

HF = {"max_position_embeddings": 64, "num_attention_heads": 2}
LABELS = {"architectures": ["XForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}


@pytest.mark.parametrize(
    ("settings", "hf", "message"),
    [
        ({"max_model_len": 65}, {}, "max_model_len=65, but the model's context is 64 tokens: give at most that"),
        ({"quantization": "fp8"}, {}, "quantization='fp8' is for GPUs: leave it out"),
        ({"cudagraph_mode": "FULL"}, {}, "cudagraph_mode='FULL' is for GPUs: leave it out on a CPU"),
        ({"cudagraph_capture_sizes": [1, 2]}, {}, r"cudagraph_capture_sizes=\(1, 2\) is for GPUs: leave it out"),
        ({"attention_backend": "flash-attn-3", "device": "cpu"}, {}, "attention_backend='flash-attn-3' is for GPUs"),
        ({"device": "cuda:0"}, {}, "device='cuda:0': there is no NVIDIA driver: install one, .* or use device='cpu'"),
        (
            {"enable_expert_parallel": True},
            {"num_experts": 0},
            "enable_expert_parallel=True: the model has no mixtures",
        ),
        ({"pooling": "last"}, LABELS, "pooling='last': the model scores 2 classes and gives no vectors"),
        (
            {"swap_space_bytes": 1},
            {"hidden_size": 64},
            "swap_space_bytes=1 holds no page, which has 2048 b",
        ),
        ({"kv_cache_memory_bytes": 1000, "block_size": 32}, {"text_config": {**HF, "head_dim": 16}}, "has 2048 bytes"),
        *(
            ({"batch_invariant": True, **settings}, {"num_experts": 4}, f"batch_invariant=True: .*: {cure}, or leave")
            for settings, cure in (
                ({"tensor_parallel_size": 2}, "divide the model by pipeline_parallel_size"),
                ({"enable_expert_parallel": True}, "leave that at False"),
                ({"model_impl": "transformers"}, "leave that at 'auto'"),
            )
        ),
        ({"tensor_parallel_size": 3}, {}, "tensor_parallel_size=3: the model has 2 attention heads"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_refused(settings: dict[str, Any], hf: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.checkpoint.early_checks._may_have_gpu", lambda: False)
    with pytest.raises(ModelLoadError, match=message):
        check_start(EngineConfig(model="m", **settings), HF | hf)


@pytest.mark.parametrize(
    ("has_gpu", "settings", "hf"),
    [
        (False, {"max_model_len": 64, "quantization": "gguf"}, {}),
        (False, {"quantization": "fp8", "device": "cuda", "executor": "ray"}, {}),
        (True, {"quantization": "fp8", "attention_backend": "triton"}, {}),
        (True, {"device": "cuda:1"}, {}),
        (False, {"enable_expert_parallel": True}, {"num_local_experts": 4}),
        (False, {"max_model_len": 65}, {"max_position_embeddings": True}),
        (False, {"pooling": "mean"}, {}),
        (False, {"kv_cache_memory_bytes": 2048}, {"hidden_size": 64}),
        (False, {"kv_cache_memory_bytes": 1}, {"hidden_size": 64, "kv_lora_rank": 8}),
    ],
    ids=str,
)
def test_left_to_the_worker(
    has_gpu: bool, settings: dict[str, Any], hf: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aengine.checkpoint.early_checks._may_have_gpu", lambda: has_gpu)
    check_start(EngineConfig(model="m", **settings), HF | hf)


@pytest.mark.parametrize(
    ("settings", "hf", "message"),
    [
        ({"pipeline_parallel_size": 3}, {"num_hidden_layers": 2}, "=3: the model has 2 layers, .*: use 2 or less"),
        ({"pipeline_parallel_size": 2}, {"num_hidden_layers": 2}, ""),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, {}, "pipeline_parallel_size=2 with data_parallel_siz"),
        ({"pipeline_parallel_size": 2, "executor": "ray"}, {}, ""),
        ({"executor": "ray", "data_parallel_size": 2}, {}, "executor='ray' with data_parallel_size=2"),
        ({"data_parallel_size": 2}, {}, ""),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, {}, "computed by transformers"),
        ({"model_impl": "transformers"}, {}, ""),
        ({"enable_expert_parallel": True}, {"text_config": {"num_experts": 8}}, ""),
        ({"enable_expert_parallel": True}, {"text_config": {"num_experts": 0}}, "no mixtures of experts"),
        *(({"tensor_parallel_size": n}, {"num_attention_heads": 8, "num_key_value_heads": 2}, "") for n in (2, 4, 8)),
        ({"tensor_parallel_size": 3}, {"num_attention_heads": 9, "num_key_value_heads": 2}, "9 .* 2 .* it can be 1$"),
        ({"tensor_parallel_size": 2}, {"num_attention_heads": 9}, "9 .* and 9 key-value .* it can be 1, 3 or 9$"),
        ({"tensor_parallel_size": 2}, {"num_attention_heads": 3, "num_key_value_heads": 0}, "and 3 key.* be 1 or 3$"),
        ({"tensor_parallel_size": 2}, {"num_attention_heads": 1}, "it can be 1$"),
        ({"tensor_parallel_size": 2}, {"num_attention_heads": 0}, ""),
        ({"tensor_parallel_size": 2}, {"num_attention_heads": "many"}, ""),
    ],
    ids=str,
)
def test_what_the_model_has_too_few_of(settings: dict[str, Any], hf: dict[str, Any], message: str) -> None:
    config = EngineConfig(model="m", **settings)
    if not message:
        check_division(config, hf)
        return
    with pytest.raises(ModelLoadError, match=message):
        check_division(config, hf)


@pytest.mark.parametrize(("has_file", "has_library"), [(True, False), (False, True), (False, False)])
def test_a_gpu_may_be_there_where_its_driver_is(
    has_file: bool, has_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        if not has_library:
            raise OSError(f"no {name}")

    monkeypatch.setattr(early_checks, "_DRIVERS", (str(tmp_path / "none"), str(tmp_path)[: None if has_file else -1]))
    monkeypatch.setattr(ctypes, "CDLL", load)
    config = EngineConfig(model="m", device="cuda")
    if has_file or has_library:
        check_start(config, HF)
    else:
        with pytest.raises(ModelLoadError, match="there is no NVIDIA driver"):
            check_start(config, HF)
