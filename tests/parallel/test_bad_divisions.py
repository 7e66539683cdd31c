"""Models that can't be divided among so many ranks: the error names the setting, the cause, and which would do."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import VOCAB_SIZE
from transformers import BertConfig, BertModel

from aengine import AsyncLLM, InvalidRequestError, ModelLoadError

TinyModel = Callable[..., Path]
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "num_threads": 1}
EP4 = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("arch", "sizes", "settings", "message"),
    [
        ("llama", EIGHT, {"tensor_parallel_size": 3}, "8 attention heads and 4 key-value heads.*can be 1, 2, 4 or 8$"),
        ("llama", EIGHT, {"tensor_parallel_size": 500}, "8 attention heads .* can be 1, 2, 4 or 8$"),
        ("llama", {"num_key_value_heads": 3}, {"tensor_parallel_size": 2}, "3 key-value heads.*it can be 1, 3 or 6$"),
        ("llama", {}, {"pipeline_parallel_size": 7}, "the model has 3 layers.*use 3 or less"),
        (
            "llama",
            EIGHT,
            {"tensor_parallel_size": 2, "model_impl": "transformers"},
            "use model_impl='auto', or data_par",
        ),
    ],
    ids=["heads", "many", "kv-heads", "layers", "transformers"],
)
async def test_refused_before_processes_start(
    arch: str,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aengine.workers.host.group.WorkerProcess", None)
    model = tiny_model(arch, **sizes)
    with pytest.raises(ModelLoadError, match=f"{next(iter(settings))}={next(iter(settings.values()))}: .*{message}"):
        await AsyncLLM(model, **SETTINGS | settings).start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 with data_parallel_size=2: experts can't be divided"),
        (
            {"executor": "ray"},
            "executor='ray' with data_parallel_size=2: experts can .* on one machine only",
        ),
    ],
    ids=["stages", "machines"],
)
async def test_replicas_that_cannot_share_experts(
    settings: dict[str, Any], message: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aengine.workers.host.group.WorkerProcess", None)
    model = tiny_model("qwen3_moe")
    with pytest.raises(ModelLoadError, match=f"{message}.*leave enable_expert_parallel out"):
        await AsyncLLM(model, **SETTINGS, **settings, data_parallel_size=2, enable_expert_parallel=True).start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "sizes", "settings", "message"),
    [
        ("llama", EIGHT | {"intermediate_size": 42}, {"tensor_parallel_size": 4}, "ate_size=42 .*can be 1 or 2\n"),
        (
            "qwen3_moe",
            EIGHT | {"num_experts": 6},
            EP4,
            "=6 .*or 2\n",
        ),
    ],
    ids=["width", "experts"],
)
async def test_refused_by_the_ranks(
    arch: str, sizes: dict[str, Any], settings: dict[str, Any], message: str, tiny_model: TinyModel
) -> None:
    size = settings["tensor_parallel_size"]
    with pytest.raises(ModelLoadError, match=f"^tensor_parallel_size={size}: .*{message}"):
        await AsyncLLM(tiny_model(arch, **sizes), **SETTINGS | settings).start()


@pytest.mark.extended  # each rank imports transformers; test_composition.py has the same of one rank, without a process
@pytest.mark.slow
async def test_families_that_transformers_computes(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama", **EIGHT), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "olmo", "architectures": ["OlmoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match="size=2: OlmoForCausalLM is computed by transformers .*data_parallel_size"
    ):
        await AsyncLLM(folder, tensor_parallel_size=2, **SETTINGS).start()


@pytest.mark.slow
async def test_encoders(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=VOCAB_SIZE, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="tensor_parallel_size=2: an encoder is not divided: .*data_parallel_size"):
        await AsyncLLM(tmp_path, tensor_parallel_size=2, skip_tokenizer=True, **SETTINGS).start()
    async with AsyncLLM(tmp_path, data_parallel_size=2, skip_tokenizer=True, pooling="mean", **SETTINGS) as engine:
        first, second = await asyncio.gather(*(engine.embed([1, 2, 3]) for _ in range(2)))
        assert first == pytest.approx(second)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("value", [0, -1, 1025, 2.0, True, None, "2"])
def test_what_is_no_number_of_ranks(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}={value!r}") as caught:
        AsyncLLM("smollm2-135m", **{name: value})
    assert caught.value.param == name
