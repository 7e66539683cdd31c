"""Logits processors of the caller's in a real worker that is killed once; and what is refused before it is queued."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from conftest_api import settled
from short_model import kv_memory

from aengine import AsyncLLM, InvalidRequestError, ModelLoadError, SamplingParams, StructuredOutput

PROCESSORS = ["callers_processors:Residues", "thinking_budget"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


def settings(model: str) -> dict[str, Any]:
    memory = {"kv_cache_memory_bytes": kv_memory(model, 1 << 25), "max_model_len": 256}
    # With leases, a late loop might find all done when it kills the worker.
    return {"dtype": "float32", "num_threads": 1, "max_leased_steps": 0, "logits_processors": PROCESSORS, **memory}


def is_kept(token_ids: list[int], begin: int, modulus: int) -> bool:
    """Whether each token of the completion is one that `Residues` allows."""
    return all((token_ids[i] + token_ids[i - 1] + i) % modulus for i in range(begin, len(token_ids)))


async def test_a_worker_that_dies(smollm2: str) -> None:
    """With drafts; the tokens are those of an undisturbed run, and what was asked for is kept throughout."""
    prompt = [5, 6, 7, 8] * 8
    kinds = [
        GREEDY.replace(extra_args={"residues": {"modulus": 3}}),
        GREEDY.replace(extra_args={"residues": {"modulus": 2}}, temperature=1.0, seed=3, logprobs=1),
        GREEDY.replace(extra_args={"residues": {"modulus": 5}}, presence_penalty=0.5, n=2),
        GREEDY,
    ]
    async with AsyncLLM(smollm2, speculation="ngram", **settings(smollm2)) as engine:
        first = [await engine.generate(prompt, params) for params in kinds]
        streams = [engine.stream(prompt, params) for params in kinds]
        await asyncio.gather(*(anext(stream) for stream in streams))
        os.kill(engine.describe()["pid"], signal.SIGKILL)
        for stream in streams:
            async for _ in stream:
                pass
        again = [stream.completion for stream in streams]
        for one, other, params in zip(first, again, kinds, strict=True):
            assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in other.choices]
            modulus = params.extra_args.get("residues", {}).get("modulus")
            kept = [is_kept([*prompt, *choice.token_ids], len(prompt), modulus or 3) for choice in one.choices]
            assert all(kept) == (modulus is not None)
        assert engine.statistics().num_restarts == 1
        await settled(engine)


async def test_a_thinking_budget_and_a_grammar(smollm2: str) -> None:
    """Reasoning ends after as many tokens as it may have, in a grammar that goes on after it."""
    async with AsyncLLM(smollm2, **settings(smollm2)) as engine:
        begin, end = engine.tokenizer.encode("<<"), engine.tokenizer.encode(">>#")
        budget = {"thinking_budget": {"tokens": 7, "begin": begin, "end": end}}
        shape = StructuredOutput(regex="[a-z ]{0,400}>>#[0-9]{4}")
        params = SamplingParams(temperature=0.0, max_tokens=64, extra_args=budget, structured_output=shape)
        prompt = [*engine.tokenizer.encode("Think in letters: "), *begin]
        found = await engine.generate(prompt, params)
        thought, mark, answer = found.text.partition(">>#")
        assert mark and len(answer) == 4 and answer.isdecimal() and thought
        assert found.token_ids[7 : 7 + len(end)] == tuple(end)
        free = await engine.generate(prompt, params.replace(extra_args={}))
        assert free.token_ids[:7] == found.token_ids[:7] and len(free.token_ids) > len(found.token_ids)


async def test_what_is_refused(smollm2: str) -> None:
    wrong: list[tuple[Any, str]] = [
        ({"modulus": {}}, "no logits processor of this engine is called: there are residues, thinking_budget"),
        ({"residues": {"modulus": 1}}, "residues.modulus=1 must be from 2 to 1000"),
        ({"residues": {}}, "residues needs modulus"),
    ]
    async with AsyncLLM(smollm2, **settings(smollm2)) as engine:
        for extra_args, message in wrong:
            with pytest.raises(InvalidRequestError, match=message) as caught:
                engine.stream("x", SamplingParams(extra_args=extra_args))
            assert caught.value.param == "extra_args"
        for modulus, message in ((999, "999 is not prime"), (998, "out of luck")):
            with pytest.raises(InvalidRequestError, match=message):
                await engine.generate("x", SamplingParams(extra_args={"residues": {"modulus": modulus}}))
        assert engine.describe()["logits_processors"].keys() == {"residues", "thinking_budget"}
        assert (await engine.generate("x", GREEDY)).token_ids and engine.statistics().num_restarts == 0
    with pytest.raises(ModelLoadError, match="its name is no identifier"):
        await AsyncLLM(smollm2, **settings(smollm2) | {"logits_processors": ["callers_processors:Nameless"]}).start()
