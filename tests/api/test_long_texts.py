"""A text of megabytes holds up nobody, and one that can't fit is refused without being encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import settled

from aengine import AsyncLLM, ContextLengthError, SamplingParams
from aengine.tokenizer.prompt import LONG_TEXT, part_of
from aengine.tokenizer.tokenizer import Tokenizer

Make = Callable[..., AsyncLLM]
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize("own_thread", [False, True])
async def test_a_text_that_can_not_fit_is_not_encoded(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, own_thread: bool, no_thread_left: None
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    text = "The quick brown fox. " * 200_000
    async with make_engine(own_thread=own_thread) as engine:
        for prompt in (text, [{"role": "user", "content": text}]):
            with pytest.raises(ContextLengthError, match=r"at least \d+ tokens.*1024 \(max_model_len\)") as caught:
                await engine.generate(prompt, ONE)
            assert 1024 <= caught.value.num_prompt_tokens <= len(text)
        with pytest.raises(ContextLengthError, match="has 100"):  # counted, where that is a matter of milliseconds
            await engine.generate("The quick brown fox. " * 2000, ONE)
        assert max(encoded) < LONG_TEXT


async def test_a_long_text_holds_up_nobody(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, gate = Tokenizer.encode, threading.Event()

    def slow(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > LONG_TEXT:
            assert gate.wait(60)
            text = text[:100]
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    text = "word " * (LONG_TEXT // 4)
    async with make_engine() as engine:
        prompts = [text, [{"role": "user", "content": text}]]
        long = [asyncio.create_task(engine.generate(prompt, ONE)) for prompt in prompts]
        for _ in range(3):
            await engine.generate("short", ONE)
            await engine.generate([{"role": "user", "content": "short"}], ONE)
        assert not any(task.done() for task in long)
        gate.set()
        for task in long:
            await task
        await settled(engine)


def test_what_is_long() -> None:
    text = "x" * (LONG_TEXT + 1)
    assert part_of(text).is_long and not part_of(text[1:]).is_long
    for content, expected in (
        (text, True),
        (text[1:], False),
        ([{"type": "text", "text": text}], True),
    ):
        assert part_of([{"role": "user", "content": content}]).is_long is expected
    assert part_of([{"role": "user", "content": text[:30_000]}] * 2).is_long
