"""New weights for engines that run, from whatever source: the tokens of an engine that was started with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest_api import core_of, settled, until, until_running
from safetensors.torch import load_file
from torch import Tensor

from aengine import (
    AsyncLLM,
    EngineClosedError,
    InvalidRequestError,
    SamplingParams,
    TrainerGroup,
    WeightsLostError,
    WorkerDiedError,
)
from aengine.engine import recovery
from aengine.engine.updates import weight_updates
from aengine.engine.updates.window import Window

TinyModel = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer": True,
    "max_num_seqs": 4,
    "max_model_len": 250,
    "kv_cache_memory_bytes": 1 << 22,
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPT = list(range(40, 90))
SIZES: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix comes in one piece, and restarts don't wait."""
    monkeypatch.setattr(weight_updates, "Window", lambda: Window(8 << 10))
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)


def state_of(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    return state


async def tokens(engine: AsyncLLM) -> tuple[int, ...]:
    return (await engine.generate(PROMPT, GREEDY)).token_ids


async def fresh(folder: Path, **settings: Any) -> tuple[int, ...]:
    async with AsyncLLM(folder, **SETTINGS | settings) as engine:
        return await tokens(engine)


async def replace(engine: AsyncLLM, source: Any, **how: Any) -> str:
    await engine.start_weight_update()
    assert engine.state == "paused"
    await engine.update_weights(source)
    return await engine.finish_weight_update(**how)


@pytest.mark.parametrize(
    ("arch", "fields", "settings"),
    [
        ("llama", SIZES | {"attention_bias": True}, {"dtype": "auto"}),
        ("qwen3_moe", SIZES | EXPERTS, {"tensor_parallel_size": 2}),
        ("qwen3", SIZES | {"tie_word_embeddings": True}, {"pipeline_parallel_size": 2, "dtype": "bfloat16"}),
        ("gpt_oss", {}, {"data_parallel_size": 2}),
        ("llama", SIZES, {"dtype": "bfloat16"}),
        ("qwen3_next", EXPERTS | {"head_dim": 16, "num_experts_per_tok": 2}, {"kv_cache_memory_bytes": 24 << 20}),
        ("qwen3_moe", SIZES | EXPERTS, {"data_parallel_size": 2, "enable_expert_parallel": True}),
    ],
    ids=str,
)
async def test_tokens_are_those_of_a_fresh_engine(
    arch: str, fields: dict[str, Any], settings: dict[str, Any], tiny_model: TinyModel
) -> None:
    """In pieces, of torch and of numpy, in other numbers than the checkpoint's, in several calls; and from a folder."""
    first, second = (tiny_model(arch, seed=seed, **fields) for seed in (3, 4))
    before, wanted = [await fresh(folder, **settings) for folder in (first, second)]
    assert before != wanted
    state = list(state_of(second).items())
    half = len(state) // 2

    def as_arrays() -> Iterator[tuple[str, Any]]:
        for name, tensor in state[half:]:
            yield name, np.asfortranarray(tensor.float().numpy())

    async with AsyncLLM(first, **SETTINGS | settings) as engine:
        assert await tokens(engine) == before
        await engine.start_weight_update()
        # Their signs are a bit of the view.
        doubles = {name: torch.complex(0 * one.double(), -one.double()).conj().imag for name, one in state[:half]}
        assert all(tensor.is_neg() for tensor in doubles.values())
        await engine.update_weights(doubles)
        await engine.update_weights(as_arrays())
        assert await engine.finish_weight_update() == "1" and engine.state == "running"
        assert await tokens(engine) == wanted, "no prefix of before is found"
        checksum = await engine.weights_checksum()
        assert checksum["version"] == "1" and len(checksum["checksum"]) == 64
        assert await replace(engine, first, version="of a folder") == "of a folder"
        completion = await engine.generate(PROMPT, GREEDY)
        assert completion.token_ids == before and completion.weight_versions == ("of a folder",)
        await settled(engine)


@pytest.fixture(scope="module")
def models(tiny_model: TinyModel) -> tuple[Path, Path]:
    first, second = (tiny_model("llama", seed=seed, **SIZES, num_hidden_layers=2) for seed in (5, 6))
    return first, second


async def test_streams_stand_still_and_go_on(models: tuple[Path, Path]) -> None:
    """Those that ran have both versions, and what they say from then on is what the new weights say after it."""
    first, second = models
    async with AsyncLLM(first, **SETTINGS) as engine:
        long = GREEDY.replace(max_tokens=180)
        tasks = [asyncio.create_task(engine.generate(PROMPT[i:], long)) for i in range(3)]
        await until_running(engine, 3)
        await engine.start_weight_update()
        tasks.append(asyncio.create_task(engine.generate(PROMPT, GREEDY)))
        await engine.update_weights(state_of(second))
        assert engine.state == "paused" and not any(task.done() for task in tasks)
        with pytest.raises(InvalidRequestError, match="can't be resumed now: a weight update is under way"):
            await engine.resume()
        with pytest.raises(InvalidRequestError, match="a weight update is under way"):
            await engine.start_weight_update()
        await engine.finish_weight_update()
        *old, new = [await task for task in tasks]
        assert new.weight_versions == ("1",) and new.token_ids == await tokens(engine)
        for i, completion in enumerate(old):
            assert completion.weight_versions in {("0", "1"), ("1",)}
            ends = completion.token_ids[:-1], completion.token_ids[-1:]
            last = await engine.generate([*PROMPT[i:], *ends[0]], GREEDY.replace(max_tokens=1))
            assert last.token_ids == ends[1]
        await settled(engine)


async def test_nothing_comes_before_the_pause(models: tuple[Path, Path]) -> None:
    """What has not begun can be given up, and nothing else."""
    first, second = models
    async with AsyncLLM(first, **SETTINGS) as engine:
        long = GREEDY.replace(max_tokens=180)
        alone = await engine.generate(PROMPT, long)
        for is_given_up in (True, False):
            running = asyncio.create_task(engine.generate(PROMPT, long))
            await until_running(engine, 1)
            starting = asyncio.create_task(engine.start_weight_update("wait"))
            await until(lambda: engine.state == "paused")
            for call in (engine.update_weights(second), engine.update_weights({}), engine.finish_weight_update()):
                with pytest.raises(InvalidRequestError, match="has not begun yet"):
                    await call
            if is_given_up:
                await engine.abort_weight_update()
                with pytest.raises(InvalidRequestError, match="ended before it had begun"):
                    await starting
                assert engine.state == "running" and not running.done()
            completion = await running
            assert completion.token_ids == alone.token_ids and completion.weight_versions == ("0",)
        await starting
        await engine.sleep()
        with pytest.raises(EngineClosedError, match="asleep"):
            await engine.abort_weight_update()
        await engine.wake_up()
        with contextlib.suppress(InvalidRequestError):  # workers that were started again have ended it
            await engine.abort_weight_update()
        assert engine.state == "running" and (await engine.generate(PROMPT, long)).token_ids == alone.token_ids


async def test_what_is_refused(models: tuple[Path, Path]) -> None:
    """Nothing has changed, as long as nothing was replaced; else the last whole version is read again."""
    first, second = models
    state = state_of(second)
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    faults: list[tuple[Any, str]] = [
        ({"model.layers.9.up": state[q]}, r"model\.layers\.9\.up: the model has no tensor of this name"),
        ({q: state[q][1:]}, "q_proj.weight has the shape"),
        ({q: state[q].to(torch.int8)}, "q_proj.weight is stored as I8"),
        ({q: state[q].to(torch.complex64)}, "is of complex64"),
        ({q: state[q].fill_(torch.nan).clone()}, "has NaN or infinite numbers"),
        ({q: "text"}, "neither a tensor of torch nor an array"),
        ({q: state[q].to("meta")}, "q_proj.weight can't be copied: NotImplementedError"),
        ({q: SimpleNamespace(shape=(1,), dtype="float32")}, "q_proj.weight can't be copied: AttributeError"),
        ([q], r"which is no \(name, tensor\)"),
        ([(k, state[k]), (k, state[k])], "came twice in one update"),
        ("/nowhere", "nowhere"),
        (7, "source=7 is not valid"),
    ]
    async with AsyncLLM(first, **SETTINGS) as engine:
        before = await tokens(engine)
        for source, words in faults:
            await engine.start_weight_update()
            with pytest.raises(InvalidRequestError, match=words):
                await engine.update_weights(source)
            await engine.abort_weight_update()
            assert engine.state == "running" and await tokens(engine) == before
        for call in (engine.update_weights({}), engine.finish_weight_update(), engine.abort_weight_update()):
            with pytest.raises(InvalidRequestError, match="no weight update is under way"):
                await call
        await engine.start_weight_update()
        await engine.update_weights({k: state[k]})
        with pytest.raises(InvalidRequestError, match="tensors of the model did not come|did not come, and"):
            await engine.finish_weight_update()
        with pytest.raises(InvalidRequestError, match=r"q_proj.*v_proj.* did not come, and .*k_proj"):
            await engine.finish_weight_update(is_partial=True)
        await engine.abort_weight_update()
        assert await tokens(engine) == before
        norm = "model.norm.weight"
        assert await replace(engine, {norm: state[norm] * 1.5}, is_partial=True) == "1"
        assert (await engine.generate(PROMPT, GREEDY)).weight_versions == ("1",)
        await engine.start_weight_update()
        with pytest.raises(InvalidRequestError, match="nowhere"):
            await engine.update_weights("/nowhere")
        await engine.abort_weight_update()
        assert engine.state == "running", "no weight had been replaced"
        await engine.start_weight_update()
        await engine.update_weights({v: state[v]})
        with pytest.raises(WeightsLostError, match="version 1 came as tensors"):
            await engine.abort_weight_update()
        waiting = asyncio.create_task(tokens(engine))
        await engine.start_weight_update()
        await engine.update_weights(state_of(second))
        with pytest.raises(InvalidRequestError, match="all of them must come"):
            await engine.finish_weight_update(is_partial=True)
        await engine.finish_weight_update()
        assert engine.state == "running" and await waiting == await fresh(second)


async def test_workers_die(models: tuple[Path, Path]) -> None:
    first, second = models
    async with AsyncLLM(first, **SETTINGS, tensor_parallel_size=2) as engine:

        def kill() -> None:
            os.kill(core_of(engine).replicas[0].worker.executor.workers[1].pid, signal.SIGKILL)

        def until_dead() -> Iterator[tuple[str, Tensor]]:
            for i, pair in enumerate(state_of(second).items()):
                if i == 5:
                    kill()
                yield pair

        before, wanted = await tokens(engine), await fresh(second)
        await engine.start_weight_update()
        running = asyncio.create_task(tokens(engine))
        with pytest.raises(WorkerDiedError):
            await engine.update_weights(until_dead())
        assert await running == before, "the update has ended, and the weights are those of the start"
        await replace(engine, second)
        kill()
        assert await tokens(engine) == wanted, "a folder is read by the new workers"
        await replace(engine, state_of(first))
        kill()
        await until(lambda: engine.state == "paused")
        running = asyncio.create_task(tokens(engine))
        with pytest.raises(InvalidRequestError, match="send all weights again"):
            await engine.resume()
        assert not running.done()
        await replace(engine, state_of(first))
        assert await running == before
        await engine.start_weight_update()
    with pytest.raises(EngineClosedError):
        await engine.finish_weight_update()


async def test_a_folder_goes_with_the_worker(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Or has other weights, as trainers keep the last few, or one: the engine waits for weights, and no stream is
    lost."""
    first, second = models
    async with AsyncLLM(first, **SETTINGS) as engine:
        before, wanted = await tokens(engine), await fresh(second)
        for is_asleep, is_written_over in ((False, False), (True, False), (False, True)):
            folder = shutil.copytree(second, tmp_path / "step", dirs_exist_ok=True)
            await replace(engine, folder)
            running = asyncio.create_task(engine.generate(PROMPT, GREEDY.replace(max_tokens=150)))
            await until_running(engine, 1)
            shutil.rmtree(folder)
            if is_written_over:
                shutil.copytree(first, folder, copy_function=shutil.copy)
            if is_asleep:
                await engine.sleep(level=2)
                await engine.wake_up()
            else:
                os.kill(core_of(engine).replicas[0].worker.executor.workers[0].pid, signal.SIGKILL)
            await until(lambda: engine.state == "paused")
            with pytest.raises(InvalidRequestError, match="can't be read again"):
                await engine.resume()
            await replace(engine, state_of(first))
            assert len((await running).token_ids) == 150 and await tokens(engine) == before
            await replace(engine, second)
            assert await tokens(engine) == wanted
        await settled(engine)


async def test_between_sleeping_and_waking(models: tuple[Path, Path]) -> None:
    """As trainers do that need the memory themselves: all is dropped, and the weights are sent before there is KV."""
    first, second = models
    async with AsyncLLM(first, **SETTINGS) as engine:
        await replace(engine, state_of(first))
        before = await tokens(engine)
        for source, version in ((state_of(second), "2"), (state_of(first), "3")):
            await engine.sleep(level=2)
            with pytest.raises(EngineClosedError, match="asleep"):
                await engine.start_weight_update()
            await engine.wake_up(["weights"])
            await engine.start_weight_update()
            await engine.update_weights(source)
            assert await engine.finish_weight_update() == version
            assert engine.state == "asleep"
            await engine.wake_up()
            assert engine.state == "running" and (await tokens(engine) == before) == (version == "3")
        await engine.sleep(level=2)
        await engine.wake_up()
        assert engine.state == "paused", "nothing is computed until the weights have come again"
        running = asyncio.create_task(tokens(engine))
        await until(lambda: engine.statistics().num_waiting == 1)
        with pytest.raises(InvalidRequestError, match="send all weights again"):
            await engine.resume()
        assert await engine.drain(0) is False
        await engine.resume()
        assert engine.state == "paused"
        await engine.start_weight_update()
        await engine.update_weights(state_of(first))
        assert await engine.pause("keep")
        await engine.finish_weight_update()
        assert engine.state == "paused" and not running.done(), "a pause outlasts the update that it was begun in"
        await engine.resume()
        assert engine.state == "running" and await running == before
        await settled(engine)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def announced(state: dict[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    return [(name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]) for name, tensor in state.items()]


def train(port: int, tensors: list[Tensor], size: int) -> None:
    """Send them to the engine's ranks, and go."""
    patience = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=patience)
    group = dist.ProcessGroupGloo(dist.PrefixStore("aengine-weights", store), 0, size, patience)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for tensor in tensors:
        group.broadcast([tensor], options).wait()


async def test_a_trainer_sends_to_all(models: tuple[Path, Path]) -> None:
    """By broadcast, from a process of its own or a thread; one that dies is an error after its time."""
    first, second = models
    state, port = state_of(second), free_port()
    tensors = announced(state)
    wanted = await fresh(second)
    async with AsyncLLM(first, **SETTINGS, tensor_parallel_size=2) as engine:
        trainer = threading.Thread(target=train, args=(port, list(state.values()), 3))
        trainer.start()
        await engine.start_weight_update()
        await engine.update_weights(TrainerGroup("127.0.0.1", port, tensors))
        await engine.finish_weight_update()
        await asyncio.to_thread(trainer.join)
        assert await tokens(engine) == wanted
        await engine.start_weight_update()
        with pytest.raises(InvalidRequestError, match="did not come from the trainer"):
            await engine.update_weights(TrainerGroup("127.0.0.1", port, tensors))
        await engine.abort_weight_update()
        assert await tokens(engine) == wanted, "nothing had been replaced"


async def test_trainers_that_fail(models: tuple[Path, Path]) -> None:
    """One that dies in the midst, and one that sends less than it has said: the weights from before are read again."""
    first, second = models
    state = state_of(second)
    short = [tensor if i != 3 else tensor.flatten()[:4].clone() for i, tensor in enumerate(state.values())]
    bad: list[TrainerGroup] = [
        TrainerGroup(7, 1, []),  # type: ignore[arg-type]
        *(TrainerGroup("h", port, []) for port in (0, 1 << 20, "x", True)),  # type: ignore[arg-type]
        *(TrainerGroup("h", 1, [], timeout=seconds) for seconds in (0, float("nan"), float("inf"))),
        TrainerGroup("h", 1, [], backend="mpi"),
        TrainerGroup("h", 1, None),  # type: ignore[arg-type]
        TrainerGroup("h", 1, [1, 2]),  # type: ignore[list-item]
        TrainerGroup("h", 1, [("w", "float32", [1 << 40])]),
        TrainerGroup("h", 1, [("w", "float32", [-1])]),
    ]
    async with AsyncLLM(first, **SETTINGS) as engine:
        before = await tokens(engine)
        running = asyncio.create_task(engine.generate(PROMPT, GREEDY.replace(max_tokens=150)))
        await until_running(engine, 1)
        await engine.start_weight_update()
        for group in bad:
            with pytest.raises(InvalidRequestError, match="is not valid"):
                await engine.update_weights(group)
        await engine.abort_weight_update()
        for sent, words in ((list(state.values())[:5], "did not come from the trainer"), (short, "has NaN")):
            port = free_port()
            trainer = threading.Thread(target=train, args=(port, sent, 2))
            trainer.start()
            await engine.start_weight_update()
            with pytest.raises(InvalidRequestError, match=words):
                await engine.update_weights(TrainerGroup("127.0.0.1", port, announced(state), timeout=20.0))
            await engine.abort_weight_update()
            await asyncio.to_thread(trainer.join)
            assert engine.state == "running" and await tokens(engine) == before
        completion = await running
        assert len(completion.token_ids) == 150 and completion.weight_versions == ("0",)
        await settled(engine)


async def test_what_stood_still_may_go_on_with_its_keys_and_values(models: tuple[Path, Path]) -> None:
    """Nothing of it is computed again, and nobody else finds what the old weights have computed."""
    first, second = models
    long = GREEDY.replace(max_tokens=150)
    wanted = await fresh(second)
    async with AsyncLLM(first, **SETTINGS) as engine:
        running = asyncio.create_task(engine.generate(PROMPT, long))
        await until_running(engine, 1)
        await engine.start_weight_update()
        before = engine.statistics()
        await engine.update_weights(second)
        await engine.finish_weight_update(clear_cache=False)
        completion = await running
        assert len(completion.token_ids) == 150 and completion.weight_versions[-1] == "1"
        assert engine.statistics().prompt_tokens == before.prompt_tokens
        assert engine.statistics().num_preemptions == before.num_preemptions
        assert await tokens(engine) == wanted
        await settled(engine)
