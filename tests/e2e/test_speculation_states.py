"""Drafts for models that keep states, in real worker processes: the same tokens, whatever is rejected, preempted, found
in the prefix cache or computed again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import some
from safetensors.torch import load_file, save_file
from searches import every_step_has_a_search  # noqa: F401
from test_every_architecture import MIB, one_thread, running
from test_speculation_workers import answers, any_cost

from aengine import SamplingParams
from aengine.engine.scheduler.prefixes import kept_states

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from draft_heads import Eagle3
from test_draft_heads import EAGLE3, SIZES, write_head
from test_hybrids import MODELS
from test_scenarios import MODELS as FAMILIES
from tiny import VOCAB_SIZE, write_tiny_model

__all__ = ["any_cost", "one_thread"]  # fixtures
SHARED = [*range(100, 140)]


@pytest.mark.parametrize(
    ("name", "speculation"),
    some(
        [(name, how) for name in MODELS for how in ("suffix", "ngram_worker")],
        ("lfm2-biases", "ngram_worker"),
        ("qwen3.5", "suffix"),
    ),
)
async def test_the_same_tokens(name: str, speculation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few blocks for all, places for the pages of some, and a worker that is killed while requests have
    drafts; alone, and behind a prefix that was kept."""
    monkeypatch.setattr(kept_states, "STATE_INTERVAL", 8)
    arch, fields = MODELS[name]
    model: Any = SimpleNamespace(folder=write_tiny_model(tmp_path, arch, seed=11, **fields))
    settings: dict[str, Any] = {"kv_cache_memory_bytes": MIB // 8, "max_num_seqs": 6, "swap_space_bytes": MIB // 8}
    again = [SHARED + tail for tail in ([1, 2, 1, 2], [3] * 9, [1, 2, 1, 2])]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    outcomes = []
    for how in ("none", speculation):
        async with running(model, speculation=how, **settings) as engine:
            texts = [(await engine.generate(prompt, params)).token_ids for prompt in again]
            before = engine.statistics().accepted_tokens
            task = asyncio.create_task(answers(engine, 3))
            while how != "none" and engine.statistics().accepted_tokens < before + 50:
                await asyncio.sleep(0.001)
            if how != "none":
                os.kill(engine.describe()["pid"], signal.SIGKILL)
            outcomes.append((await task, texts))
            statistics = engine.statistics()
            print(statistics)
            assert statistics.num_restarts == (how != "none")
            if how != "none":
                assert 100 < statistics.accepted_tokens < statistics.drafted_tokens, "some repeat themselves"
    assert outcomes[0] == outcomes[1]


METHODS = ("mtp", "eagle3", "draft_model")


@pytest.mark.parametrize(
    ("name", "methods"),
    some(
        [(name, METHODS) for name in ("qwen3-next", "qwen3.5-experts", "qwen3.5")]
        + [("qwen3.5-experts", METHODS[:2])],  # a draft model, which reads no more than tokens, is test_draft_models'
        ("qwen3.5-experts", METHODS[:2]),
    ),
)
async def test_heads_draft_for_models_with_states(name: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    """The layer that a checkpoint has for it, untrained here, a head apart, a draft model; pages are too few for all
    requests, and two ranks divide the layers."""
    arch, fields = MODELS[name]
    folder, other = write_tiny_model(tmp_path / "own", arch, seed=11, **fields), tmp_path / "other"
    write_tiny_model(other, "llama", seed=5, num_hidden_layers=1)
    add_mtp_layer(folder)
    model: Any = SimpleNamespace(folder=folder)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": MIB // 24, "max_num_seqs": 6, "tensor_parallel_size": 2}
    last = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    read = {"eagle_aux_hidden_state_layer_ids": [0, last - 1, last]}
    table = torch.zeros(VOCAB_SIZE, SIZES["hidden_size"])
    apart = write_head(tmp_path / "apart", Eagle3({**SIZES, **EAGLE3, **read}, table, table))
    given = {"mtp": {"tokens": 3}, "eagle3": {"model": str(apart)}, "draft_model": {"model": str(other)}}
    outcomes = []
    for speculation in ("none", *({"method": method, **given[method]} for method in methods)):
        alone = {"tensor_parallel_size": 1} if speculation == "none" else {}
        async with running(model, speculation=speculation, **settings | alone) as engine:
            outcomes.append(await answers(engine, 3, 8))
            statistics = engine.statistics()
            assert statistics.num_preemptions and (speculation == "none" or statistics.drafted_tokens > 100)
    assert all(each == outcomes[0] for each in outcomes)


def add_mtp_layer(folder: Path) -> None:
    """Put the layer of the text that attends behind a product, as that of a head."""
    tensors = load_file(folder / "model.safetensors")
    before, size = "model.layers.1.", tensors["model.embed_tokens.weight"].shape[1]
    tensors |= {n.replace(before, "mtp.layers.0."): x.clone() for n, x in tensors.items() if n.startswith(before)}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors |= {f"mtp.{norm}.weight": torch.rand(size) - 0.5 for norm in norms}
    save_file(tensors | {"mtp.fc.weight": torch.randn(size, 2 * size) * 0.2}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
async def test_the_layer_behind_the_last_one_drafts(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As checkpoints have it, with copies of the embedding and of the head; two ranks divide its experts, or have half
    of them each."""
    arch, fields = FAMILIES[name]
    folder = write_tiny_model(tmp_path, arch, seed=11, **fields)
    tensors, at = load_file(folder / "model.safetensors"), "model.layers.3."
    tensors |= {
        n.replace("model.layers.2.", at): x.clone() for n, x in tensors.items() if n.startswith("model.layers.2.")
    }
    size = SIZES["hidden_size"]
    tensors |= {f"{at}{norm}.weight": torch.rand(size) + 0.5 for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {f"{at}eh_proj.weight": torch.randn(size, 2 * size) * 0.2}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    tensors |= {f"{at}{own}.weight": tensors[f"{name}.weight"].clone() for own, name in copies.items()}
    save_file(tensors, folder / "model.safetensors")
    model: Any = SimpleNamespace(folder=folder)
    outcomes = []
    drafts = {"speculation": {"method": "mtp", "tokens": 3}, "tensor_parallel_size": 2}
    for settings in ({}, drafts | {"enable_expert_parallel": name == "deepseek-v3"}):
        async with running(model, **settings) as engine:
            outcomes.append(await answers(engine, 3, 8))
            assert not settings or engine.statistics().drafted_tokens > 40
    assert outcomes[0] == outcomes[1]
    assert "does not use" not in caplog.text
