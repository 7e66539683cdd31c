"""gpt-oss' answers: channels, of which the grammar takes what the model was trained to write, and the parser reads it.

The format is documented in OpenAI's cookbook, "OpenAI Harmony Response Format", and in gpt-oss' chat template.
"""

from __future__ import annotations

import pytest
from chat_harness import EOS, Setting, merged, parse, parse_ids, shape_of, token_id_of, tokenizer
from conftest_api import encoder_of

from aengine.chat import ChatParser, ReasoningFormat, ToolChoice, compose, detect, tools_of
from aengine.engine.chat.formats import HARMONY
from aengine.engine.chat.plan import ChatRequest, plan_chat
from aengine.engine.tokenizer.tokenizer import Tokenizer

THINK = ReasoningFormat(begin="<|channel|>analysis<|message|>", end="<|end|>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
TOOLS = tools_of([{"name": "get_weather", "parameters": SCHEMA}, {"name": "get"}])
ANALYSIS = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
PARIS = '{"city": "Paris"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
CASES = [  # text, content, reasoning, calls
    (f"{ANALYSIS}<|channel|>final<|message|>Hi.", "Hi.", "Look.", []),
    ("<|channel|>final<|message|>Hi.", "Hi.", None, []),
    ("<|channel|>final<|message|>", None, None, []),
    (f"{ANALYSIS}{CALL}", None, "Look.", [("get_weather", PARIS)]),
    (f"{ANALYSIS}{PREAMBLE}{ANALYSIS}{CALL}", "One moment.", "Look.Look.", [("get_weather", PARIS)]),
    (" to=functions.get<|channel|>commentary json<|message|>{}", None, None, [("get", "{}")]),
    (f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}", None, None,
     [("get_weather", PARIS)]),
    (CALL.replace(" <|c", "<|c"), None, None, [("get_weather", PARIS)]),
]  # fmt: skip
MARKERS_ARE = ("control tokens", "text")


def parser_of(known: Tokenizer | None = None, tools=TOOLS) -> ChatParser:
    return ChatParser(HARMONY, THINK, tools, False, token_id_of(known) if known else lambda name: None)


def setting(markers_are: str, choice: str = "auto", **shape) -> Setting:
    spec = compose(
        tools=TOOLS,
        tool_choice=ToolChoice.of(choice, TOOLS),
        parallel=False,
        tool_format=HARMONY,
        reasoning=THINK,
        shape=shape_of(**shape) if shape else None,
        token_id=token_id_of(tokenizer(markers_are)),
    )
    return Setting.of(spec, markers_are)


def said(message):
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.tool_calls]


@pytest.mark.parametrize("markers_are", MARKERS_ARE)
@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CASES)
def test_the_grammar_takes_it_and_it_is_understood(text, content, reasoning, calls, markers_are):
    known = tokenizer(markers_are)
    assert setting(markers_are).accepts(text)
    _, message = parse_ids(parser_of(known), known, known.encode(text, add_special_tokens=False))
    assert said(message) == (content, reasoning, calls)
    assert all(call.is_complete for call in message.tool_calls)


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CASES)
def test_however_it_is_split(text, content, reasoning, calls):
    whole, message = parse(parser_of(), [text])
    assert said(message) == (content, reasoning, calls)
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        deltas, message = parse(parser_of(), pieces)
        assert merged(deltas) == merged(whole) and said(message) == (content, reasoning, calls)


@pytest.mark.parametrize("markers_are", MARKERS_ARE)
def test_what_the_choice_and_the_shape_leave(markers_are):
    call, final = f"{ANALYSIS}{CALL}", f"{ANALYSIS}<|channel|>final<|message|>"
    assert setting(markers_are, "required").accepts(call) and not setting(markers_are, "required").accepts(final + "x")
    assert setting(markers_are, "none").accepts(final + "x") and not setting(markers_are, "none").accepts(call)
    shaped = setting(markers_are, json_schema={"type": "integer"})
    assert shaped.accepts(final + "3") and shaped.accepts(call) and not shaped.accepts(final + "x")
    for wrong in (call.replace("city", "town"), call.replace("get_weather", "got"), "Hi.", CALL[:-1]):
        assert not setting(markers_are).accepts(wrong)


def test_text_without_channels_is_text():
    """No grammar lets it come."""
    assert said(parse(parser_of(tools=()), ["Hello <b>there</b>."])[1]) == ("Hello <b>there</b>.", None, [])
    assert said(parse(parser_of(tools=()), [CALL])[1])[2] == []


TEMPLATE = """{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{- '<|end|>' }}
{%- elif m.tool_calls %}{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def test_a_turn_as_the_template_shows_it():
    known = Tokenizer(
        encoder_of(tokenizer("control tokens")),
        special_tokens={"eos_token": EOS},
        chat_templates={"default": TEMPLATE},
    )
    assert detect(TEMPLATE) == (HARMONY, THINK)
    hello = {"role": "user", "content": "Hello"}
    plan = plan_chat(known, ChatRequest(messages=[hello], tools=TOOLS))
    assert plan.tool_format is HARMONY and plan.reasoning == THINK
    function = {"name": "get_weather", "arguments": PARIS}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    after = plan_chat(known, ChatRequest(messages=[hello, turn, result], tools=TOOLS))
    before, after = (known.decode(p.prompt, skip_special_tokens=False) for p in (plan, after))
    written = after.removeprefix(before).split("<|call|>")[0]
    ids = known.encode(written, add_special_tokens=False)
    _, message = parse_ids(plan.new_parser(), known, ids)
    assert said(message) == (None, None, [("get_weather", PARIS)])


def test_a_final_message_that_goes_on():
    known = Tokenizer(
        encoder_of(tokenizer("control tokens")), special_tokens={"eos_token": EOS}, chat_templates={"default": TEMPLATE}
    )
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Red,"}]
    plan = plan_chat(known, ChatRequest(messages=messages, continue_final_message=True))
    assert said(parse(plan.new_parser(), [" green"])[1]) == (" green", None, [])
