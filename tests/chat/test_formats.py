"""Texts as each family of models writes them: its grammar takes them, and they are parsed as a reader would."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from chat_harness import MARKERS_ARE, Setting, merged, parse, parse_ids, shape_of, token_id_of, tokenizer

from aengine.chat import FORMATS, ChatParser, ReasoningFormat, ToolChoice, ToolFormat, compose, detect, tools_of
from aengine.engine.chat.formats import (
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM,
    GLM_INLINE,
    GRANITE,
    HERMES,
    JSON,
    KIMI_K2,
    LFM2,
    LFM2_JSON,
    LLAMA3,
    LLAMA_PYTHONIC,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_TEKKEN,
    OLMO3,
    PHI4,
    QWEN3_CODER,
    SEED_OSS,
    markers_of,
)

ANY_OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = tools_of([{"name": "get_weather", "parameters": ANY_OBJECT}, {"name": "now"}])
PARIS, ROME = '{"city": "Paris"}', '{"city": "}]</tool_call>\\"; {"}'
THINK, BEGUN = ReasoningFormat(), ReasoningFormat(begun=True)
ANSWER = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@dataclass(frozen=True)
class Case:
    tool_format: ToolFormat
    text: str
    content: str | None = None
    calls: tuple = ()
    reasoning: str | None = None
    think: ReasoningFormat | None = None
    schema: dict | None = None

    @property
    def spells_markers(self) -> bool:
        """Whether a marker stands where it is none: inside a string, or inside text or reasoning."""
        return any(spelled in self.text for spelled in (ROME, '"<', '"[', "no <tool_call>", "<think>Yes", TRICKY))


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE, TWO = (("get_weather", PARIS),), (("get_weather", ROME), ("now", "{}"))
WEATHER, NOW = f'{{"name": "get_weather", "arguments": {PARIS}}}', '{"name": "now", "arguments": {}}'
WITH_ID = WEATHER[:-1] + ', "id": "abcDEF123"}'
ROMAN = f'{{"name": "get_weather", "arguments": {ROME}}}'
LLAMA_ONE = f'{{"name": "get_weather", "parameters": {PARIS}}}'
LLAMA_TWO = f'{{"name": "get_weather", "parameters": {ROME}}}; {{"name": "now", "parameters": {{}}}}'
TRICKY = 'a\n</parameter> "b" \\ {</function>\n</tool_call> '


def coder(name, **arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(name, **arguments):
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


GEMMA_THOUGHT = ReasoningFormat(begin="<|channel>thought\n", end="<channel|>", markers=("<|channel>",))
COHERE_THOUGHT = ReasoningFormat(begin="<|START_THINKING|>", end="<|END_THINKING|>")
MARKED = """<|tool_call>call:get_weather{city:<|"|>it's "Paris" \\ {<|"|>}<tool_call|>"""
QUOTED = r"""[get_weather(city='it\'s "Paris", \n{)'), now()]"""
ITS = json.dumps({"city": 'it\'s "Paris", \n{)'})


def kimi(*calls):
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for i, name, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def cohere(*calls, blank="\n    ", last="\n"):
    written = f",{blank}".join(
        f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {arguments}}}' for i, name, arguments in calls
    )
    return f"<|START_ACTION|>[{blank}{written}{last}]<|END_ACTION|>"


CASES = [
    Case(HERMES, "Hello <tool_", "Hello <tool_"),
    Case(HERMES, "", None),
    Case(HERMES, " \n", " \n"),
    Case(HERMES, hermes(*ONE[0]), calls=ONE),
    Case(HERMES, f"Let me see.\n{hermes(*ONE[0])}", "Let me see.\n", ONE),
    Case(HERMES, f"\n{hermes(*TWO[0])}\n{hermes(*TWO[1])}\n", None, TWO),
    Case(HERMES, f"{hermes(*TWO[0])} and{hermes(*TWO[1])} so.", " and so.", TWO),
    Case(HERMES, f"<think>\nHm </think\n</think>\n\n{hermes(*ONE[0])}", None, ONE, "Hm </think", THINK),
    Case(HERMES, f"<think>no <tool_call>\n</think>Yes.{hermes(*ONE[0])}", "Yes.", ONE, "no <tool_call>", THINK),
    Case(HERMES, "<think>\n\n</think>\n\nYes.", "Yes.", (), None, THINK),
    Case(HERMES, "<think></think>", None, (), None, THINK),
    Case(HERMES, "<thin", "<thin", (), None, THINK),
    Case(HERMES, "so\n</think>\n\n<think>Yes.", "<think>Yes.", (), "so", BEGUN),
    Case(HERMES, f"so</think>{hermes(*TWO[0])}\n{hermes(*TWO[1])}", None, TWO, "so", BEGUN, ANSWER),
    Case(HERMES, '{"name": "<tool_call>\\n"}', '{"name": "<tool_call>\\n"}', schema=ANSWER),
    Case(HERMES, 'so</think>\n\n{"name": ""}', '{"name": ""}', (), "so", BEGUN, ANSWER),
    Case(HERMES, '<think>so</think>\n\n{"name": ""}', '{"name": ""}', (), "so", THINK, ANSWER),
    Case(HERMES, '{"name": "<think>"}', '{"name": "<think>"}', (), None, THINK, ANSWER),
    Case(LLAMA3, "It is {", "It is {"),
    Case(LLAMA3, '{"name": 3} is JSON', '{"name": 3} is JSON'),
    Case(LLAMA3, f'Text, then {{"name": "get_weather", "parameters": {PARIS}}}',
         f'Text, then {{"name": "get_weather", "parameters": {PARIS}}}'),
    Case(LLAMA3, f'{{"name": "get_weather", "parameters": {PARIS}}}', None, ONE),
    Case(LLAMA3, f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', None, ONE),
    Case(LLAMA3, LLAMA_TWO, None, TWO),
    Case(LLAMA3, f"so</think>\n\n{LLAMA_TWO}", None, TWO, "so", BEGUN),
    Case(LLAMA3, f"<think>so</think>\n\n<|python_tag|>{LLAMA_TWO}", None, TWO, "so", THINK),
    Case(LLAMA3, f"<think>so</think>\n\n<|python_tag|>{LLAMA_TWO}", None, TWO, "so", THINK, ANSWER),
    Case(LLAMA3, LLAMA_TWO, None, TWO, schema=ANSWER),
    Case(LLAMA3, f"<think>so</think>\n\n<|python_tag|>{LLAMA_ONE}", None, ONE, "so", THINK),
    Case(LLAMA3, f"so</think>\n<|python_tag|>{LLAMA_ONE}", None, ONE, "so", BEGUN),
    Case(LLAMA3, f"so</think>\n{LLAMA_ONE}", None, ONE, "so", BEGUN),
    Case(LLAMA3, f"so</think>\n{LLAMA_ONE}", None, ONE, "so", BEGUN, ANSWER),
    Case(LLAMA3, f"so</think>{LLAMA_ONE}; {LLAMA_ONE}", None, ONE + ONE, "so", BEGUN, ANSWER),
    Case(LLAMA3, '{"name": "now"}', '{"name": "now"}', schema=ANSWER),
    Case(LLAMA3, '{"name": "nobody"}', '{"name": "nobody"}', schema=ANSWER),
    Case(MISTRAL, f"[TOOL_CALLS] [{WEATHER}]", None, ONE),
    Case(MISTRAL, f"So:[TOOL_CALLS] [{ROMAN}, {NOW}]", "So:", TWO),
    Case(MISTRAL, f"[TOOL_CALLS] [{ROMAN}, {NOW}]", None, TWO, schema=ANSWER),
    Case(MISTRAL, "[TOOL", "[TOOL"),
    Case(MISTRAL, f"[TOOL_CALLS] [{WITH_ID}, {NOW}]", None, (*ONE, TWO[1])),
    Case(MISTRAL, f"[TOOL_CALLS][{WEATHER}]", None, ONE),  # as SentencePiece decodes it where a text begins
    Case(MISTRAL_TEKKEN, f"Well.[TOOL_CALLS][{NOW}, {WITH_ID}]", "Well.", (TWO[1], *ONE)),
    Case(MISTRAL_TEKKEN, f"[TOOL_CALLS][{ROMAN}, {NOW}]", None, TWO),
    Case(MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", None, ONE),
    Case(MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{PARIS}", None, ONE),
    Case(MISTRAL_ARGS, f"[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]get_weather[CALL_ID]012345678[ARGS]{PARIS}", None,
         (TWO[1], *ONE)),
    Case(MISTRAL_ARGS, f"Well.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]now[ARGS]{{}}", "Well.", TWO),
    Case(MISTRAL_ARGS, f"so</think>[TOOL_CALLS]get_weather[ARGS]{PARIS}", None, ONE, "so", BEGUN, ANSWER),
    Case(MISTRAL_ARGS, '{"name": "[TOOL_CALLS]now[ARGS]{}"}', '{"name": "[TOOL_CALLS]now[ARGS]{}"}', schema=ANSWER),
    Case(JSON, f'{{"tool_calls": [{WEATHER}]}}', None, ONE),
    Case(JSON, f'I will look.\n{{"tool_calls": [{ROMAN}, {NOW}]}}', "I will look.\n", TWO),
    Case(JSON, '{"tool_calls": []}'[:15] + "]}", '{"tool_calls": ]}'),
    Case(JSON, f'{{"tool_calls": [{ROMAN}, {NOW}]}}', None, TWO, schema=ANSWER),
    Case(JSON, '{"name": "now"}', '{"name": "now"}', schema=ANSWER),
    Case(QWEN3_CODER, coder("get_weather", city="Paris"), None, ONE),
    Case(QWEN3_CODER, f"Let me see.\n{coder('get_weather', city=TRICKY)}\n{coder('now')}", "Let me see.\n",
         (("get_weather", json.dumps({"city": TRICKY})), TWO[1])),
    Case(QWEN3_CODER, f"<think>\nHm\n</think>\n\n{coder('now')} so", " so", (TWO[1],), "Hm", THINK),
    Case(QWEN3_CODER, f"so</think>{coder('get_weather')}", None, (("get_weather", "{}"),), "so", BEGUN, ANSWER),
    Case(QWEN3_CODER, '{"name": "a"}', '{"name": "a"}', schema=ANSWER),
    Case(GLM, f"Well.\n{glm('get_weather', city='Paris')}\n{glm('now')}", "Well.\n", (*ONE, TWO[1])),
    Case(GLM_INLINE, glm("get_weather", city="").replace("\n", ""), None, (("get_weather", '{"city": ""}'),)),
    Case(MINIMAX, "So.<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris</parameter>\n"
         "</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>", "So.", (*ONE, TWO[1])),
    Case(DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + PARIS
         + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", None, (*ONE, TWO[1])),
    Case(DEEPSEEK_V31, "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + PARIS
         + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Hm.", ONE),
    Case(PHI4, f"<|tool_call|>[{WEATHER}, {NOW}]<|/tool_call|>", None, (*ONE, TWO[1])),
    Case(GRANITE, f"<|tool_call|>[{WEATHER}]", None, ONE),
    Case(LLAMA_PYTHONIC, '[get_weather(city="Paris")]', None, ONE),
    Case(LLAMA_PYTHONIC, QUOTED, None, (("get_weather", ITS), TWO[1])),
    Case(LLAMA_PYTHONIC, '<|python_start|>[now(), get_weather(city="Paris")]<|python_end|>', None, (TWO[1], *ONE)),
    Case(LLAMA_PYTHONIC, "[get the weather](city)", "[get the weather](city)"),
    Case(LLAMA_PYTHONIC, "[now(), now()]", None, (TWO[1], TWO[1]), schema=ANSWER),
    Case(LLAMA_PYTHONIC, "so</think>\n[now()]", None, (TWO[1],), "so", BEGUN),
    Case(LFM2, '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>So.', "So.", ONE),
    Case(LFM2, f"<think>so</think>Hm.<|tool_call_start|>{QUOTED}<|tool_call_end|>", "Hm.",
         (("get_weather", ITS), TWO[1]), "so", THINK),
    Case(LFM2, '{"name": "a"}', '{"name": "a"}', schema=ANSWER),
    Case(LFM2_JSON, f"<|tool_call_start|>[{WEATHER}, {NOW}]<|tool_call_end|>", None, (*ONE, TWO[1])),
    Case(OLMO3, 'So.<function_calls>get_weather(city="Paris")\nnow()</function_calls>', "So.", (*ONE, TWO[1])),
    Case(OLMO3, "<function_calls>\nnow()\nget_weather(city='Paris')\n</function_calls>", None, (TWO[1], *ONE)),
    Case(OLMO3, "so</think><function_calls>now()</function_calls>", None, (TWO[1],), "so", BEGUN, ANSWER),
    Case(GEMMA4, MARKED, None, (("get_weather", json.dumps({"city": 'it\'s "Paris" \\ {'})),)),
    Case(GEMMA4, "<|channel>thought\nso\n<channel|>Hm.<|tool_call>call:now{}<tool_call|>"
         "<|tool_call>call:get_weather{}<tool_call|>", "Hm.", (TWO[1], ("get_weather", "{}")), "so", GEMMA_THOUGHT),
    Case(GEMMA4, '<|channel>thought\nso<channel|>{"name": "a"}', '{"name": "a"}', (), "so", GEMMA_THOUGHT, ANSWER),
    Case(KIMI_K2, kimi((0, "get_weather", PARIS)), None, ONE),
    Case(KIMI_K2, f"Hm. {kimi((9, 'get_weather', ROME), (10, 'now', '{}'))}", "Hm. ", TWO),
    Case(KIMI_K2, f"<think>so</think>{kimi((120, 'now', '{}'))}", None, (TWO[1],), "so", THINK, ANSWER),
    Case(COHERE, cohere((0, "get_weather", PARIS)), None, ONE),
    Case(COHERE, "<|START_THINKING|>so<|END_THINKING|>" + cohere((3, "get_weather", ROME), (4, "now", "{}")), None, TWO,
         "so", COHERE_THOUGHT),
    Case(COHERE, cohere((0, "get_weather", PARIS), blank="", last=""), None, ONE, schema=ANSWER),
]  # fmt: skip
IDS = [f"{case.tool_format.name}:{case.text[:40]}" for case in CASES]


def _parser(case: Case, token_id) -> ChatParser:
    return ChatParser(case.tool_format, case.think, TOOLS, case.schema is not None, token_id)


def _check(case: Case, message) -> None:
    assert message.content == case.content
    assert message.reasoning == case.reasoning
    assert tuple((call.name, call.arguments) for call in message.tool_calls) == case.calls
    assert all(call.is_complete for call in message.tool_calls)


@pytest.mark.parametrize("markers_are", MARKERS_ARE)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_grammar_takes_it_and_it_is_understood(case, markers_are):
    known = tokenizer(markers_are)
    token_id = token_id_of(known)
    spec = compose(
        tools=TOOLS,
        tool_choice=ToolChoice("auto"),
        parallel=True,
        tool_format=case.tool_format,
        reasoning=case.think,
        shape=shape_of(json_schema=case.schema) if case.schema else None,
        token_id=token_id,
    )
    setting, ids = Setting.of(spec, markers_are), known.encode(case.text, add_special_tokens=False)
    if markers_are == "control tokens" and case.spells_markers:
        assert not setting.accepts(case.text)  # as a token it may not stand there
        return
    assert setting.accepts(case.text)
    _, message = parse_ids(_parser(case, token_id), known, ids)
    _check(case, message)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_however_it_is_split(case):
    def new():
        return _parser(case, lambda name: None)

    whole, message = parse(new(), [case.text])
    _check(case, message)
    assert merged(parse(new(), list(case.text))[0]) == merged(whole)
    for at in range(1, len(case.text)):
        deltas, message = parse(new(), [case.text[:at], case.text[at:]])
        assert merged(deltas) == merged(whole)
        _check(case, message)


@pytest.mark.parametrize("markers_are", MARKERS_ARE)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_whatever_is_held_back_for_a_stop_string(case, markers_are, rng):
    """Stop strings that begin everywhere and never come hold back text, also just before markers."""
    known = tokenizer(markers_are)
    token_id = token_id_of(known)
    ids = known.encode(case.text, add_special_tokens=False)
    markers = frozenset(i for _, i in markers_of(case.tool_format, case.think, token_id).ids)
    expected = parse_ids(_parser(case, token_id), known, ids)
    for _ in range(20):
        places = [rng.randrange(len(case.text) + 1) for _ in range(3)]
        stops = tuple({case.text[at : at + rng.randrange(1, 12)] + "\0" for at in places})
        detokenizer = known.detokenizer(stops, markers=markers)
        deltas, message = parse_ids(_parser(case, token_id), known, ids, detokenizer)
        assert merged(deltas) == merged(expected[0]), stops
        assert (message.content, message.reasoning) == (expected[1].content, expected[1].reasoning)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_sound(name):
    known = FORMATS[name]
    assert known.name == name
    for index, opening in enumerate(known.openings):
        assert (opening + known.head("x")).startswith(known.trigger_of(index))
    assert len(set(known.triggers)) == len(known.triggers)
    closings = [known.closing_of(i) for i in range(len(known.openings))]
    texts = (*known.heads(""), *known.openings, *known.ends, *closings, known.arguments.write({"a": "b"}))
    texts = (*texts, *(mark for marks in known.text_marks for mark in marks))
    assert all(any(marker in text for text in texts) for marker in known.markers)


def test_tools_in_the_system_prompt_of_a_model_whose_template_knows_none():
    said = JSON.describe(tool.for_template() for tool in TOOLS)
    assert [json.loads(line)["name"] for line in said.splitlines()[1:3]] == ["get_weather", "now"]
    assert HERMES.describe([]) == ""


def test_a_new_format_needs_nothing_but_its_strings():
    """The one in docs/tools.md."""
    granite = ToolFormat(
        name="mine",
        openings=("<|tool_call|>[",),
        triggers=("<|tool_call|>",),
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        separator=", ",
        closing="]",
        markers=("<|tool_call|>",),
    )
    case = Case(granite, f"So:<|tool_call|>[{ROMAN}, {NOW}]", "So:", TWO)
    test_the_grammar_takes_it_and_it_is_understood(case, "text")
    test_however_it_is_split(case)


@pytest.mark.parametrize("text, content, calls", [
    ("[TOOL_CALLS]now[CALL_ID]short[ARGS]{}", "[TOOL_CALLS]now[CALL_ID]short[ARGS]{}", 0),
    ("[TOOL_CALLS]now[CALL_ID]abcd-f123[ARGS]{}", "[TOOL_CALLS]now[CALL_ID]abcd-f123[ARGS]{}", 0),
    ('[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "short"}]', '"id": "short"}]', 1),
])  # fmt: skip
def test_an_id_that_is_none(text, content, calls):
    """No grammar lets it come."""
    case = Case(MISTRAL if calls else MISTRAL_ARGS, text)
    for pieces in ([text], list(text)):
        _, message = parse(_parser(case, lambda name: None), pieces)
        assert message.content == content
        assert [call.is_complete for call in message.tool_calls] == [False] * calls


def test_a_format_with_ids_says_how_long_they_are():
    with pytest.raises(ValueError, match="how long"):
        replace(MISTRAL_ARGS, id_length=None)


def test_a_format_without_a_right_trigger_is_refused():
    with pytest.raises(ValueError, match="trigger"):
        replace(HERMES, triggers=("<b>",))
    with pytest.raises(ValueError, match="does not begin its calls"):
        replace(LLAMA3, triggers=("<|python_tag|>",))  # of both openings
    for triggers in ((), ("<tool_call>", "<tool_call>")):
        with pytest.raises(ValueError, match="one trigger"):
            replace(HERMES, triggers=triggers)


def test_ids_are_the_models_own_where_templates_show_them():
    text = kimi((9, "get_weather", PARIS), (10, "now", "{}"))
    _, message = parse(_parser(Case(KIMI_K2, text), lambda name: None), list(text))
    assert [call.id for call in message.tool_calls] == ["functions.get_weather:9", "functions.now:10"]


@pytest.mark.parametrize("markers_are", MARKERS_ARE[:2])
def test_a_text_may_stand_between_marks(markers_are):
    """They are no part of it."""
    known = tokenizer(markers_are)
    token_id = token_id_of(known)
    for schema, body in ((None, "Hello."), (ANSWER, '{"name": "a"}')):
        text = f"<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>{body}<|END_RESPONSE|>"
        case = Case(COHERE, text, body, (), "so", COHERE_THOUGHT, schema)
        spec = compose(
            tools=TOOLS,
            tool_choice=ToolChoice("auto"),
            parallel=True,
            tool_format=COHERE,
            reasoning=COHERE_THOUGHT,
            shape=shape_of(json_schema=schema) if schema else None,
            token_id=token_id,
        )
        assert Setting.of(spec, markers_are).accepts(text)
        _check(case, parse_ids(_parser(case, token_id), known, known.encode(text, add_special_tokens=False))[1])


QWEN3 = """{%- if tools %}<tools></tools> return <tool_call>\\n{"name": <function-name>}\\n</tool_call>{% endif %}
{%- if '</think>' in content %}{% endif %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
SEED_THINK = ReasoningFormat(begin="<seed:think>", end="</seed:think>")
MAGISTRAL = ReasoningFormat(begin="[THINK]", end="[/THINK]")
R1 = "{% if '</think>' in content %}{% endif %}{% if add_generation_prompt %}{{'<|Assistant|><think>\\n'}}{% endif %}"


@pytest.mark.parametrize(
    "template, expected",
    [
        (QWEN3, (HERMES, THINK)),
        (R1, (JSON, BEGUN)),
        ("<|start_header_id|>{{ '\"parameters\": ' }}", (LLAMA3, None)),
        ('{{ "[TOOL_CALLS] [" }}', (MISTRAL, None)),
        ('{{ "[TOOL_CALLS][" }}', (MISTRAL_TEKKEN, None)),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" }}', (MISTRAL_ARGS, None)),
        ("<tool_call>\n<function=name>", (QWEN3_CODER, None)),
        ("<tool_call>name\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>", (GLM, None)),
        ("<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>", (GLM_INLINE, None)),
        ("{% set toolcall_begin_token = '<minimax:tool_call>' %}</think>{{ '<think>' }}", (MINIMAX, BEGUN)),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + x + '\\n```json\\n'", (DEEPSEEK_V3, None)),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + x + '<｜tool▁sep｜>'", (DEEPSEEK_V31, None)),
        ("<|header_start|>{{ '\"parameters\": ' }}", (LLAMA3, None)),
        ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", (GRANITE, None)),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", (PHI4, None)),
        ("<seed:tool_call><function=</seed:think>", (SEED_OSS, SEED_THINK)),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" }}[/THINK]', (MISTRAL_ARGS, MAGISTRAL)),
        ("{{ '<|tool_call_start|>[' + calls | join(', ') }}", (LFM2, None)),
        ("{{ '<|tool_call_start|>[' + '{\"name\": \"' }}", (LFM2_JSON, None)),
        ("{{ 'List of tools: <|tool_list_start|>[' }}", (replace(LFM2, calls_in_text=True), None)),
        ("Respond as [func_name1(a=b)] <|header_start|>", (LLAMA_PYTHONIC, None)),
        ("Respond as [func_name1(a=b)] <|start_header_id|>", (LLAMA_PYTHONIC, None)),
        ("{{ '<function_calls>' }}{% for call in message.tool_calls %}", (OLMO3, None)),
        ("{{ '<function_calls>' + message['function_calls'] }}", (JSON, None)),
        ("{{ '<|tool_call>call:' }}<|channel>{{ '<channel|>' }}", (GEMMA4, GEMMA_THOUGHT)),
        ("<|tool_calls_section_begin|>{{ '<|tool_call_argument_begin|>' }}", (KIMI_K2, None)),
        ('<|START_ACTION|>[{"tool_name": "<|END_THINKING|>', (COHERE, COHERE_THOUGHT)),
        ("<tool_call>name\n```json\n</tool_call>", (JSON, None)),
        ("{{ messages }}", (JSON, None)),
        ("", (JSON, None)),
    ],
)
def test_the_template_tells_the_format(template, expected):
    assert detect(template) == expected


def test_the_prompt_tells_whether_reasoning_was_begun():
    assert THINK.after_prompt("<|Assistant|><think>\n") == BEGUN
    assert BEGUN.after_prompt("<|im_start|>assistant\n") == THINK
    assert THINK.after_prompt("assistant\n<think>\n\n</think>\n\n") is None
    assert THINK.after_prompt("<｜Assistant｜></think>") is None  # as DeepSeek V3.1 closes what it did not begin
    assert THINK.after_prompt("<think>so</think>\nassistant") == THINK
    assert GEMMA_THOUGHT.after_prompt("<|turn>model\n<|channel>thought\n<channel|>") is None
    assert GEMMA_THOUGHT.after_prompt("<|turn>model\n<|channel>thought\n") == replace(GEMMA_THOUGHT, begun=True)
