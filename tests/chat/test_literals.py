"""Arguments as literals: what chat templates render is taken and read back, and schemas hold for them."""

from __future__ import annotations

import json

import pytest
from chat_harness import MARKERS_ARE, Setting, parse, parse_ids, token_id_of, tokenizer

from aengine.chat import FORMATS, ChatParser, ToolChoice, compose, tools_of
from aengine.engine.chat.syntax.literal_text import literal_of
from aengine.engine.chat.syntax.schemas import count_of
from aengine.engine.tokenizer.chat_template import ChatTemplate
from aengine.errors import GrammarError

CALLS = "{%- set calls = messages[0].tool_calls %}"
LITERAL_MACRO = """{%- macro literal(value) -%}
{%- if value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}{%- raw -%}{{%- endraw -%}
  {%- for key, member in value | dictsort -%}{{ key }}:{{ literal(member) }}{{ ',' if not loop.last }}{%- endfor -%}}
{%- elif value is sequence -%}[{%- for item in value -%}{{ literal(item) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro %}"""
LITERAL_MACRO = LITERAL_MACRO.replace("{%- raw -%}{{%- endraw -%}", "{{ '{' }}").replace(
    "{%- endfor -%}}\n", "{%- endfor -%}{{ '}' }}\n"
)
TEMPLATES = {
    "lfm2": """<|tool_call_start|>[{%- for call in calls -%}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() -%}{{ key }}=
{%- if value is string -%}{{ "'" + value + "'" }}{%- elif value is mapping -%}{{ value | tojson }}
{%- else -%}{{ value | string }}{%- endif -%}{{ ', ' if not loop.last }}{%- endfor -%})
{{- ', ' if not loop.last }}{%- endfor -%}]<|tool_call_end|>""",
    "olmo3": """<function_calls>{%- for call in calls -%}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() -%}{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}
{%- endfor -%}){{- '\n' if not loop.last }}{%- endfor -%}</function_calls>""",
    "gemma4": LITERAL_MACRO + """{%- for call in calls -%}<|tool_call>call:{{ call.function.name }}{{ '{' }}
{%- for key, value in call.function.arguments | dictsort -%}{{ key }}:{{ literal(value) }}{{ ',' if not loop.last }}
{%- endfor -%}{{ '}' }}<tool_call|>{%- endfor -%}""",
}  # fmt: skip
"""Render calls as the templates of these families do, each in its own way: quotes, None, keys."""

OBJECT = {
    "type": "object",
    "properties": {
        "at": {"type": ["string", "null"]},
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "exact": {"type": "boolean"},
        "filter": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}}},
            "required": ["lat"],
        },
        "size": {"type": "integer", "minimum": 1, "maximum": 50},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = tools_of([
    {"name": "get_weather", "parameters": OBJECT},
    {"name": "now"},
    {"name": "store", "parameters": {"type": "object", "properties": {"data": {}}, "required": ["data"]}},
])  # fmt: skip
CALLED = (
    (("get_weather", {"city": "Zürich, (HB) [1] {2}"}),),
    (("get_weather", {"at": None, "city": "", "days": [], "exact": True}), ("now", {})),
    (("get_weather", {"at": "noon", "city": "x = y", "days": [1, -2, 30], "exact": False}),),
    (("get_weather", {"city": "a", "filter": {"lat": -1.5, "names": ["b", "c d"]}, "size": 50, "unit": "F"}),),
    (("store", {"data": {"a": [1, {"b": "c"}], "d": 1.5}}), ("store", {"data": "text"}), ("store", {"data": 3})),
)


def _setting(name, markers_are, tools=TOOLS, mode="required", **options):
    token_id = token_id_of(tokenizer(markers_are))
    spec = compose(
        tools=tools,
        tool_choice=ToolChoice(mode),
        parallel=True,
        tool_format=FORMATS[name],
        reasoning=None,
        shape=None,
        token_id=token_id,
        **options,
    )
    return Setting.of(spec, markers_are)


def _rendered(name, calls):
    tool_calls = [{"type": "function", "function": {"name": tool, "arguments": args}} for tool, args in calls]
    message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    template = ChatTemplate(CALLS + TEMPLATES[name], {})
    return str(template.render([message], add_generation_prompt=False, tools=None, extra={}))


@pytest.mark.parametrize("markers_are", MARKERS_ARE)
@pytest.mark.parametrize("calls", CALLED)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_is_taken_and_read_back(name, calls, markers_are):
    text = _rendered(name, calls)
    known = tokenizer(markers_are)
    assert _setting(name, markers_are).accepts(text), text
    parser = ChatParser(FORMATS[name], None, TOOLS, False, token_id_of(known))
    _, message = parse_ids(parser, known, known.encode(text, add_special_tokens=False))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == list(calls)
    assert message.content is None


@pytest.mark.parametrize("calls", CALLED)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_calls_are_read_however_they_are_split(name, calls):
    text = _rendered(name, calls)
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        parser = ChatParser(FORMATS[name], None, TOOLS, False, lambda name: None)
        _, message = parse(parser, pieces)
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == list(calls), pieces
        assert all(call.is_complete for call in message.tool_calls) and message.content is None


@pytest.mark.parametrize("name", ["llama_pythonic", "gemma4"])
@pytest.mark.parametrize(
    "schema, right, wrong",
    [
        ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd", 1, None]),
        ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["", "abd"]),
        ({"type": "integer", "minimum": 2}, [2, 100], [1, 2.5, "2"]),
        ({"type": "number"}, [-1.5, 1e-7], ["1", True]),
        ({"enum": ["a", 1, None, True]}, ["a", 1, None, True], ["b", 2, False]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [1, "b"], [None, [1]]),
        ({"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                    {"type": "array", "items": {"enum": ["q"]}}]}, [{"a": None}, [], ["q"]], [{"b": 1}, ["r"], "q"]),
        ({"type": "array", "items": {"enum": ["a", "ab"]}, "minItems": 1, "maxItems": 2}, [["a"], ["ab", "a"]],
         [[], ["b"], ["a", "a", "a"]]),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}, "required": ["b"]},
         [{"a": None, "b": True}, {"b": False}], [{}, {"a": None}, {"b": 1}, {"b": True, "c": 1}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "y"}]),
        ({"$ref": "#/$defs/day"}, ["mon"], ["sun"]),
    ],
)  # fmt: skip
def test_schemas_hold(name, schema, right, wrong):
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "v": schema, "z": {"type": "integer"}},
        "required": ["v"],
        "$defs": {"day": {"enum": ["mon", "tue"]}},
    }
    tools = tools_of([{"name": "f", "parameters": parameters}])
    setting, known = _setting(name, "text", tools), FORMATS[name]

    def written(**arguments):
        return (
            known.openings[0]
            + known.head("f")
            + known.arguments.write(arguments)
            + known.after_arguments
            + known.closing_of(0)
        )

    for value in right:
        for arguments in ({"v": value}, {"x": 1, "v": value}, {"v": value, "z": 2}, {"x": 1, "v": value, "z": 2}):
            assert setting.accepts(written(**arguments)), arguments
            _, message = parse(ChatParser(known, None, tools, False, lambda name: None), [written(**arguments)])
            assert json.loads(message.tool_calls[0].arguments) == arguments
    for value in wrong:
        assert not setting.accepts(written(v=value)), value
    assert not setting.accepts(written(x=1)) and not setting.accepts(written(z=1, v=right[0]))


TREE = {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}, "required": ["t"], "$defs": {"tree": {
    "type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}}}  # fmt: skip


def test_a_schema_that_refers_to_itself_is_written_as_json_or_refused():
    tools = tools_of([{"name": "f", "parameters": TREE}])
    setting = _setting("lfm2", "text", tools)
    assert setting.accepts('<|tool_call_start|>[f(t={"left":{"left":{}}})]<|tool_call_end|>'.replace('":{', '": {'))
    assert not setting.accepts('<|tool_call_start|>[f(t={"right": {}})]<|tool_call_end|>')
    with pytest.raises(GrammarError, match="'t' of the tool 'f': a schema that refers to itself.*relax"):
        _setting("gemma4", "text", tools)
    relaxed = _setting("gemma4", "text", tools, relax=True)
    assert relaxed.accepts("<|tool_call>call:f{t:{left:{left:{}}}}<tool_call|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_that_is_not_strict_takes_any_arguments(name):
    tools = tools_of([{"name": "f", "parameters": OBJECT, "strict": False}])
    known = FORMATS[name]
    text = known.arguments.write({"a": [1, {"b": None}], "c": "d"})
    whole = known.openings[0] + known.head("f") + text + known.after_arguments + known.closing_of(0)
    assert _setting(name, "control tokens", tools).accepts(whole)


@pytest.mark.parametrize(
    "text, value",
    [
        (r"'it\'s'", "it's"),
        (r'"\u00e9\ud83d\ude00\x41\n\d"', "é😀A\n\\d"),
        (" ( 1 , 2, ) ", [1, 2]),
        ("{'a': None, \"b\": true,}", {"a": None, "b": True}),
        ("-1.5e3", -1500.0),
        ("[]", []),
    ],
)
def test_literals_of_python_and_json(text, value):
    assert literal_of(text, ("'", '"')) == value


@pytest.mark.parametrize("text", ["", "'a", "[1 2]", "{'a' 1}", "name", "1 2", "nan", "Infinity", "[1", "{1", "(,)"])
def test_what_is_no_literal(text):
    with pytest.raises(ValueError):
        literal_of(text, ("'", '"'))


@pytest.mark.parametrize("text", ["f(x)", "f(a=1, a=2)", "f(=1)", "f(a=b)", "f(a=1,,)", "f(,)"])
def test_a_call_that_is_none_is_not_complete(text):
    parser = ChatParser(FORMATS["lfm2"], None, tools_of([{"name": "f"}]), False, lambda name: None)
    _, message = parse(parser, [f"<|tool_call_start|>[{text}]<|tool_call_end|>"])
    assert [call.is_complete for call in message.tool_calls] == [False]


@pytest.mark.parametrize(("given", "number"), [(0, 0), (3, 3), (3.0, 3), (None, None)])
def test_counts_are_whole_numbers_from_0_on(given, number):
    assert count_of({"minItems": given}, "minItems") == number == count_of({"minItems": number}, "minItems")
    for wrong in (-1, 0.5, True, "3"):
        with pytest.raises(GrammarError, match="at least 0"):
            count_of({"minItems": wrong}, "minItems")
