"""Drafts by lookup in the whole engine over the fake executor: fewer steps, never other tokens."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import settled
from searches import every_step_has_a_search  # noqa: F401
from test_recovery import death, essence, no_delay, work

from aengine import AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutput
from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.limits import registry

__all__ = ["no_delay"]  # a fixture

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


def verse(req_idx: int, position: int) -> int:
    """It repeats itself, but for one token in ninety."""
    return 300 + (position % 19 if position % 90 else position % 997)


class Foolish:
    """A proposer that is right, wrong, or returns what is no token, after some calls."""

    def __init__(self, vocab_size: int) -> None:
        self.num_calls = 0

    def begin(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def propose(self, kept: int, new_token_ids: list[int], most: int) -> list[int]:
        self.num_calls += 1
        return [300 + self.num_calls % 19] * min(3, most) if self.num_calls < 60 else [-1]


@pytest.fixture(autouse=True)
def any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are granted whatever steps take on a machine that may be busy."""
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))


@pytest.fixture
def foolish(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an entry point."""
    monkeypatch.setitem(registry.OWN[registry.PROPOSERS], "foolish", f"{__name__}:Foolish")
    return "foolish"


NAMES = ["ngram_worker", "suffix", "suffix_past", "foolish"]


@pytest.mark.slow
@pytest.mark.parametrize("speculation", NAMES)
@pytest.mark.usefixtures("foolish")
async def test_drafts_change_no_output(make_engine: Make, rng: random.Random, speculation: str) -> None:
    """Of requests of every kind (greedy, seeded, n = 2, stop strings, grammars), while workers die."""
    async with make_engine(fake={"token": verse}) as engine:
        expected = [essence(c) for c in await asyncio.gather(*work(engine, 1))]
        assert engine.statistics().num_drafts > 0, "of the forced choice"
    async with make_engine(fake={"token": verse}, speculation=speculation, max_num_seqs=8) as engine:
        assert [essence(c) for c in await asyncio.gather(*work(engine, 1))] == expected
        statistics = engine.statistics()
        assert 0 < statistics.accepted_tokens < statistics.drafted_tokens
        drafts = {each.proposer: each for each in statistics.drafts}
        assert drafts["grammar"].accepted_tokens > 0 and drafts[speculation].num_drafts > 0
        assert statistics.drafted_tokens == sum(each.drafted_tokens for each in statistics.drafts)
        assert statistics.accepted_tokens == sum(sum(each.accepted_by_position) for each in statistics.drafts)
        assert speculation not in ("suffix", "suffix_past") or drafts[speculation].accepted_tokens > 100
    async with make_engine(fake={"token": verse, "delay": 0.0005}, speculation=speculation, max_restarts=100) as engine:
        tasks = work(engine, 1)
        for num_deaths in range(1, 5):
            least = engine.statistics().generated_tokens + rng.randint(10, 50)
            while engine.statistics().generated_tokens < least and not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)  # a loop that spins keeps the threads that fill bitmasks waiting
            engine.executor.fail(death())
            while engine.statistics().num_restarts < num_deaths:
                await asyncio.sleep(0.001)
        assert [essence(c) for c in await asyncio.gather(*tasks)] == expected
        await settled(engine)


@pytest.mark.parametrize("speculation", NAMES[:-1])
async def test_a_text_ends_where_it_ends_without_drafts(make_engine: Make, speculation: str) -> None:
    """At a stop string or a token in the middle of a draft, at a limit, at the end of the context, where a draft has no
    room; prompts are computed in chunks."""
    settings: dict[str, Any] = {"fake": {"token": verse}, "max_num_batched_tokens": 32}
    plain = SamplingParams(max_tokens=100, ignore_eos=True)
    async with make_engine(**settings) as engine:
        text = (await engine.generate([1, 2, 3], plain)).text
        kinds = [plain.replace(stop=[text[place : place + 7]]) for place in range(120, 160, 5)]
        kinds += [plain.replace(stop=[text[130:137]], include_stop_str_in_output=True)]
        kinds += [plain.replace(stop_token_ids=(307,), min_tokens=count) for count in (0, 50, 51, 70)]
        kinds += [plain.replace(max_tokens=count) for count in range(40, 60)]
        work = [([*range(1, 1 + 2 * i)] + [0], kind) for i, kind in enumerate(kinds)]
        work += [([*range(1, 1 + length)], plain.replace(max_tokens=None)) for length in (940, 960)]
        expected = [essence(await engine.generate(*one)) for one in work]
        assert {reason.value for _, _, reason in expected} == {"stop", "length"}
        assert [len(ids) for _, ids, _ in expected[-2:]] == [84, 64]
    async with make_engine(speculation=speculation, max_leased_steps=0, **settings) as engine:
        assert [essence(await engine.generate(*one)) for one in work[::3]] == expected[::3], "alone"
        assert [essence(c) for c in await asyncio.gather(*(engine.generate(*one) for one in work))] == expected
        assert engine.statistics().accepted_tokens > 500 or speculation == "ngram_worker", "the fake one finds none"
        await settled(engine)


async def test_a_text_that_repeats_takes_few_steps(make_engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    how: Any = {"fake": {"token": lambda req_idx, place: 300 + place % 19}, "max_leased_steps": 0}
    async with make_engine(**how) as engine:
        assert engine.describe()["speculation"] == "none" and "speculation=" not in caplog.text
        plain = await engine.generate([1, 2, 3], params)
        assert engine.statistics().num_steps >= 400 and engine.statistics().drafted_tokens == 0
    async with make_engine(speculation="suffix", **how) as engine:
        assert engine.describe()["speculation"] == "suffix" and "speculation=suffix" in caplog.text
        drafted = await engine.generate([1, 2, 3], params)
        statistics = engine.statistics()
        await settled(engine)
    assert drafted.token_ids == plain.token_ids
    assert statistics.num_steps < 100
    assert 300 < statistics.accepted_tokens <= statistics.drafted_tokens < 500
    assert statistics.replicas[0].accepted_tokens == statistics.accepted_tokens


async def test_what_does_not_repeat_takes_as_many_steps(make_engine: Make) -> None:
    async with make_engine(speculation="ngram") as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        assert engine.statistics().drafted_tokens == 0


async def test_a_request_may_refuse_drafts(make_engine: Make) -> None:
    """Of others beside it there are some; what a grammar forces is no guess, and is drafted."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, speculation=False)
    forced = StructuredOutput(choice=["one answer alone"])
    async with make_engine(fake={"token": verse}, speculation="ngram", max_leased_steps=0) as engine:
        await engine.generate([1, 2, 3], params)
        assert engine.statistics().drafted_tokens == 0
        constrained = await engine.generate([1], SamplingParams(speculation=False, structured_output=forced))
        assert constrained.text == "one answer alone" and engine.statistics().accepted_tokens > 0
        plain, drafted = await asyncio.gather(
            *(engine.generate([1, 2, 3], params.replace(speculation=each)) for each in (False, True))
        )
        assert plain.token_ids == drafted.token_ids and engine.statistics().accepted_tokens > 50


async def test_many_streams_draft_nothing(make_engine: Make) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    async with make_engine(fake={"token": verse}, speculation="ngram") as engine:
        await asyncio.gather(*(engine.generate([i, 2, 3], params) for i in range(70)))
        assert engine.statistics().drafted_tokens == 0


def test_an_unknown_speculation_is_refused(make_engine: Make) -> None:
    with pytest.raises(InvalidRequestError, match="'none', 'suffix', 'ngram'"):
        make_engine(speculation="eagle")
