"""Log-probabilities of prompts by real workers, beside transformers'."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from short_model import kv_memory

from aengine import AsyncLLM, Completion, RequestError, SamplingParams

if TYPE_CHECKING:
    from conftest import Judge

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=2)


def expected(prompt: Sequence[int], judge: Judge) -> list[list[float]]:
    """Of each token but the first: its log-probability, and the two largest."""
    rows = judge.logprobs(prompt[:1], prompt[1:])
    return [
        [float(row[token_id]), *row.topk(2).values.tolist()] for token_id, row in zip(prompt[1:], rows, strict=True)
    ]


def check(prompt: Sequence[int], completion: Completion, wanted: list[list[float]]) -> None:
    first, *entries = completion.prompt_logprobs or ()
    assert first is None and all(entries)
    assert [entry[0].token_id for entry in entries if entry] == list(prompt[1:])
    for entry, values in zip(entries, wanted, strict=True):
        assert [one.logprob for one in entry or ()] == pytest.approx(values, abs=1e-3)


async def test_a_worker_that_dies(smollm2: str, judge: Judge, rng: random.Random) -> None:
    prompts = [[rng.randrange(40_000) for _ in range(length)] for length in (1, 2, 30, 90, 130)]
    prompts.append(prompts[3][:64] + prompts[2])
    whole_context = [rng.randrange(40_000) for _ in range(256)]
    wanted = {tuple(prompt): expected(prompt, judge) for prompt in (*prompts, whole_context)}
    settings: dict[str, Any] = {"kv_cache_memory_bytes": kv_memory(smollm2, 1 << 25), "max_num_batched_tokens": 32}
    settings["max_leased_steps"] = 0  # else a late loop may find all done when it kills the worker
    kinds = [PARAMS, PARAMS.replace(max_tokens=0), PARAMS.replace(n=2, temperature=1.0), PARAMS]
    async with AsyncLLM(smollm2, dtype="float32", num_threads=1, max_model_len=256, **settings) as engine:
        calls = [(prompt, params) for i, params in enumerate(kinds) for prompt in prompts[i % 2 :: 2]]
        calls.append((whole_context, PARAMS.replace(max_tokens=0)))
        tasks = [asyncio.create_task(engine.generate(*call)) for call in calls]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(engine.describe()["pid"], signal.SIGKILL)
        for (prompt, params), task in zip(calls, tasks, strict=True):
            completion = await task
            check(prompt, completion, wanted[tuple(prompt)])
            assert {len(choice.token_ids) for choice in completion.choices} == {params.max_tokens}
        assert engine.statistics().num_restarts == 1


async def test_completions_of_a_shared_prompt(smollm2: str, judge: Judge, rng: random.Random) -> None:
    prompt = [rng.randrange(40_000) for _ in range(160)]
    completions = [[rng.randrange(40_000) for _ in range(1 + i % 5)] for i in range(12)]
    likely = judge.logprobs(prompt, [0])[0].argmax()
    completions.append([int(likely)])
    async with AsyncLLM(smollm2, dtype="float32", num_threads=1, max_model_len=256) as engine:
        for found, own in zip(await engine.score_completions(prompt, completions), completions, strict=True):
            rows = judge.logprobs(prompt, own)
            wanted = rows.gather(1, torch.tensor(own)[:, None])[:, 0]
            assert found.token_ids.tolist() == own
            assert found.logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-3)
            assert found.logprob == pytest.approx(float(wanted.sum()), abs=1e-3)
            assert found.is_greedy == (own == [likely])
            assert not (found.token_ids.flags.writeable or found.logprobs.flags.writeable)
        assert engine.statistics().prefix_cache_hits > 11 * 128
        for wrong, said in (
            ([[5], [5, -1]], r"^completions\[1\]\[1\]=-1 is not a token id"),
            ([[True]], r"^completions\[0\]\[0\]=True is"),
            ([[5], [5] * 300], r"^the prompt and completions\[1\] have 460 tokens, but this model takes 256 at once$"),
        ):
            with pytest.raises(RequestError, match=said):
                await engine.score_completions(prompt, wrong)
