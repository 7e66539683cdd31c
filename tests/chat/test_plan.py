"""A chat's request and its plan: what is refused at once, the answer's shape, and which tokens tell of a call."""

from __future__ import annotations

import pytest
from chat_harness import EOS, tokenizer
from conftest_api import encoder_of

from aengine import ChatCompletion, FinishReason, SamplingParams, StructuredOutput, Usage
from aengine.chat import ChatChoice, ChatMessage, tools_of
from aengine.engine.chat.plan import ChatPlan, ChatRequest, plan_chat
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import InvalidRequestError

HELLO = {"role": "user", "content": "Hello"}
HERMES = "{{ messages[-1].content }}{% if tools %}<tool_call>{% endif %}"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def planned(*, tools: bool = True, **params) -> ChatPlan:
    known = Tokenizer(
        encoder_of(tokenizer("control tokens")),
        special_tokens={"eos_token": EOS},
        chat_templates={"default": HERMES},
    )
    named = tools_of([{"name": "now"}]) if tools else None
    return plan_chat(known, ChatRequest(messages=[HELLO], tools=named, params=SamplingParams(**params)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"params": SamplingParams(detokenize=False)}, "detokenize must be True"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be"),
        ({"output_type": int, "params": SamplingParams(structured_output=StructuredOutput(regex="a"))}, "not both"),
        ({"on_unsupported": "ignore"}, "on_unsupported"),
    ],
)
def test_what_no_chat_can_have_is_refused_at_once(given, says):
    with pytest.raises(InvalidRequestError, match=says):
        ChatRequest(messages=[HELLO], **given)


def test_a_request_has_lists_of_its_own():
    messages, tools = [HELLO], [{"name": "now"}]
    asked = ChatRequest(messages=messages, tools=tools, parallel_tool_calls=False)
    messages.clear()
    tools.clear()
    assert len(asked.messages) == len(asked.tools) == 1


@pytest.mark.parametrize("on_unsupported", ["error", "relax"])
def test_the_shape_is_relaxed_where_that_is_asked_for(on_unsupported):
    is_relaxed = on_unsupported == "relax"
    assert ChatRequest(messages=[HELLO], on_unsupported=on_unsupported).shape() == (None, None)
    wanted = SamplingParams(structured_output=StructuredOutput(json_schema={"type": "integer"}))
    spec, known = ChatRequest(messages=[HELLO], params=wanted, on_unsupported=on_unsupported).shape()
    assert spec.relax is is_relaxed and spec.text == '{"type":"integer"}' and known is None
    spec, known = ChatRequest(messages=[HELLO], output_type=int, on_unsupported=on_unsupported).shape()
    assert spec.relax is is_relaxed and known.parse("3") == (3, None)


@pytest.mark.parametrize(
    ("text", "tools", "has_call"),
    [
        (CALL + EOS, True, True),
        (CALL, True, False),  # a stop string that begins in its last token
        ("Now: " + CALL + EOS, True, True),
        (CALL, False, False),
        (CALL[:-20], True, False),
        ("Hello" + EOS, True, False),
        ("", True, False),
    ],
)
def test_an_answer_has_a_call_if_one_is_complete(text, tools, has_call):
    plan = planned(tools=tools)
    ids = plan.tokenizer.encode(text, add_special_tokens=False)
    texts = [plan.tokenizer.decode([token_id]) for token_id in ids]  # control tokens are not shown
    assert plan.has_call(texts, ids) is has_call


def test_the_last_token_is_a_marker_unless_a_stop_string_came_before_it():
    end = planned().tokenizer.token_id("</tool_call>")
    eos = planned().tokenizer.token_id(EOS)
    for stop, is_last in (((), False), (("call>",), True), (("x",), False)):
        plan = planned(stop=stop)
        assert plan.marker_of(end, is_stop=False) == end
        assert plan.marker_of(end, is_stop=True) == (end if is_last else None)
        assert plan.marker_of(eos, is_stop=True) == eos
    assert planned(stop_token_ids=(end,)).marker_of(end, is_stop=True) == end


def test_the_message_of_a_completion_is_its_first_choice_s():
    choices = [ChatChoice(i, "", (), FinishReason.STOP, message=ChatMessage(content=str(i))) for i in range(2)]
    assert ChatCompletion("r", tuple(choices), Usage(1, 1)).message.content == "0"
