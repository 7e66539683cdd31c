"""Hundreds of choices of one long prompt: what they share is made once, and they begin a few a step."""

from __future__ import annotations

from typing import Any

import pytest

from aengine import SamplingParams
from aengine.engine.scheduler import planning, request
from aengine.engine.scheduler.planning import StepPlan
from aengine.testing import FakeAsyncLLM

PROMPT = [97] * 100


async def test_a_long_prompt_is_packed_once_and_begun_a_few_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    begun: list[list[int]] = []
    int32, admit = request.int32, StepPlan.admit

    def noted_int32(values: Any = ()) -> Any:
        packed.append(len(values))
        return int32(values)

    def noted_admit(plan: StepPlan, *args: Any, **options: Any) -> None:
        admit(plan, *args, **options)
        begun.append([len(one.token_ids) for one in plan._new_requests])

    monkeypatch.setattr(request, "int32", noted_int32)
    monkeypatch.setattr(StepPlan, "admit", noted_admit)
    monkeypatch.setattr(planning, "_MOST_KNOWN_TOKENS", 250)
    async with FakeAsyncLLM("abc") as engine:
        completion = await engine.generate(PROMPT, SamplingParams(n=9))
    assert [choice.text for choice in completion.choices] == ["abc"] * 9
    assert sum(map(len, begun)) == 9 and max(map(len, begun)) == 2
    assert packed.count(len(PROMPT)) == 1


async def test_one_longer_than_the_bound_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_MOST_KNOWN_TOKENS", 10)
    async with FakeAsyncLLM("abc") as engine:
        assert (await engine.generate(PROMPT, SamplingParams(n=2))).choices[1].text == "abc"
