"""Whatever a grammar allows is understood: random completions out of each kind of grammar, parsed."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from chat_harness import MARKERS_ARE, Setting, is_valid, merged, parse_ids, shape_of, token_id_of, tokenizer
from pairs import pairwise, some

from aengine.chat import FORMATS, ChatParser, ReasoningFormat, Tool, ToolChoice, compose, tools_of
from aengine.engine.chat.formats import ID, LLAMA3

TOOLS = tools_of(
    [
        {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "at": {"$ref": "#/$defs/Day"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"Day": {"enum": ["mon", "tue"]}},
            },
        },
        {"name": "get", "parameters": None},
        Tool("log.it-now", parameters={"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                                       "additionalProperties": False}),
    ]
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "<tool_call>", "</think>", "[TOOL_CALLS] ["]}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
PATTERN = r'[a-z<{"\[\n ]{1,12}'
OPTIONS = ["yes", "no", "<tool_call>", '{"name": "x"}', "[TOOL_CALLS] [", "<think>"]
SHAPES = {
    "no shape": None,
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": PATTERN},
    "choice": {"choice": OPTIONS},
}
CHOICES = ("none", "auto", "required", "get_weather")
TWINS = ("mistral_tekken", "seed_oss", "deepseek_v31", "granite", "phi4", "lfm2_json")
"""Formats that differ from another in the letters of their marks only; fewer walks go through them."""
REASONING = {"no reasoning": None, "reasoning": ReasoningFormat(), "begun": ReasoningFormat(begun=True)}


def _goals(tool_format) -> list[str]:
    heads = [opening + head for opening in tool_format.openings for t in TOOLS for head in tool_format.heads(t.name)]
    heads = [head.partition(ID)[0] for head in heads]
    ends = [end.partition(ID)[0] for end in tool_format.ends if end]
    again = [tool_format.separator + tool_format.head("get")] * 2
    return [*heads, *ends, *again, *tool_format.triggers, "<think>", "</think>", "</think>\n\n", " ", "\n"]


def _setting(tool_format, choice, wanted, reasoning, markers_are="text", *, parallel=True):
    token_id = token_id_of(tokenizer(markers_are))
    spec = compose(
        tools=TOOLS,
        tool_choice=ToolChoice.of(choice, TOOLS),
        parallel=parallel,
        tool_format=tool_format,
        reasoning=reasoning,
        shape=shape_of(**wanted) if wanted else None,
        token_id=token_id,
    )
    chosen = ToolChoice.of(choice, TOOLS).allowed(TOOLS)

    def parser() -> ChatParser:
        return ChatParser(tool_format, reasoning, chosen, wanted is not None, token_id)

    return Setting.of(spec, markers_are), parser


@pytest.mark.parametrize(
    ("name", "choice", "shape", "reasoning", "markers_are"),
    pairwise([name for name in FORMATS if name not in TWINS], CHOICES, list(SHAPES), list(REASONING), MARKERS_ARE),
)
def test_what_is_allowed_is_understood(name, choice, shape, reasoning, markers_are, rng):
    tool_format = FORMATS[name]
    setting, new_parser = _setting(tool_format, choice, SHAPES[shape], REASONING[reasoning], markers_are)
    ended = tried = 0
    while ended < 2:  # free text is long at times: most walks end within their tokens, not each
        tried += 1
        assert tried < 100, "no walk ends"
        walked = setting.walk(rng, _goals(tool_format))
        if walked is None:
            continue
        ended += 1
        _, message = parse_ids(new_parser(), setting.tokenizer, walked)
        _check(message, choice, shape, setting.shown(walked))


def _check(message, choice, shape, shown) -> None:
    for call in message.tool_calls:
        assert call.is_complete, shown
        assert is_valid(json.loads(call.arguments), BY_NAME[call.name].parameters), shown
    names = [call.name for call in message.tool_calls]
    if choice == "none":
        assert not names, shown
    if choice == "required":
        assert names, shown
    if choice == "get_weather":
        assert names == [choice], shown
    if choice in ("required", "get_weather"):
        assert message.content is None, shown
    if shape != "no shape" and names:
        assert message.content is None, shown
    elif choice in ("none", "auto") and shape == "schema":
        assert is_valid(json.loads(message.content), SCHEMA), shown
    elif choice in ("none", "auto") and shape == "regex":  # blanks before an answer may be those after reasoning
        assert message.content is None or re.fullmatch(PATTERN, message.content), shown
    elif choice in ("none", "auto") and shape == "choice":
        assert message.content in OPTIONS, shown


@pytest.mark.parametrize(
    ("name", "shape"), some(itertools.product(FORMATS, SHAPES), *zip(FORMATS, itertools.cycle(SHAPES)))
)
def test_calls_do_come_up_in_walks(name, shape, rng):
    """Else the test above would say little of "auto"."""
    setting, new_parser = _setting(FORMATS[name], "auto", SHAPES[shape], None)
    calls = texts = several = 0
    for _ in range(2000):  # two calls come up in every sixtieth walk, where they do so least often
        if calls and texts and several:
            break
        if (walked := setting.walk(rng, _goals(FORMATS[name]))) is not None:
            _, message = parse_ids(new_parser(), setting.tokenizer, walked)
            calls += bool(message.tool_calls)
            several += len(message.tool_calls) > 1
            texts += message.content is not None
    assert calls and texts and several


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_calls_there_is_one_at_most(name, rng):
    for wanted in SHAPES.values():
        setting, new_parser = _setting(FORMATS[name], "auto", wanted, None, parallel=False)
        for _ in range(10):
            if (walked := setting.walk(rng, _goals(FORMATS[name]))) is not None:
                assert len(parse_ids(new_parser(), setting.tokenizer, walked)[1].tool_calls) <= 1


@pytest.mark.parametrize("name", FORMATS)
def test_any_prefix_of_a_completion_gives_no_call_that_is_not_whole(name, rng):
    setting, new_parser = _setting(FORMATS[name], "required", None, ReasoningFormat(), "control tokens")
    walked = None
    while walked is None:
        walked = setting.walk(rng, _goals(FORMATS[name]))
    whole, _ = parse_ids(new_parser(), setting.tokenizer, walked)
    for length in range(len(walked)):
        deltas, message = parse_ids(new_parser(), setting.tokenizer, walked[:length])
        for call in message.tool_calls[:-1]:
            assert call.is_complete
        for call in message.tool_calls:
            if call.is_complete:
                assert is_valid(json.loads(call.arguments), BY_NAME[call.name].parameters)
        ended = sum(type(delta).__name__ == "ToolCallEnd" for delta in deltas)
        assert ended == sum(call.is_complete for call in message.tool_calls)
    assert merged(whole)


def test_two_triggers_where_one_is_a_token():
    setting, _ = _setting(LLAMA3, "auto", None, None, "control tokens")
    call = '{"name": "get", "parameters": {}}'
    assert setting.accepts(call) and setting.accepts("<|python_tag|>" + call)
    assert not setting.accepts("<|python_tag|>" + "text") and setting.accepts('{"name": 1}')


def test_walks_are_reproducible():
    setting, _ = _setting(FORMATS["hermes"], "auto", None, None)
    assert setting.walk(random.Random(7), ["<tool_call>"]) == setting.walk(random.Random(7), ["<tool_call>"])
