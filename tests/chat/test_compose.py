"""`compose`: what a request asks for becomes a grammar; what callers write in it is data, never grammar."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from chat_harness import Setting, backend, parse_ids, shape_of, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.chat import FORMATS, ChatParser, ReasoningFormat, Tool, ToolChoice, compose
from aengine.engine.chat.formats import GEMMA4, GLM, HERMES, LLAMA3, MISTRAL_ARGS, markers_of
from aengine.engine.chat.syntax.arguments import JSON_OBJECT
from aengine.engine.structured.parts import SpecialToken, Text, leaves, seq
from aengine.errors import GrammarError, InvalidRequestError

NO_TOKENS = lambda name: None  # noqa: E731


def composed(tools=(), choice="auto", *, tool_format=HERMES, reasoning=None, shape=None, parallel=True, relax=False):
    return compose(
        tools=tools,
        tool_choice=ToolChoice.of(choice, tools),
        parallel=parallel,
        tool_format=tool_format,
        reasoning=reasoning,
        shape=shape,
        token_id=NO_TOKENS,
        relax=relax,
    )


def test_without_tools_and_schema_nothing_is_constrained():
    assert composed() is None and composed(reasoning=ReasoningFormat()) is None


def test_the_same_request_is_the_same_grammar():
    """The compiler's cache goes by it."""
    tools = [Tool("f"), Tool("g")]
    assert composed(tools, reasoning=ReasoningFormat()) == composed(tools, reasoning=ReasoningFormat())


def test_a_schema_alone():
    setting = Setting.of(composed(shape=shape_of(json_schema={"type": "integer"}), reasoning=ReasoningFormat()), "text")
    assert setting.accepts("12") and setting.accepts("<think>x</think>\n\n12")
    assert setting.accepts("<think>x</think>\n12") and not setting.accepts("<think>x</think>" + "\n" * 9 + "12")
    assert not setting.accepts("x") and not setting.accepts("<think>x") and not setting.accepts("\n12")
    assert Setting.of(composed(shape=shape_of(json_schema=True)), "text").accepts("[3]")


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("choice", ["none", "auto"])
def test_reasoning_that_was_begun_must_end(name, choice):
    """Text that begins as reasoning does is reasoning to the parser, so the grammar may not take it for text."""
    spec = composed([Tool("f")], choice, tool_format=FORMATS[name], reasoning=ReasoningFormat())
    setting = Setting.of(spec, "text")
    assert not setting.accepts("<think>so") and setting.accepts("<think>so</think>so") and setting.accepts("<think")


def test_importing_it_imports_no_library():
    code = "import sys, aengine.chat; print(*sorted({'torch', 'numpy', 'pydantic', 'llguidance'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("tools", [(), (Tool("f"),)])
def test_a_schema_that_nothing_fits_is_refused(tools):
    with pytest.raises(GrammarError) as caught:
        Setting.of(composed(tools, shape=shape_of(json_schema=False)), "text")
    assert caught.value.kind == "unsatisfiable"


NOT_THREE = {"type": "integer", "not": {"const": 3}}


def test_unsupported_keywords_are_an_error_or_relaxed():
    tool = Tool("f", parameters={"properties": {"a": NOT_THREE}})
    with pytest.raises(GrammarError) as caught:
        Setting.of(composed([tool]), "text")
    assert caught.value.kind == "unsupported"
    assert Setting.of(composed([tool], relax=True), "text").compiled.warnings


def test_tools_and_the_answer_are_relaxed_one_without_the_other():
    shapes = {on: shape_of(json_schema=NOT_THREE, on_unsupported=on) for on in ("error", "relax")}
    for tool, shape, relax in ((NOT_THREE, shapes["relax"], False), ({}, shapes["error"], True)):
        with pytest.raises(GrammarError):
            Setting.of(composed([Tool("f", parameters={"properties": {"a": tool}})], shape=shape, relax=relax), "text")
    setting = Setting.of(composed([Tool("f")], shape=shapes["relax"]), "text")
    assert setting.accepts("3") and setting.compiled.warnings


def test_counts_that_can_not_be_enforced_are_left_out_with_a_warning():
    """The library would count the wrong properties, and so refuse what is right."""
    named = {"a": {"type": "integer"}, "b": {}}
    counted = {"type": "object", "properties": named, "minProperties": 1, "additionalProperties": True}
    tools, shape = [Tool("f", parameters=counted)], shape_of(json_schema=counted, on_unsupported="relax")
    setting = Setting.of(composed(tools, shape=shape, relax=True), "text")
    assert setting.accepts('{"a": 1}')
    assert setting.accepts('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    warnings = [text for text in setting.compiled.warnings if "$.minProperties is not enforced" in text]
    assert len(warnings) == 2
    assert "the tool 'f'" in warnings[0] and "the schema of the answer" in warnings[1]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_part_that_is_at_fault_is_named(name):
    good, bad = Tool("good"), Tool("bad", parameters={"properties": {"a": NOT_THREE}})
    for tools, shape, culprit in (
        ([good, bad], None, "the tool 'bad'"),
        ([good, bad], {"json_schema": True}, "the tool 'bad'"),
        ([good], {"json_schema": NOT_THREE}, "the schema of the answer"),
        ([good], {"regex": "(?=a)b"}, "the regex of the answer"),
    ):
        with pytest.raises(GrammarError) as caught:
            Setting.of(composed(tools, tool_format=FORMATS[name], shape=shape and shape_of(**shape)), "text")
        assert caught.value.kind == "unsupported" and culprit in str(caught.value)


def call_of(tool_format, name, arguments=None):
    """One call, as a whole answer. ``arguments``: as they are written, or what they say."""
    if not isinstance(arguments, str):
        arguments = tool_format.arguments.write(arguments or {})
    return "".join(
        (
            tool_format.openings[0],
            tool_format.head(name),
            arguments,
            tool_format.after_arguments,
            tool_format.closing_of(0),
        )
    )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_regex_or_a_choice_beside_calls(name):
    """What begins as a call is one, even where the shape would take it."""
    tool_format, tool = FORMATS[name], Tool("f")
    call = call_of(tool_format, "f")
    broken = (
        tool_format.openings[0] + tool_format.head("f") if tool_format.names_trigger else tool_format.triggers[0]
    ) + "!"
    shapes = {"any text": shape_of(regex="(?s:.*)"), "a choice": shape_of(choice=["yes", "a/b\n\\", broken])}
    for said, shape in shapes.items():
        for reasoning in (None, ReasoningFormat()):
            setting = Setting.of(composed([tool], tool_format=tool_format, reasoning=reasoning, shape=shape), "text")
            assert setting.accepts(call) and setting.accepts("yes") and setting.accepts("a/b\n\\")
            assert not setting.accepts(broken)
            assert setting.accepts(tool_format.triggers[0][:-1]) == (said == "any text")
            assert setting.accepts("<think>so</think>\n\nyes") == (reasoning is not None or said == "any text")
            required = composed([tool], "required", tool_format=tool_format, reasoning=reasoning, shape=shape)
            assert not Setting.of(required, "text").accepts("yes")


def test_a_shape_alone_stays_as_it_is():
    """So it may be for another library, and a request without a chat shares its compiled grammar."""
    for shape in (shape_of(grammar='start: "a"'), shape_of(json_object=True, backend="other")):
        assert composed(shape=shape) is shape
        assert composed([Tool("f")], "none", shape=shape) is shape
        for beside in ({"tools": [Tool("f")]}, {"reasoning": ReasoningFormat()}):
            with pytest.raises(InvalidRequestError, match="can't be composed with") as caught:
                composed(shape=shape, **beside)
            assert caught.value.param == "structured_output"


def test_the_blanks_of_an_answer_are_as_its_shape_says():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for whitespace, takes in (("compact", False), ("any", True)):
        shape = shape_of(json_schema=schema, whitespace=whitespace)
        setting = Setting.of(composed([Tool("f")], shape=shape), "text")
        assert setting.accepts('{\n"a":1}') == takes


def test_a_pattern_can_not_leave_its_place():
    with pytest.raises(GrammarError, match="lone backslash"):
        composed([Tool("f")], shape=shape_of(regex="a\\"))
    for pattern in ("a/ | /b", "a\nstart: /b/", ")|(b", "", 'a"'):
        plain = backend("text").compile
        try:
            alone = plain(shape_of(regex=pattern))
        except GrammarError:
            with pytest.raises(GrammarError):
                plain(composed([Tool("f")], shape=shape_of(regex=pattern)))
            continue
        beside = Setting.of(composed([Tool("f")], shape=shape_of(regex=pattern)), "text")
        for text in ("", "a", "b", "a/ | /b", "a/ ", "a\nstart: /b/", 'a"'):
            assert beside.accepts(text) == Setting(tokenizer("text"), alone).accepts(text), (pattern, text)


def test_options_of_the_library_can_not_be_smuggled_in():
    smuggled = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, "type": "object", "properties": {"a": {}}}
    for spec in (
        composed(shape=shape_of(json_schema=smuggled)),
        composed([Tool("f", parameters=smuggled)], "required"),
    ):
        setting = Setting.of(spec, "text")
        assert not setting.accepts('{"a" :1}')
        assert not setting.accepts('<tool_call>\n{"name": "f", "arguments": {"a" :1}}\n</tool_call>')


def test_strict_or_any_arguments():
    tool = Tool("f", parameters={"properties": {"a": {"type": "integer"}}, "additionalProperties": False})
    text = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'
    assert not Setting.of(composed([tool]), "text").accepts(text)
    assert Setting.of(composed([replace(tool, strict=False)]), "text").accepts(text)


def test_references_of_a_tool_lead_to_its_own_schema():
    """Also where the whole call becomes one schema, and two tools have definitions of the same name."""

    def tool(name, kind):
        node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "v": {"type": kind}}}
        node |= {"required": ["v"], "additionalProperties": False}
        listed = {"$ref": {"type": "string"}, "x": {"$ref": "#/$defs/Node"}}
        return Tool(name, parameters={"properties": listed, "$defs": {"Node": node}, "additionalProperties": False})

    tools = [tool("f", "integer"), tool("g", "string")]
    for shape in (None, shape_of(json_schema={"type": "array"})):
        setting = Setting.of(composed(tools, tool_format=LLAMA3, shape=shape), "text")
        assert setting.accepts('{"name": "f", "parameters": {"x": {"next": {"v": 1}, "v": 2}}}')
        assert setting.accepts('{"name": "g", "parameters": {"$ref": "#/a", "x": {"v": "s"}}}')
        assert not setting.accepts('{"name": "g", "parameters": {"x": {"v": 1}}}')
        assert not setting.accepts('{"name": "f", "parameters": {"x": {"next": {"v": "s"}, "v": 2}}}')


@pytest.mark.parametrize("ref", ["#/$defs/V", "https://x.y/s#/$defs/V"])
def test_a_tool_whose_schema_has_a_name_of_its_own(ref):
    schema = {"$id": "https://x.y/s", "properties": {"v": {"$ref": ref}}, "$defs": {"V": {"type": "boolean"}}}
    tool = Tool("f", parameters=schema | {"required": ["v"], "additionalProperties": False})
    for shape in (None, shape_of(json_schema={"type": "array"})):
        setting = Setting.of(composed([tool], tool_format=LLAMA3, shape=shape), "text")
        assert setting.accepts('{"name": "f", "parameters": {"v": true}}')
        assert not setting.accepts('{"name": "f", "parameters": {"v": 1}}')


def test_names_that_are_prefixes_of_each_other():
    tools = [Tool(name) for name in ("a", "ab", "ab.c", "-", ".", "a-b")]
    for tool_format in FORMATS.values():
        setting = Setting.of(composed(tools, "required", tool_format=tool_format), "text")
        for tool in tools:
            text = call_of(tool_format, tool.name)
            assert setting.accepts(text)
            head = tool_format.head(tool.name)
            assert not setting.accepts(text.replace(head, head.replace(tool.name, tool.name + "x")))


NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
ATTACKS = ['"', "\\", '"\nstart: /.*/', "%json {}", "/", "\\x22", "}\n", "// x", "<[1]>", "#", "\x7f"]
DATA = st.text(max_size=30) | st.sampled_from(ATTACKS)


@settings(max_examples=60)
@given(
    names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    key=DATA,
    value=DATA,
    name=st.sampled_from(sorted(FORMATS)),
)
def test_nothing_that_callers_write_becomes_grammar(names, key, value, name):
    """Names, property names, constants and descriptions: the one right call is taken, and understood."""
    schema = {
        "description": value,
        "properties": {key: {"const": value}},
        "required": [key],
        "additionalProperties": False,
    }
    tools = [Tool(tool, description=value, parameters=schema) for tool in names]
    tool_format = FORMATS[name]
    constant = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # as llguidance writes it
    arguments = f"{{{json.dumps(key, ensure_ascii=False)}: {constant}}}"
    text = call_of(tool_format, names[-1], arguments if tool_format.arguments is JSON_OBJECT else {key: value})
    answer = shape_of(json_schema={"type": "object", "properties": {key: {"enum": [value]}}})
    for choice, wanted in (("required", None), ("auto", None), ("auto", answer)):
        setting = Setting.of(composed(tools, choice, tool_format=tool_format, shape=wanted), "text")
        assert setting.accepts(text)
        if choice == "required":
            assert not setting.accepts("x") and not setting.accepts(value)
            head = tool_format.head(names[-1])
            assert not setting.accepts(text.replace(head, tool_format.head(names[-1][:-1] + "!"), 1))
        parser = ChatParser(tool_format, None, tools, wanted is not None, NO_TOKENS)
        known = tokenizer("text")
        _, message = parse_ids(parser, known, known.encode(text, add_special_tokens=False))
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [(names[-1], {key: value})]


def test_control_tokens_are_named_by_their_ids():
    markers = markers_of(MISTRAL_ARGS, None, {"[TOOL_CALLS]": 7, "[ARGS]": 8}.get)
    assert markers.part(markers.encode("[TOOL_CALLS]f[ARGS]")) == seq(SpecialToken(7), Text("f"), SpecialToken(8))
    assert markers.part("") == seq()
    nested = replace(HERMES, markers=("<tool", "<tool_call>"))
    markers = markers_of(nested, None, {"<tool": 7, "<tool_call>": 8}.get)
    assert markers.part(markers.encode("<tool_call><tool")) == seq(SpecialToken(8), SpecialToken(7))


@pytest.mark.parametrize("known, names", [(GLM, ["<arg_value>"]), (GEMMA4, ['<|"|>'])])
def test_what_a_caller_names_is_no_control_token(known, names):
    """Parameters and options that have the name of one are text, and are written in letters."""
    tool = Tool("f", parameters={"properties": {"a": {"enum": names}, **{name: {} for name in names}}})
    ids = {name: i for i, name in enumerate(known.markers)}
    spec = compose(
        tools=[tool],
        tool_choice=ToolChoice("required"),
        parallel=False,
        tool_format=known,
        reasoning=None,
        shape=None,
        token_id=ids.get,
    )
    assert spec is not None and spec.root is not None
    assert Text(names[0]) in leaves(spec.root)
