"""New weights for an engine on a GPU, under its captured graphs: from the host's memory, and from another process's
memory on the same GPU. On a CPU (to try the tests themselves) only the first."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, SHARED_GPU, Checkpoint
from safetensors.torch import load_file, save_file
from test_gpu_engine import all_at_once, running, some_prompts

from aengine import IpcTensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("shared_gpu")]


def other_weights(folder: Path, new: Path) -> dict[str, torch.Tensor]:
    """Write a copy of the checkpoint with other numbers; return these."""
    shutil.copytree(folder, new)
    (path,) = new.glob("*.safetensors")
    gen = torch.Generator().manual_seed(5)
    state = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=gen) for name, tensor in load_file(path).items()}
    save_file(state, path, {"format": "pt"})
    return state


async def tokens_of(engine: Any, prompts: Any) -> list[Any]:
    return [completion.token_ids for completion in await all_at_once(engine, prompts)]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
async def test_the_tokens_of_a_fresh_engine(
    arch: str, settings: dict[str, Any], checkpoint: Callable[..., Checkpoint], tmp_path: Path, rng: random.Random
) -> None:
    if DEVICE == "cpu" and settings:
        pytest.skip("FP8 is made on a GPU alone")
    model, prompts = checkpoint(arch), some_prompts(rng)
    state = other_weights(model.folder, tmp_path / "new")
    settings = SHARED_GPU | settings
    async with running(tmp_path / "new", **settings) as engine:
        wanted = await tokens_of(engine, prompts)
    async with running(model.folder, **settings) as engine:
        before = await tokens_of(engine, prompts)
        assert before != wanted
        sources: list[Any] = [state, model.folder]
        if DEVICE != "cpu":
            on_gpu = {name: tensor.cuda() for name, tensor in state.items()}
            sources += [IpcTensors.of(on_gpu), model.folder, on_gpu]
        for source in sources:
            await engine.start_weight_update()
            await engine.update_weights(source)
            await engine.finish_weight_update()
            assert await tokens_of(engine, prompts) == (before if source is model.folder else wanted)
