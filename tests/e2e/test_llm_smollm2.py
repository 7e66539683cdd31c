"""`LLM`, and an engine in a thread of its own, with a real model in a real worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import psutil
import pytest

from aengine import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0)
SETTINGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 * 2**20, "preload_grammars": False}


def test_a_synchronous_program() -> None:
    with LLM("smollm2-135m", **SETTINGS) as llm:
        worker = llm.describe()["pid"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in llm.chat(question, GREEDY).message.content
        text = "".join(token.text for token in llm.stream("1 2 3 4 5", GREEDY))
        prompts = ["The capital of France is", "1 2 3 4 5", question]
        told: list[int] = []
        completions = llm.generate(prompts, GREEDY, progress=lambda done, num: told.append(done))
        assert "Paris" in completions[0].text and "Paris" in completions[2].text
        assert completions[1].text == text and told == [0, 1, 2, 3]
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Tell a long story."] * 8, SamplingParams(max_tokens=900, ignore_eos=True))
        assert llm.generate("1 2 3 4 5", GREEDY).text == text
        assert llm.statistics().num_aborted == 8 and llm.statistics().num_free_blocks == llm.statistics().num_blocks
    assert not psutil.pid_exists(worker)


async def test_a_host_that_blocks_its_loop(short_model: str) -> None:
    async with AsyncLLM(short_model, own_thread=True, **SETTINGS) as engine:
        expected = await engine.generate("1 2 3 4 5", GREEDY)
        stream = engine.stream("1 2 3 4 5", SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
        await anext(stream)
        before = engine.statistics().generated_tokens
        time.sleep(0.5)  # as a host should not
        assert engine.statistics().generated_tokens > before + 2
        in_a_thread = await asyncio.to_thread(lambda: asyncio.run(engine.generate("1 2 3 4 5", GREEDY)))
        assert in_a_thread.token_ids == expected.token_ids
        await stream.aclose()
