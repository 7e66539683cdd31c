"""Earlier calls and results: as chat templates read them, and as texts for a template that knows none."""

from __future__ import annotations

import json
from enum import Enum

import pytest
from chat_harness import EOS, parse_ids, token_id_of, tokenizer
from conftest_api import encoder_of

from aengine.chat import FORMATS, ChatMessage, ChatParser, ToolCall, tools_of
from aengine.engine.chat.history import with_calls_in_text, with_instructions, with_tools, written_out
from aengine.engine.chat.plan import ChatRequest, plan_chat
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.vocabulary import Vocabulary
from aengine.engine.tokenizer.chat_template import ChatTemplate
from aengine.engine.tokenizer.messages import checked_messages
from aengine.engine.tokenizer.prompt import part_of
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import InvalidRequestError

PARIS = {"city": 'Zürich "HB"', "days": [1, None]}
HELLO = {"role": "user", "content": "Hello"}
TOOLS = tools_of([{"name": "get_weather", "parameters": {"type": "object"}}, {"name": "now"}])


def call(name="get_weather", arguments=PARIS, *, id="abcDEF123", as_text=True):
    arguments = json.dumps(arguments) if as_text else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def result(content="sunny", id="abcDEF123"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def rendered(source, *messages):
    return ChatTemplate(source, {}).render(messages, add_generation_prompt=True, tools=None, extra={})


# -- what templates read

PARIS_TEXT = json.dumps(PARIS, ensure_ascii=False)
ARGUMENTS = "{%- set a = messages[0].tool_calls[0].function.arguments %}"


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ a | tojson }}", PARIS_TEXT),
        ("{{ messages[0].tool_calls[0].function | tojson }}", f'{{"name": "get_weather", "arguments": {PARIS_TEXT}}}'),
        ("{{ a if a is string else a | tojson }}", PARIS_TEXT),
        ("{{ a }}", PARIS_TEXT),
        ("{{ '<' + a + '>' }}", f"<{PARIS_TEXT}>"),
        ("{{ '<' ~ a ~ '>' }}", f"<{PARIS_TEXT}>"),
        ("{% for key, value in a.items() %}{{ key }}={{ value | tojson }};{% endfor %}",
         'city="Zürich \\"HB\\"";days=[1, null];'),
        ("{% for key, value in a | items %}{{ key }} {% endfor %}", "city days "),
        ("{{ a.city }}", 'Zürich "HB"'),
    ],
)  # fmt: skip
def test_arguments_are_a_mapping_or_text_as_the_template_wants(template, expected, as_text):
    assert rendered(ARGUMENTS + template, calling(call(as_text=as_text))) == expected


@pytest.mark.parametrize(
    "arguments, expected", [("", "{}"), ('{"a": 1', '{"a": 1'), ("3", "3"), ("[" * 10**5, "[" * 10**5)]
)
def test_arguments_that_are_no_object_stay_text(arguments, expected):
    broken = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert rendered(ARGUMENTS + "{{ a }}", calling(broken)) == expected
    assert rendered("{{ messages[0].tool_calls[0].arguments }}", calling(broken["function"])) == expected


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ('{"cmd": "ls', '<arguments>{"cmd": "ls'),
        ("[1]", "<arguments>[1]"),
        ("3", "<arguments>3"),
        ("null", "<arguments>null"),
        ([1], "<arguments>[1]"),
        (None, ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("items", ["a | items", "a.items()", "a | dictsort"])
def test_arguments_that_are_no_object_are_one_argument_where_a_template_takes_objects_only(items, arguments, expected):
    template = ARGUMENTS + "{% for k, v in " + items + " %}<{{ k }}>{{ v }}{% endfor %}"
    broken = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert rendered(template, calling(broken)) == expected
    with_none = "{% if messages[0].content is none %}" + template + "{% else %}{{ fail() }}{% endif %}"
    assert rendered(with_none, calling(broken)) == expected
    assert rendered("{{ '' + messages[0].content }}" + template, calling(broken)) == expected


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ 'think' if '</think>' in messages[0].content else 'calls' }}", "calls"),
        ("{{ messages[0].content.split('x')[-1] }}calls", "calls"),
        ("{{ 'calls' if messages[0]['content'] is none else 'text' }}", "calls"),
        ("{{ messages[0].content or 'calls' }}", "calls"),
        ("{{ '' + messages[0].content + 'calls' }}", "calls"),
    ],
)
def test_calls_without_a_text(template, expected, content):
    message = calling(call(), content=content)
    if content == "absent":
        del message["content"]
    assert rendered(template, message) == expected


@pytest.mark.parametrize("calls", [None, [], "absent"])
def test_an_answer_that_says_nothing_is_an_empty_text_without_calls(calls):
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    if calls == "absent":
        del message["tool_calls"]
    template = "{{ messages[0].content | trim }}{{ 'calls' if 'tool_calls' in messages[0] }}."
    assert rendered(template, message) == "."


def test_what_is_not_an_assistants_stays_as_it_is():
    template = "{{ messages[0].tool_calls }} {{ messages[0].content is defined }}"
    assert rendered(template, {"role": "user", "tool_calls": []}) == "[] False"


def test_the_first_refusal_is_told():
    with pytest.raises(InvalidRequestError, match="not so"):
        rendered("{{ raise_exception('not so') }}", calling(call()))


def test_parts_of_a_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert rendered("{{ messages[0].content + '!' }}", {"role": "user", "content": parts}) == "a\nb!"
    assert rendered("{{ messages[0].content }}", {"role": "assistant", "content": []}) == ""


@pytest.mark.parametrize(
    "content",
    [5, {"type": "text", "text": "a"}, ["a"], [{"type": "image_url", "image_url": {}}], [{"type": "text"}], b"a"],
)
def test_content_that_is_no_text_names_the_message(content):
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].content") as caught:
        checked_messages([HELLO, {"role": "user", "content": content}])
    assert caught.value.param == "messages" and "\n" not in str(caught.value)
    assert "'int'" not in str(caught.value)  # of bytes: they are not taken for a list


# -- results in the order of the calls


def order(*messages):
    """Write each message as its calls' ids, in capitals, or its content."""
    shown = []
    for message in checked_messages(list(messages)):
        calls = "".join(str(c.get("id")).upper() for c in message.get("tool_calls") or [])
        shown.append(calls or message["content"])
    return " ".join(shown)


def calls_of(*ids):
    return calling(*(call(id=id) for id in ids))


def results(*ids):
    return [result(f"{id}{i}" if ids.count(id) > 1 else id, id=id) for i, id in enumerate(ids)]


@pytest.mark.parametrize(
    "messages, expected",
    [
        ([calls_of("a", "b", "c"), *results("c", "a", "b")], "ABC a b c"),
        ([calls_of("a", "b", "c"), *results("c", "a")], "ABC a c"),  # one is missing
        ([calls_of("a", "b"), *results("b", "x", "a")], "AB a x b"),  # one is unknown
        ([calls_of("a", "b"), *results("b"), {"role": "tool", "content": "-"}, *results("a")], "AB a - b"),
        ([calls_of("a", "b"), *results("b"), HELLO, *results("a")], "AB a Hello b"),  # said in between
        ([calls_of("a", "b", "a"), *results("a", "a", "b")], "ABA a0 b a1"),  # two calls of one id
        ([calls_of("a", "b"), *results("b", "a", "a")], "AB a1 a2 b"),  # two results of one call
        ([calls_of("a"), calls_of("b"), *results("b", "a")], "A B a b"),  # calls of one turn, in two messages
        ([calls_of("a", "b"), *results("b", "a"), calls_of("b", "a"), *results("a", "b")], "AB a b BA b a"),
        ([calls_of("a"), *results("a"), calls_of("b"), *results("b", "a")], "A a B b a"),  # an earlier call's
        ([*results("b", "a"), calls_of("a", "b")], "b a AB"),
    ],
)
def test_results_come_in_the_order_of_their_calls(messages, expected):
    assert order(*messages) == expected


@pytest.mark.parametrize("calls", [5, "ab", [None], [{"id": []}], [{}], {"id": "a"}])
def test_results_of_what_is_no_call_stay(calls):
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *results("b", "a"), result(id=[])]
    assert checked_messages(messages) == messages


def test_members_of_an_enum_are_their_texts() -> None:
    (user,) = Enum("Role", {"USER": "user"}, type=str)
    (message,) = checked_messages([{"role": user, "content": user}])
    assert [str(value) for value in message.values()] == ["user", "user"]


def test_a_result_of_nothing_is_an_empty_text():
    for given in ({"content": None}, {}):
        (_, nothing) = checked_messages([HELLO, {"role": "tool", "tool_call_id": "c", **given}])
        assert nothing["content"] == ""


def test_each_prompt_has_the_results_in_order():
    asked = [HELLO, calls_of("a", "b"), *results("b", "a")]
    assert [m["content"] for m in ChatRequest(messages=asked).messages[2:]] == ["a", "b"]
    assert [m["content"] for m in part_of(asked).messages[2:]] == ["a", "b"]
    assert asked[2]["content"] == "b"  # the caller's own list stays


# -- a message to go on with


def test_a_message_goes_on_without_what_was_cut_off():
    whole, cut = ToolCall("1", "f", "{}"), ToolCall("2", "g", '{"a', is_complete=False)
    assert ChatMessage("a \n").to_dict() == {"role": "assistant", "content": "a \n"}
    assert ChatMessage("a \n", tool_calls=(cut,)).to_dict() == {"role": "assistant", "content": "a"}
    message = ChatMessage(None, "so", (whole, cut)).to_dict()
    assert message["reasoning_content"] == "so" and message["content"] is None
    assert [c["id"] for c in message["tool_calls"]] == ["1"]


# -- texts for a template that knows no tools


def test_calls_are_written_as_the_model_writes_them():
    for known in FORMATS.values():
        (message,) = written_out([calling(call(), call("now", {}))], known)
        assert "tool_calls" not in message
        assert known.head("get_weather") in message["content"] and known.head("now") in message["content"]
        assert known.arguments.write(PARIS) in message["content"]
        assert message["content"].startswith(known.openings[0]) and message["content"].endswith(known.closing_of(0))
        for arguments, as_text, said in (([1], True, "[1]"), ("[" * 9, False, "[" * 9), ("", False, "{}")):
            (message,) = written_out([calling(call("now", arguments, as_text=as_text))], known)
            assert known.head("now") + (known.arguments.write({}) if said == "{}" else said) in message["content"]
    answer = [calling(call("now", {})), result()]
    assert with_calls_in_text([HELLO, *answer], FORMATS["json"]) == [HELLO, *written_out(answer[:1], known), result()]
    (message,) = written_out([calling(call(as_text=False), call("now"), content="So: ")], FORMATS["json"])
    said = json.loads(message["content"].removeprefix("So: "))
    assert [c["name"] for c in said["tool_calls"]] == ["get_weather", "now"]


def test_calls_after_parts_of_a_text_are_another_part():
    parts = [{"type": "text", "text": "So: "}]
    (message,) = written_out([calling(call(), content=parts)], FORMATS["json"])
    assert message["content"][0] == parts[0] and "get_weather" in message["content"][1]["text"]


def test_results_are_one_message_of_a_user():
    """Many templates refuse two in a row, or other roles."""
    asked = calling(call(), call("now", {}, id="2"))
    messages = [HELLO, asked, result(), result("12:00", id="2"), result("?", id="3"), HELLO, result()]
    roles = [m["role"] for m in written_out(messages, FORMATS["json"])]
    assert roles == ["user", "assistant", "user", "user", "user"]
    said = json.loads(written_out(messages, FORMATS["json"])[2]["content"])
    assert said["tool_results"][:2] == [
        {"name": "get_weather", "content": "sunny"},
        {"name": "now", "content": "12:00"},
    ]
    assert said["tool_results"][2] == {"content": "?"}


def test_where_the_tools_go():
    tools = [{"type": "function", "function": {"name": "é"}}, {"name": "b"}]
    system = {"role": "system", "content": "Be brief.", "tools": '[{"name": "é"}, {"name": "b"}]'}
    assert with_tools([{"role": "system", "content": "Be brief."}, HELLO], "tools", tools) == [system, HELLO]
    assert with_tools([HELLO], "tools", tools) == [{**system, "content": ""}, HELLO]


def test_where_the_instructions_go():
    system = {"role": "system", "content": "Be brief."}
    assert with_instructions([system, HELLO], "I", takes_system=True)[0]["content"] == "Be brief.\n\nI"
    assert with_instructions([HELLO], "I", takes_system=True) == [{"role": "system", "content": "I"}, HELLO]
    assert with_instructions([HELLO], "I", takes_system=False) == [{"role": "user", "content": "I\n\nHello"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    assert with_instructions([parts], "I", takes_system=False) == [{"role": "user", "content": "I"}, parts]
    assert with_instructions([system, HELLO], "I", takes_system=False)[1]["content"] == "I\n\nHello"


# -- whole conversations, through templates of every kind

_TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }};{% elif m.role == 'tool' %}T:{{ m.content }};"
)
_REST = "{% else %}A:{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
_LLAMA = "{# <|start_header_id|> #}{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
_LLAMA += '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
_MISTRAL = '{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}'


# As the model cards' chat_template files write them; keys as Qwen/Qwen3-Coder-30B-A3B-Instruct, zai-org/GLM-4.6 and
# GLM-4.7, MiniMaxAI/MiniMax-M2, deepseek-ai/DeepSeek-V3-0324 and V3.1, ibm-granite/granite-3.3-8b-instruct,
# microsoft/Phi-4-mini-instruct, ByteDance-Seed/Seed-OSS-36B-Instruct.
_CODER = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v | tojson | safe if v is mapping else v | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


def template(call, before="", between="", after=""):
    calls = "{% for c in m.tool_calls %}{% set f = c.function %}" + call
    calls += "{{ '" + between + "' if not loop.last }}{% endfor %}"
    return _TURNS + "{% elif m.tool_calls %}A:" + before + calls + after + ";" + _REST


# As those of LiquidAI/LFM2.5-8B-A1B, allenai/Olmo-3-7B-Instruct, google/gemma-4, moonshotai/Kimi-K2 and
# CohereForAI/c4ai-command-r7b-12-2024 write them; LFM2_JSON as llama.cpp's template for LFM2.
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ VALUE }}{{ ', ' if not loop.last }}{% endfor %})"
)
_GEMMA = """{%- macro written(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ '{' }}
{%- for k, m in v | dictsort %}{{ k }}:{{ written(m) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is sequence %}[{% for m in v %}{{ written(m) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}
{%- endif %}{% endmacro -%}"""

TEMPLATES = {
    "hermes": template(
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', between="\\n"
    ),
    "llama3": template(_LLAMA),
    "mistral": template(_MISTRAL, before="[TOOL_CALLS] [", between=", ", after="]"),
    "mistral_tekken": template(_MISTRAL, before="[TOOL_CALLS][", between=", ", after="]"),
    "qwen3_coder": template(_CODER, between="\\n"),
    "seed_oss": template(
        _CODER.replace("tool_call>", "seed:tool_call>").replace("}}>\n{{ v", "}}>{{ v").replace("\n</param", "</param")
    ),
    "glm": template(
        "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
        between="\\n",
    ),
    "glm_inline": template(
        "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
    ),
    "minimax": template(
        '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n",
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
    "deepseek_v3": template(
        "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```"
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="\\n",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": template(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "granite": "{# <|start_of_role|> #}"
    + template("{{ f | tojson }}", before="<|tool_call|>[", between=", ", after="]"),
    "phi4": "{% for m in messages if m.role == 'system' and 'tools' in m %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}"
    "{# message['tools'] #}{% endfor %}" + _TURNS + _REST,
    "mistral_args": template("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"),
    "llama_pythonic": "{# [func_name1( #}" + template(_PYTHON.replace("VALUE", "v | tojson"), "[", ", ", "]"),
    "lfm2": template(
        _PYTHON.replace("VALUE", """"'" + v + "'" if v is string else v | string"""),
        "{{ '<|tool_call_start|>[' }}",
        ", ",
        "]<|tool_call_end|>",
    ),
    "lfm2_json": template(
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
        "{{ '<|tool_call_start|>[' }}",
        ", ",
        "]<|tool_call_end|>",
    ),
    "olmo3": template(_PYTHON.replace("VALUE", "v | tojson"), "<function_calls>", "\\n", "</function_calls>"),
    "gemma4": _GEMMA
    + template(
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}{{ k }}:{{ written(v) }}"
        "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
    ),
    "kimi_k2": template(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "cohere": template(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        "<|START_ACTION|>[{{ '\\n    ' }}",
        ",\\n    ",
        "{{ '\\n' }}]<|END_ACTION|>",
    ),
    "json": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + _TURNS + _REST,
}


@pytest.mark.parametrize("markers_are", ["control tokens", "text"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_as_the_template_shows_it_is_a_completion(name, markers_are):
    """What a model of the family has learnt to write: its grammar takes it, and the same calls come out."""
    known = Tokenizer(
        encoder_of(tokenizer(markers_are)),
        special_tokens={"eos_token": EOS},
        chat_templates={"default": TEMPLATES[name]},
    )
    calls = [call(), call("now", {}, id="ghiJKL456")][: 1 if name == "llama3" else 2]
    plan = plan_chat(known, ChatRequest(messages=[HELLO], tools=TOOLS))
    assert plan.tool_format.name == name
    after = plan_chat(known, ChatRequest(messages=[HELLO, calling(*calls), result()], tools=TOOLS))
    before, after = (known.decode(p.prompt, skip_special_tokens=False) for p in (plan, after))
    assert after.startswith(before)
    turn = after.removeprefix(before).split(";T:" if plan.tool_format.shows_calls else ";U:")[0]

    ids = known.encode(turn, add_special_tokens=False)
    matcher = load_backend("llguidance", Vocabulary.of(known, known.vocab_size)).compile(plan.spec).matcher()
    assert matcher.accept(ids) == len(ids) and matcher.is_accepting, turn
    parser = ChatParser(plan.tool_format, plan.reasoning, plan.tools, False, token_id_of(known))
    _, message = parse_ids(parser, known, ids)
    expected = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    assert [(c.name, c.parsed_arguments()) for c in message.tool_calls] == expected and message.content is None
    again = plan_chat(
        known, ChatRequest(messages=[HELLO, message.to_dict(), result(id=message.tool_calls[0].id)], tools=TOOLS)
    )
    shown = known.decode(again.prompt, skip_special_tokens=False)
    assert len(shown) == len(after) and "Zürich" in shown


@pytest.mark.parametrize("name", FORMATS)
def test_faults_name_the_message_as_the_caller_counts(name):
    """Also where instructions come before it."""
    known = Tokenizer(encoder_of(tokenizer("text")), chat_templates={"default": TEMPLATES[name]})
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        plan_chat(known, ChatRequest(messages=[HELLO, {"content": "x"}], tools=TOOLS))
    if not FORMATS[name].shows_calls:
        with pytest.raises(InvalidRequestError, match=r"messages\[1\] must be as OpenAI"):
            plan_chat(known, ChatRequest(messages=[HELLO, {"role": "assistant", "tool_calls": [3]}], tools=TOOLS))


@pytest.mark.parametrize("arguments", ['{"a": ', "3", ""])
@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_goes_on_after_a_call_that_was_cut_off(name, arguments):
    known = Tokenizer(encoder_of(tokenizer("text")), chat_templates={"default": TEMPLATES[name]})
    broken = {"id": "abcDEF123", "type": "function", "function": {"name": "now", "arguments": arguments}}
    plan = plan_chat(known, ChatRequest(messages=[HELLO, calling(broken), result(), HELLO], tools=TOOLS))
    shown = known.decode(plan.prompt, skip_special_tokens=False)
    assert "now" in shown and "sunny" in shown and (arguments in shown or json.dumps(arguments)[1:-1] in shown)
