"""Schemas of real life (benchmarks/schemas.jsonl) asked of a real model: what ends is an instance, which only grew."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest_api import settled

from aengine import AsyncLLM, Completion, SamplingParams, StructuredOutput

PATH = Path(__file__).parents[2] / "benchmarks" / "schemas.jsonl"
SCHEMAS: dict[str, Any] = {row["name"]: row["schema"] for row in map(json.loads, PATH.read_text().splitlines())}
# In exact activations: how many answers end within a length hangs on what the model says.
CONFIG: dict[str, Any] = {"dtype": "float16", "max_model_len": 512, "kv_cache_memory_bytes": 256 * 2**20}
ASKED = """
    postal_address support_ticket_triage tool_search tool_send_email tool_create_issue tool_run_shell
    tool_book_restaurant sentiment recipe log_classification comment_tree file_tree shape_union payment_method
    weather_report network_device chat_moderation intent_router chart_spec rag_answer yes_no_reason lead_scoring
""".split()
MAX_TOKENS = 140
STREAMED = ["support_ticket_triage", "comment_tree", "shape_union", "payment_method", "network_device", "intent_router"]


def params(name: str) -> SamplingParams:
    wanted = StructuredOutput(json_schema=SCHEMAS[name])
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=0, structured_output=wanted)


def prompt(name: str) -> str:
    return f"An example of {name.replace('_', ' ')} as JSON:"


def check(name: str, text: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=checker).validate(json.loads(text))


def grown(before: Any, after: Any) -> bool:
    """Whether a snapshot may follow another: at each level the last member may have grown, and more may have come."""
    if type(before) is not type(after) or not isinstance(before, str | list | dict):
        return before == after and type(before) is type(after)
    if isinstance(before, str):
        return after.startswith(before)
    if isinstance(before, dict):
        if list(after)[: len(before)] != list(before):
            return False
        before, after = list(before.values()), list(after.values())
    if len(after) < len(before):
        return False
    *finished, last = before or [None]
    return json.dumps(finished) == json.dumps(after[: len(finished)]) and (
        not before or grown(last, after[len(finished)])
    )


@pytest.mark.parametrize(
    ("before", "after", "may"),
    [
        ({}, {"a": "x"}, True),
        ({"a": "x"}, {"a": "xy", "b": 1}, True),
        ({"a": "x", "b": 1}, {"a": "xy", "b": 1}, False),
        ({"a": [1, {"b": "t"}]}, {"a": [1, {"b": "te", "c": []}]}, True),
        ({"a": [1]}, {"a": [2]}, False),
        ({"a": 1}, {"b": 1, "a": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([1, [2, 3]], [1, [2, 3, 4], 5], True),
        ([1], [True], False),
    ],
)
def test_what_may_follow(before: Any, after: Any, may: bool) -> None:
    assert grown(before, after) is may


async def follow(engine: AsyncLLM, name: str) -> Completion:
    """Through a stream, whose snapshots only grow, up to the value."""
    before, num_changes = None, 0
    async with engine.stream(prompt(name), params(name)) as stream:
        async for _ in stream:
            snapshot = json.loads(json.dumps(stream.partial))
            assert before is None or grown(before, snapshot), (name, before, snapshot)
            num_changes += snapshot != before
            before = snapshot
        completion, last = stream.completion, stream.partial
    assert num_changes > 3 and (before == last or grown(before, last))
    if completion.finish_reason == "stop":
        assert last == json.loads(completion.text)
    return completion


@pytest.mark.slow
@pytest.mark.parametrize("asked", [STREAMED, pytest.param(ASKED, marks=pytest.mark.extended)], ids=["some", "all"])
async def test_every_answer_that_ends_is_an_instance(asked: list[str]) -> None:
    assert len(set(ASKED)) == 22 and set(STREAMED) < set(ASKED)
    async with AsyncLLM("smollm2-135m", **CONFIG) as engine:
        completions = await asyncio.gather(
            *(
                follow(engine, name) if name in STREAMED else engine.generate(prompt(name), params(name))
                for name in asked
            )
        )
        await settled(engine)
    cut_off = []
    for name, completion in zip(asked, completions):
        assert completion.parse_error is None and completion.parsed is None  # no type was given
        if completion.finish_reason == "stop":
            check(name, completion.text)
        else:
            assert completion.finish_reason == "length" and completion.usage.completion_tokens == MAX_TOKENS
            assert completion.text
            with pytest.raises(ValueError):
                json.loads(completion.text)
            cut_off.append(name)
    assert len(cut_off) <= len(asked) // 3, cut_off
