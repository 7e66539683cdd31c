"""Starts that can't succeed are refused before a worker is started."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.checkpoint.early_checks import check_start
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError

HF = {"max_position_embeddings": 64, "num_attention_heads": 2}
LABELS = {"architectures": ["XForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}


@pytest.mark.parametrize(
    ("settings", "hf", "message"),
    [
        ({"max_model_len": 65}, {}, "max_model_len=65, but the model's context is 64 tokens: give at most that"),
        ({"quantization": "fp8"}, {}, "quantization='fp8' is for GPUs: leave it at 'auto'"),
        ({"attention_backend": "flash-attn-3", "device": "cpu"}, {}, "attention_backend='flash-attn-3' is for GPUs"),
        ({"device": "cuda:0"}, {}, "device='cuda:0': there is no NVIDIA driver: install one, .* or use device='cpu'"),
        (
            {"enable_expert_parallel": True},
            {"num_experts": 0},
            "enable_expert_parallel=True: the model has no mixtures",
        ),
        ({"pooling": "last"}, LABELS, "pooling='last': the model scores 2 classes and gives no vectors"),
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
    ],
    ids=str,
)
def test_left_to_the_worker(
    has_gpu: bool, settings: dict[str, Any], hf: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aengine.checkpoint.early_checks._may_have_gpu", lambda: has_gpu)
    check_start(EngineConfig(model="m", **settings), HF | hf)
