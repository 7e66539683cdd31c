"""New weights that a trainer's process sends from the first GPU to an engine on the second, by NCCL; and memory of the
first GPU that both ranks of an engine read. On a CPU (to try the tests themselves) by gloo."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, MIB, Checkpoint
from safetensors.torch import load_file
from test_gpu_engine import running, some_prompts
from test_gpu_weight_updates import other_weights, tokens_of

from aengine import AsyncLLM, InvalidRequestError, IpcTensors, TrainerGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
MakeCheckpoint = Callable[..., Checkpoint]
ENGINE: dict[str, Any] = {"device": "cuda:1" if DEVICE == "cuda" else "cpu", "kv_cache_memory_bytes": 16 * MIB}
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
PATIENCE = 8.0  # seconds


@asynccontextmanager
async def trainer(folder: Path, *options: str, size: int = 2, **how: Any) -> AsyncIterator[TrainerGroup]:
    """A process that sends the tensors of a checkpoint to ``size`` - 1 ranks; ends it."""
    (path,) = folder.glob("*.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = Path(__file__).with_name("group_trainer.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, str(port), str(size), path, *options, stdin=pipe, stdout=pipe
    )
    tensors = [(name, str(each.dtype)[6:], [*each.shape]) for name, each in load_file(path).items()]
    try:
        yield TrainerGroup("127.0.0.1", port, tensors, **{"backend": BACKEND} | how)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def update(engine: AsyncLLM, source: Any) -> None:
    await engine.start_weight_update()
    await engine.update_weights(source)
    await engine.finish_weight_update()


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
async def test_the_tokens_of_a_fresh_engine(
    arch: str, settings: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path, rng: random.Random
) -> None:
    """Twice by the same group."""
    if DEVICE == "cpu" and settings:
        pytest.skip("FP8 is made on a GPU alone")
    model, prompts = checkpoint(arch), some_prompts(rng)
    other_weights(model.folder, tmp_path / "new")
    settings = ENGINE | settings
    async with running(tmp_path / "new", **settings) as engine:
        wanted = await tokens_of(engine, prompts)
    async with running(model.folder, **settings) as engine, trainer(tmp_path / "new", "--times=2") as group:
        before = await tokens_of(engine, prompts)
        assert before != wanted
        for _ in range(2):
            await update(engine, group)
            assert await tokens_of(engine, prompts) == wanted
            await update(engine, model.folder)
            assert await tokens_of(engine, prompts) == before


@pytest.mark.parametrize("fault", [["--die-after=5"], ["--die-after=0"], ["--shorten=4"]], ids=str)
async def test_trainers_that_fail(
    fault: list[str], checkpoint: MakeCheckpoint, tmp_path: Path, rng: random.Random
) -> None:
    """An error after their time, in the same worker, which has its weights of before and takes those of another
    trainer."""
    model, prompts = checkpoint("llama"), some_prompts(rng)[:6]
    other_weights(model.folder, tmp_path / "new")
    async with running(model.folder, **ENGINE) as engine:
        before = await tokens_of(engine, prompts)
        stream = engine.stream(prompts[0])
        async with trainer(tmp_path / "new", *fault, timeout=PATIENCE) as group:
            await engine.start_weight_update()
            with pytest.raises(InvalidRequestError, match=r"did not come from the trainer|has NaN|was not joined"):
                await engine.update_weights(group)
        await engine.abort_weight_update()
        assert [token.token_id async for token in stream]
        assert await tokens_of(engine, prompts) == before
        async with trainer(tmp_path / "new") as group:
            await update(engine, group)
        assert await tokens_of(engine, prompts) != before
        assert engine.statistics().num_restarts == 0


async def test_what_is_refused_before_it_is_sent(
    checkpoint: MakeCheckpoint, tmp_path: Path, rng: random.Random
) -> None:
    model, prompts = checkpoint("llama"), some_prompts(rng)[:6]
    other_weights(model.folder, tmp_path / "new")
    async with running(model.folder, **ENGINE) as engine, trainer(tmp_path / "new", timeout=PATIENCE) as group:
        before = await tokens_of(engine, prompts)
        (name, dtype, shape), *rest = group.tensors
        faults = [(name, dtype, [shape[0] + 1, *shape[1:]]), (name, "int8", shape), ("nowhere", dtype, shape)]
        for fault, words in zip(faults, ("has the shape", "is stored as I8", "no tensor of this name"), strict=True):
            await engine.start_weight_update()
            with pytest.raises(InvalidRequestError, match=words):
                await engine.update_weights(TrainerGroup(group.host, group.port, [fault, *rest], BACKEND))
            await engine.abort_weight_update()
            assert await tokens_of(engine, prompts) == before
        await update(engine, group)
        assert await tokens_of(engine, prompts) != before


@pytest.mark.skipif(DEVICE == "cpu", reason="memory of GPUs alone is shared so")
@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
async def test_memory_of_another_gpu(
    division: str, checkpoint: MakeCheckpoint, tmp_path: Path, rng: random.Random
) -> None:
    """Both ranks read the tensors of this process on the first GPU."""
    model, prompts = checkpoint("qwen3_moe"), some_prompts(rng)
    state = other_weights(model.folder, tmp_path / "new")
    settings = {"kv_cache_memory_bytes": 16 * MIB, division: 2}
    async with running(tmp_path / "new", **settings) as engine:
        wanted = await tokens_of(engine, prompts)
    async with running(model.folder, **settings) as engine:
        before = await tokens_of(engine, prompts)
        on_gpu = {name: tensor.to("cuda:0") for name, tensor in state.items()}
        await update(engine, IpcTensors.of(on_gpu))
        assert await tokens_of(engine, prompts) == wanted != before
