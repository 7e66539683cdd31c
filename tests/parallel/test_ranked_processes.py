"""Engines whose ranks are processes of their own and share each layer: the answers of one rank, whatever is asked, and
whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest_api import core_of, settled

from aengine import AsyncLLM, Completion, SamplingParams, StructuredOutput

TinyModel = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 6,
    "max_model_len": 128,
    "max_num_batched_tokens": 40,
    "kv_cache_memory_bytes": 1 << 20,
    "num_threads": 1,
    "logits_processors": ["callers_processors:Residues"],
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
EXPERTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "vocab_size": 1100,
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    """A mixture of experts with fewer key-value heads than four ranks, and a vocabulary that no number divides."""
    return tiny_model("qwen3_moe", seed=3, **EXPERTS)


def work(engine: AsyncLLM) -> list[asyncio.Task[Completion]]:
    """Requests of many kinds, each of which has one right answer."""
    rng = random.Random(1)
    kinds = [
        GREEDY,
        GREEDY.replace(temperature=0.9, seed=5, extra_args={"residues": {"modulus": 7}}),
        GREEDY.replace(temperature=1.1, top_k=7, top_p=0.8, min_p=0.01, seed=6, n=3),
        GREEDY.replace(temperature=0.7, seed=9, n=2),
        GREEDY.replace(logprobs=3, prompt_logprobs=2),
        GREEDY.replace(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        GREEDY.replace(logit_bias={70: 4.0, 1099: 3.0}, min_tokens=9, stop_token_ids=list(range(20, 500))),
        GREEDY.replace(logit_bias={40: 100.0, 300: 100.0, 1098: 100.0}, temperature=1.0, seed=7),
        GREEDY.replace(allowed_token_ids=list(range(5, 1100, 9)), temperature=1.0, seed=8, bad_words=["a", "the"]),
        GREEDY.replace(structured_output=StructuredOutput(regex="so is [a-f]{4,5}"), ignore_eos=False),
    ]
    shared = [rng.randrange(20, 1100) for _ in range(40)]
    prompts = [[rng.randrange(20, 1100) for _ in range(rng.randint(1, 70))] for _ in range(12)]
    prompts[4::3] = [shared[: 40 - i] + prompt[:5] for i, prompt in enumerate(prompts[4::3])]
    return [asyncio.create_task(engine.generate(p, kinds[i % len(kinds)])) for i, p in enumerate(prompts)]


class Near(float):
    """A log-probability, which equals those that another order of the sums may give."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


def essence(completion: Completion) -> Any:
    choices = [(choice.token_ids, choice.text, choice.finish_reason) for choice in completion.choices]
    logprobs = (*(completion.logprobs or ()), *(completion.prompt_logprobs or ())[1:])
    return choices, [[Near(entry.logprob) for entry in entries or ()] for entries in logprobs]


async def answers(model: Path, **settings: Any) -> Sequence[Any]:
    async with AsyncLLM(model, **SETTINGS | settings) as engine:
        found = [essence(completion) for completion in await asyncio.gather(*work(engine))]
        await settled(engine)
        return found


@pytest.fixture(scope="module")
def expected(model: Path) -> Sequence[Any]:
    """The answers of one rank."""
    return asyncio.run(answers(model))


async def test_any_request(model: Path, expected: Sequence[Any]) -> None:
    """Of two ranks that divide all, see those below."""
    assert await answers(model, tensor_parallel_size=2, enable_expert_parallel=True) == expected
    assert await answers(model, tensor_parallel_size=4, max_in_flight_steps=1) == expected


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_dies(model: Path, expected: Sequence[Any], rank: int) -> None:
    async with AsyncLLM(model, tensor_parallel_size=2, **SETTINGS) as engine:
        tasks = work(engine)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[rank].pid, signal.SIGKILL)
        assert [essence(await task) for task in tasks] == expected
        await settled(engine)


async def test_memory_runs_out_on_one_rank(model: Path, expected: Sequence[Any]) -> None:
    """No rank waits for one that has left a step: all start again, and streams go on."""
    settings = {"tensor_parallel_size": 2, "worker_extension": "memory_runs_out:Extension"}
    async with AsyncLLM(model, **SETTINGS | settings) as engine:
        tasks = work(engine)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await engine.collective_rpc("fail_next_step")
        assert [essence(await task) for task in tasks] == expected
        (restart,) = engine.statistics().restarts
        assert "ran out of memory in a step that other ranks compute too" in restart.reason
        await settled(engine)


async def test_vectors(model: Path) -> None:
    texts = [[i, 25, 31, 7] for i in range(20, 40)]
    found = []
    for sizes in ({}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2, "enable_expert_parallel": True}):
        async with AsyncLLM(model, pooling="last", **SETTINGS | sizes) as engine:
            found.append(await asyncio.gather(*map(engine.embed, texts)))
            await settled(engine)
    for alone, divided, shared in zip(*found, strict=True):
        assert divided == pytest.approx(alone, abs=1e-5)
        assert shared == pytest.approx(alone, abs=1e-5)
