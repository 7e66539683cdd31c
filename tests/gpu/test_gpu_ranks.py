"""A model on two GPUs, a process each: layers divided among ranks (tensor parallel) or among stages (pipeline), these
also as if on two machines. The tokens of one GPU, whatever is asked, and whoever dies.

With one GPU alone, both processes share it. On a CPU (to try the tests themselves) they exchange by gloo.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_api import check_beside_cancelled, core_of, settled
from gpu_models import DEVICE, MIB, SHARED_GPU, Checkpoint
from one_gpu import MEETING_PORT
from searches import every_step_has_a_search  # noqa: F401
from test_gpu_engine import GREEDY, LENGTH, all_at_once, running, some_prompts
from test_gpu_group_weights import pair
from tiny import VOCAB_SIZE

from aengine import AsyncLLM, Completion, SamplingParams, StructuredOutput
from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.workers.rank import LOOPBACK

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("shared_gpu")]

MakeCheckpoint = Callable[..., Checkpoint]
NUM_GPUS = torch.cuda.device_count()
ON_TWO = {**SHARED_GPU, "kv_cache_memory_bytes": 16 * MIB}
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, **ON_TWO}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, **ON_TWO}
APART: dict[str, Any] = STAGES | {"worker": "one_gpu:load_apart"}
DIVISIONS = {"ranks": RANKS, "stages": STAGES, "stages apart": APART}
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "phi3", "gpt_oss", "qwen3_moe")
MOST_RESTARTS = 2 if SHARED_GPU else 1
"""After a death: a GPU that processes share may be unavailable for a moment when one of them was killed."""
KINDS = [
    GREEDY,
    GREEDY.replace(temperature=0.9, seed=5),
    GREEDY.replace(temperature=1.1, top_k=7, top_p=0.8, seed=6, n=2),
    GREEDY.replace(logprobs=3),
    GREEDY.replace(repetition_penalty=1.3, presence_penalty=0.4),
    GREEDY.replace(logit_bias={7: 3.0}, min_p=0.01, temperature=0.8, seed=9),
    GREEDY.replace(structured_output=StructuredOutput(regex="[a-f]{8,12}"), ignore_eos=False),
]
"""Of each there is one right answer."""


ALONE: dict[str, Any] = {}
"""What one rank has found, by what was asked: the same for every division."""


async def of_one(name: str, found: Callable[[], Awaitable[Any]]) -> Any:
    if name not in ALONE:
        ALONE[name] = await found()
    return ALONE[name]


@pytest.fixture(params=DIVISIONS)
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of two processes. Over the network stages exchange what they do on one machine: of families and
    formats one is enough there."""
    one_of_these = {"arch": "qwen3", "kind": "nvfp4"}
    values = request.node.callspec.params
    if request.param == "stages apart" and any(
        values.get(name, value) != value for name, value in one_of_these.items()
    ):
        pytest.skip("seen on one machine")
    with socket.create_server((LOOPBACK, 0)) as server:
        monkeypatch.setenv(MEETING_PORT, str(server.getsockname()[1]))
    return DIVISIONS[request.param]


def work(engine: AsyncLLM, seed: int, count: int = 28) -> list[asyncio.Task[Completion]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(20, 250) for _ in range(rng.randint(1, 60))] for _ in range(count)]
    return [asyncio.create_task(engine.generate(p, KINDS[i % len(KINDS)])) for i, p in enumerate(prompts)]


def essence(completion: Completion) -> Any:
    choices = [(choice.token_ids, choice.text, choice.finish_reason) for choice in completion.choices]
    return choices, [[round(entry.logprob, 2) for entry in entries] for entries in completion.logprobs or ()]


async def answers(folder: Path, **settings: Any) -> list[Any]:
    """Of the same requests three times: steps run op by op first, then as graphs, and prefixes are found."""
    async with running(folder, **settings) as engine:
        return [[essence(c) for c in await asyncio.gather(*work(engine, 1))] for _ in range(3)]


@pytest.mark.parametrize("arch", FAMILIES)
async def test_greedy_tokens_of_transformers(
    checkpoint: MakeCheckpoint, arch: str, two: dict[str, Any], rng: random.Random
) -> None:
    """Three times: steps with prompts run op by op first, then as graphs, and prefixes are found."""
    model, prompts = checkpoint(arch), some_prompts(rng)
    async with running(model.folder, **two) as engine:
        model.check_all(prompts[:1], [await engine.generate(prompts[0], GREEDY)], LENGTH)
        for _ in range(3):
            model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
        assert engine.statistics().num_restarts == 0


async def test_whole_experts_on_each_rank(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    model, prompts = checkpoint("qwen3_moe"), some_prompts(rng)
    async with running(model.folder, enable_expert_parallel=True, **RANKS) as engine:
        model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)


async def test_any_request(checkpoint: MakeCheckpoint, two: dict[str, Any]) -> None:
    folder = checkpoint("qwen3").folder
    assert await answers(folder, **two) == await of_one("any", partial(answers, folder))


@pytest.mark.parametrize("kind", ["awq", "gptq 8", "int4, zeros", "nvfp4", "mxfp4"])
async def test_codes_of_weights(kind: str, tmp_path: Path, two: dict[str, Any]) -> None:
    """Each rank has whole groups: what one GPU gives."""
    folder, prompts = pair(tmp_path, "llama", kind)[0], some_prompts(random.Random(2))

    async def found(**settings: Any) -> list[Any]:
        async with running(folder, **settings) as engine:
            return [essence(completion)[0] for completion in await all_at_once(engine, prompts)]

    by_one, by_two = await of_one(kind, found), await found(**two)
    differ = sum(one != other for one, other in zip(by_one, by_two, strict=True))
    assert differ <= len(prompts) // 10  # sums in another order may decide what is nearly equal


@pytest.mark.parametrize("speculation", ["suffix", "ngram_worker"])
async def test_drafts(
    checkpoint: MakeCheckpoint,
    two: dict[str, Any],
    speculation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers that repeat themselves, and one that a grammar forces in part: fewer steps, and the same tokens, whatever
    steps with drafts cost."""
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    folder, prompts = checkpoint("qwen3").folder, some_prompts(random.Random(3))[:6]
    same = GREEDY.replace(logit_bias={70: 30.0}, max_tokens=40)
    forced = StructuredOutput(regex="abcabcabcabc[a-f]{2,5}(one|two) end")
    kinds = [same, same.replace(temperature=0.9, seed=5, logprobs=2), GREEDY.replace(frequency_penalty=0.2)]
    kinds.append(GREEDY.replace(structured_output=forced, ignore_eos=False, max_tokens=40))

    async def found(**settings: Any) -> list[Any]:
        async with running(folder, **settings) as engine:
            rounds = []
            for _ in range(2):
                tasks = [engine.generate(prompt, kind) for prompt in prompts for kind in kinds]
                rounds.append([essence(completion)[0] for completion in await asyncio.gather(*tasks)])
            assert not settings or engine.statistics().accepted_tokens > 20
            return rounds

    first, second = await found(**two, speculation=speculation)
    assert [first, second] == await of_one("drafts", found) and first == second


@pytest.mark.skipif(DEVICE == "cuda" and NUM_GPUS < 4, reason="needs four GPUs")
async def test_stages_of_two_ranks(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("qwen3").folder
    assert await answers(folder, **RANKS | STAGES) == await answers(folder)


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"max_num_batched_tokens": 16}], ids=str)
async def test_without_graphs_and_in_chunks(
    checkpoint: MakeCheckpoint, settings: dict[str, Any], two: dict[str, Any], rng: random.Random
) -> None:
    model, prompts = checkpoint("qwen3"), some_prompts(rng)
    async with running(model.folder, **two, **settings) as engine:
        for _ in range(2):
            model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)


async def test_prompts_beside_decodes(checkpoint: MakeCheckpoint, two: dict[str, Any], rng: random.Random) -> None:
    model, prompts = checkpoint("llama"), some_prompts(rng)
    async with running(model.folder, max_num_batched_tokens=32, **two) as engine:
        tasks = []
        for prompt in prompts * 2:
            tasks.append(asyncio.create_task(engine.generate(prompt, GREEDY)))
            await asyncio.sleep(rng.random() / 100)
        model.check_all(prompts * 2, await asyncio.gather(*tasks), LENGTH)


async def test_one_token_each(checkpoint: MakeCheckpoint, two: dict[str, Any], rng: random.Random) -> None:
    """No step needs the tokens that come back to a first stage."""
    model, prompts = checkpoint("llama"), some_prompts(rng) * 5
    async with running(model.folder, max_num_seqs=4, **two) as engine:
        model.check_all(prompts, await all_at_once(engine, prompts, GREEDY.replace(max_tokens=1)), 1)


async def first_logprobs(folder: Path, prompts: Sequence[list[int]], **settings: Any) -> list[dict[int, float]]:
    """Of each prompt's first token, and the likeliest ones."""
    how = SamplingParams(max_tokens=1, temperature=0, logprobs=20, ignore_eos=True)
    async with running(folder, max_model_len=2048, max_num_batched_tokens=4096, **settings) as engine:
        completions = await all_at_once(engine, prompts, how)
        return [{entry.token_id: entry.logprob for entry in c.logprobs[0]} for c in completions if c.logprobs]


async def test_log_probabilities_in_bfloat16(checkpoint: MakeCheckpoint, two: dict[str, Any]) -> None:
    """By the kernels that overlap each other."""
    model, rng = checkpoint("llama", "bfloat16", "medium"), random.Random(4)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(n)] for n in (1, 5, 130, 700, 1500)]
    memory = {"kv_cache_memory_bytes": 256 * MIB, "dtype": "bfloat16"}
    by_one = await of_one("logprobs", partial(first_logprobs, model.folder, prompts, **memory))
    by_two = await first_logprobs(model.folder, prompts, **two | memory)
    differences = [
        abs(a[token] - b[token]) for a, b in zip(by_one, by_two, strict=True) for token in a.keys() & b.keys()
    ]
    print(f"{len(differences)} differences, at most {max(differences):.3f}")
    assert len(differences) > 15 * len(prompts) and max(differences) < 0.15


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_dies(checkpoint: MakeCheckpoint, rank: int, two: dict[str, Any]) -> None:
    folder = checkpoint("qwen3").folder
    async with running(folder, **two) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        tasks = work(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[rank].pid, signal.SIGKILL)
        begun = time.monotonic()
        rest = [task for task in tasks if not task.done()]
        await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
        print(f"the first stream ended {time.monotonic() - begun:.1f} s after the death of rank {rank}")
        assert [essence(await task) for task in tasks] == expected
        assert 1 <= engine.statistics().num_restarts <= MOST_RESTARTS
        await settled(engine)


@pytest.mark.skipif(DEVICE == "cpu", reason="there are no kernels")
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_kernel_is_stuck(checkpoint: MakeCheckpoint, rank: int, two: dict[str, Any]) -> None:
    """The other rank waits for it on its GPU; both beat, and neither gets on."""
    folder = checkpoint("qwen3").folder
    async with running(folder, worker_extension="busy_gpu:BusyGpu", **two) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        tasks = work(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await engine.collective_rpc("spin", rank, 90)
        begun = time.monotonic()
        assert [essence(await task) for task in tasks] == expected
        print(f"all streams had ended {time.monotonic() - begun:.1f} s after the kernel began")
        assert 1 <= engine.statistics().num_restarts <= MOST_RESTARTS


async def test_cancelled_requests_do_not_disturb_others(
    checkpoint: MakeCheckpoint, two: dict[str, Any], rng: random.Random
) -> None:
    async with running(checkpoint("qwen3").folder, **two) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        await check_beside_cancelled(engine, work, essence, expected, rng)


async def test_one_key_value_head(checkpoint: MakeCheckpoint, tmp_path: Path, rng: random.Random) -> None:
    """It is on both ranks."""
    model = Checkpoint(tmp_path, "llama", "float32", "one key-value head")
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(20)]
    async with running(model.folder, **RANKS) as engine:
        model.check_all(prompts, await all_at_once(engine, prompts), LENGTH)
