"""Engines whose stages are processes of their own: the answers of one rank, whatever is asked, and whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest_api import check_beside_cancelled, core_of, settled
from searches import every_step_has_a_search  # noqa: F401

from aengine import AsyncLLM, Completion, InvalidRequestError, ModelLoadError, SamplingParams, StructuredOutput

TinyModel = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 6,
    "max_model_len": 128,
    "max_num_batched_tokens": 40,
    "kv_cache_memory_bytes": 1 << 20,
    "num_threads": 1,
    "logits_processors": ["callers_processors:Residues"],
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3, num_hidden_layers=5)


def work(engine: AsyncLLM, seed: int) -> list[asyncio.Task[Completion]]:
    """Requests of many kinds, each of which has one right answer."""
    rng = random.Random(seed)
    greedy = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    kinds = [
        greedy,
        greedy.replace(temperature=0.9, seed=5, extra_args={"residues": {"modulus": 7}}),
        greedy.replace(temperature=1.1, top_k=7, top_p=0.8, seed=6, n=2),
        greedy.replace(logprobs=3, prompt_logprobs=2),
        greedy.replace(repetition_penalty=1.3, presence_penalty=0.4),
        greedy.replace(logit_bias={70: 4.0}, min_tokens=9, stop_token_ids=list(range(20, 150))),
        greedy.replace(
            allowed_token_ids=list(range(5, 300, 3)), bad_words=["a", "b", "\u00e9"], temperature=1.0, seed=8
        ),
        greedy.replace(structured_output=StructuredOutput(regex="[a-f]{8,12}"), ignore_eos=False),
    ]
    prompts = [[rng.randrange(20, 300) for _ in range(rng.randint(1, 70))] for _ in range(12)]
    return [asyncio.create_task(engine.generate(p, kinds[i % len(kinds)])) for i, p in enumerate(prompts)]


def essence(completion: Completion) -> Any:
    choices = [(choice.token_ids, choice.text, choice.finish_reason) for choice in completion.choices]
    logprobs = (*(completion.logprobs or ()), *(completion.prompt_logprobs or ())[1:])
    return choices, [[round(entry.logprob, 3) for entry in entries or ()] for entries in logprobs]


def tokens(completion: Completion) -> Any:
    """`essence` where log-probabilities, which are computed beside others' drafts, differ in the last bits."""
    choices, logprobs = essence(completion)
    return choices, [len(entries) for entries in logprobs]


async def answers(model: Path, **settings: Any) -> list[Any]:
    async with AsyncLLM(model, **SETTINGS | settings) as engine:
        found = [essence(completion) for completion in await asyncio.gather(*work(engine, 1))]
        await settled(engine)
        return found


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """The answers of one rank."""
    return asyncio.run(answers(model))


async def test_any_request(model: Path, expected: list[Any]) -> None:
    """Of two stages, see those below."""
    assert await answers(model, pipeline_parallel_size=3, max_in_flight_steps=1) == expected
    assert await answers(model, pipeline_parallel_size=2, tensor_parallel_size=2) == expected


def repeating(engine: AsyncLLM, seed: int) -> list[asyncio.Task[Completion]]:
    """Requests whose answers repeat themselves, or are forced by a grammar in part, with all that one may ask for."""
    rng = random.Random(seed)
    base = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={70: 30.0})
    forced = SamplingParams(
        max_tokens=40, structured_output=StructuredOutput(regex="abcabcabcabc[a-f]{2,5}(one|two) end")
    )
    kinds = [
        base,
        base.replace(frequency_penalty=0.2, seed=3),
        base.replace(temperature=0.9, seed=5, logprobs=2),
        base.replace(logit_bias={}, min_tokens=9, stop_token_ids=[30, 31]),
        forced.replace(temperature=0.0),
        forced.replace(seed=7, logprobs=1),
    ]
    prompts = [[rng.randrange(20, 300) for _ in range(rng.randint(1, 20))] * rng.choice([1, 2]) for _ in range(12)]
    return [asyncio.create_task(engine.generate(p, kinds[i % len(kinds)])) for i, p in enumerate(prompts)]


async def test_drafts(model: Path) -> None:
    """Found on the host, by the workers, and forced by grammars; with too few blocks for all; and a stage that dies."""
    async with AsyncLLM(model, **SETTINGS) as engine:
        expected = [tokens(completion) for completion in await asyncio.gather(*repeating(engine, 1))]
    few: dict[str, Any] = SETTINGS | {"kv_cache_memory_bytes": 1 << 18}
    for how in (
        {"pipeline_parallel_size": 3, "speculation": "ngram"},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "speculation": "ngram_worker"},
        {"pipeline_parallel_size": 2},
    ):
        async with AsyncLLM(model, **few | how) as engine:
            tasks = repeating(engine, 1)
            if how["pipeline_parallel_size"] == 3:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                os.kill(core_of(engine).replicas[0].worker.executor.workers[1].pid, signal.SIGKILL)
            assert [tokens(await task) for task in tasks] == expected
            statistics = engine.statistics()
            assert 20 < statistics.accepted_tokens <= statistics.drafted_tokens
            await settled(engine)


async def test_the_first_stage_dies(model: Path, expected: list[Any]) -> None:
    """One that is not the first does in `test_drafts`."""
    async with AsyncLLM(model, pipeline_parallel_size=2, **SETTINGS) as engine:
        tasks = work(engine, 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(core_of(engine).replicas[0].worker.executor.workers[0].pid, signal.SIGKILL)
        assert [essence(await task) for task in tasks] == expected
        await settled(engine)


async def test_cancelled_requests_do_not_disturb_others(model: Path, expected: list[Any], rng: random.Random) -> None:
    async with AsyncLLM(model, pipeline_parallel_size=2, **SETTINGS) as engine:
        await check_beside_cancelled(engine, work, essence, expected, rng)


async def test_steps_are_leased_ahead(model: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """As if the loop were often late: many steps are under way, and requests come and go meanwhile."""
    params = SamplingParams(temperature=0.9, max_tokens=50, seed=4, ignore_eos=True, detokenize=False)
    prompts = [[rng.randrange(20, 300) for _ in range(rng.randint(1, 60))] for _ in range(16)]
    async with AsyncLLM(model, **SETTINGS) as engine:
        completions = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        expected = [completion.token_ids for completion in completions]
    async with AsyncLLM(model, pipeline_parallel_size=3, **SETTINGS) as engine:
        steps = core_of(engine).replicas[0].steps
        monkeypatch.setattr(steps.in_flight.limit, "num_steps", lambda scheduler: 40 if scheduler.is_steady else 3)
        most = 0

        async def one(index: int) -> None:
            nonlocal most
            await asyncio.sleep(rng.random() * 0.5)
            stream = engine.stream(prompts[index], params)
            leaves_after = rng.choice([None, None, rng.randrange(40)])
            got: list[int] = []
            async for token in stream:
                got.append(token.token_id)
                most = max(most, len(steps.in_flight.answers))
                if len(got) == leaves_after:
                    break
            await stream.aclose()
            assert tuple(got) == expected[index][: len(got)] and len(got) in (leaves_after, 50)

        await asyncio.gather(*map(one, range(16)))
        assert most > 20
        assert engine.statistics().num_restarts == 0
        await settled(engine)


@pytest.mark.extended  # each rank imports transformers; test_bad_divisions.py has the same of other divisions
async def test_what_transformers_computes_is_not_divided(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="pipeline_parallel_size=2: .* is computed by transformers' code"):
        await AsyncLLM(model, pipeline_parallel_size=2, model_impl="transformers", **SETTINGS).start()


async def test_what_can_not_be_divided(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="pipeline_parallel_size=6: the model has 5 layers"):
        await AsyncLLM(model, pipeline_parallel_size=6, **SETTINGS).start()
    with pytest.raises(InvalidRequestError, match="pipeline_parallel_size=0"):
        AsyncLLM(model, pipeline_parallel_size=0, **SETTINGS)
