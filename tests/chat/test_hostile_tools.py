"""Tools' schemas as an attacker writes them: each ends soon, in a grammar or in the caller's own error."""

from __future__ import annotations

import json
import random

import pytest
from chat_harness import Setting, backend, parse, token_id_of, tokenizer

from aengine.chat import FORMATS, ChatParser, ToolChoice, compose, tools_of
from aengine.engine.structured.llguidance.cost import is_quick
from aengine.errors import AEngineError, GrammarError

NAMES = ("olmo3", "gemma4", "glm", "hermes")
"""Python's literals, Gemma's, marked texts, and JSON."""

pytestmark = pytest.mark.timeout(60)


def _spec(name, parameters, markers_are="control tokens", **options):
    return compose(
        tools=tools_of([{"name": "f", "parameters": {"type": "object", **parameters}}]),
        tool_choice=ToolChoice("required"),
        parallel=True,
        tool_format=FORMATS[name],
        reasoning=None,
        shape=None,
        token_id=token_id_of(tokenizer(markers_are)),
        **options,
    )


def _of_text(**keywords):
    return {"properties": {"x": {"type": "string", **keywords}}, "required": ["x"]}


def _call(known, arguments):
    begun = known.openings[0] + known.head("f") + known.arguments.write(arguments)
    return begun + known.after_arguments + known.closing_of(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "keywords",
    [
        {"maxLength": 10**12},
        {"minLength": 10**25},
        {"minLength": -1},
        {"maxLength": "1"},
        {"pattern": "a{99999999999}"},
        {"pattern": "(" * 3000 + ")" * 3000},
    ],
)
def test_a_text_that_no_grammar_can_be_made_of_is_a_grammar_error(name, keywords):
    with pytest.raises(GrammarError):
        backend("control tokens").compile(_spec(name, _of_text(**keywords)))


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_that_backtracks_is_compiled_where_it_can_be_killed(name):
    bomb = "(?:(?:(?:(?:a?){60}){60}){60}){60}"
    assert not is_quick(_spec(name, _of_text(pattern=bomb)))
    assert is_quick(_spec(name, _of_text(maxLength=100_000)))  # a length alone costs little


@pytest.mark.parametrize("markers_are", ["control tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("keywords", "takes"),
    [({"pattern": "^(a?){2}$"}, ("", "a", "aa")), ({"pattern": "^a+$"}, ("a", "aa")), ({}, ("", "a", "aa", "b"))],
)
def test_a_pattern_says_itself_whether_a_text_may_be_empty(name, markers_are, keywords, takes):
    setting = Setting.of(_spec(name, _of_text(**keywords), markers_are), markers_are)
    for text in ("", "a", "aa", "b"):
        assert setting.accepts(_call(FORMATS[name], {"x": text})) is (text in takes), text


@pytest.mark.slow
@pytest.mark.parametrize("required", ["none", "all", "one"])
@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_parameters_are_compared_and_compiled_in_linear_work(name, required):
    """A part that is reached in 2 ** n ways is hashed once."""
    names = [f"p{i}" for i in range(300)]
    parameters = {
        "properties": {name: {"type": "integer"} for name in names},
        "required": {"none": [], "all": names, "one": names[150:151]}[required],
    }
    spec, same = _spec(name, parameters), _spec(name, parameters)
    assert spec == same and hash(spec) == hash(same)
    setting = Setting.of(spec, "control tokens")
    for given in (names, names[150:151], names[100:151:50], [], names[:2]):
        is_right = {"none": True, "all": given == names, "one": "p150" in given}[required]
        assert setting.accepts(_call(FORMATS[name], dict.fromkeys(given, 1))) is is_right, given


_REF = {"$ref": "#/$defs/d0"}
_MEMBERS = "abcdefgh"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "level",
    [
        lambda ref: {"anyOf": [dict(ref) for _ in _MEMBERS]},
        lambda ref: {"type": "object", "properties": {key: dict(ref) for key in _MEMBERS}},
        lambda ref: {"type": "array", "items": {"oneOf": [dict(ref) for _ in _MEMBERS]}},
    ],
    ids=["anyOf", "properties", "items"],
)
@pytest.mark.parametrize("is_circle", [False, True])
def test_definitions_that_refer_to_each_other_are_looked_at_once(name, level, is_circle):
    """Followed one by one, eight references on each of seven levels are two million."""
    defs = {f"d{i}": level({"$ref": f"#/$defs/d{i + 1}"}) for i in range(7)}
    defs["d7"] = level(_REF) if is_circle else {"type": "string"}
    parameters = {"properties": {"x": _REF}, "$defs": defs}
    spec = _spec(name, parameters, relax=True)
    assert hash(spec) == hash(_spec(name, parameters, relax=True))
    parser = ChatParser(FORMATS[name], None, tools_of([{"name": "f", "parameters": parameters}]), False, lambda _: None)
    parse(parser, [FORMATS[name].openings[0] + FORMATS[name].head("f")])


_KEYWORDS = [
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "$ref", "additionalProperties", "not", "$defs",
]  # fmt: skip
_VALUES = [None, True, 0, -1, 2.0, "x", "string", "array", "#", "#/properties/x", "(", 10**25, "date", ["null"], [], {}]


def _schema(rng, depth):
    return {rng.choice(_KEYWORDS): _value(rng, depth) for _ in range(rng.randint(0, 4))}


def _value(rng, depth):
    kind = rng.random() if depth else 1
    if kind < 0.4:
        return _schema(rng, depth - 1)
    return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))] if kind < 0.6 else rng.choice(_VALUES)


@pytest.mark.slow
def test_schemas_of_any_values_are_composed_or_refused():
    for seed in range(300):
        rng = random.Random(seed)
        parameters = {"properties": {"x": _schema(rng, 2), "y": _schema(rng, 1)}, "required": ["x"]}
        for name in NAMES:
            try:
                hash(_spec(name, parameters, relax=seed % 2 == 0))
            except AEngineError as error:
                assert isinstance(error, GrammarError), json.dumps(parameters)


def test_what_no_grammar_can_be_composed_of_is_the_callers_error(monkeypatch):
    for error in (OverflowError, RecursionError, MemoryError):

        def part(*_args, error=error):
            raise error

        monkeypatch.setattr(type(FORMATS["hermes"].arguments), "part", part)
        with pytest.raises(GrammarError) as caught:
            _spec("hermes", _of_text())
        assert caught.value.kind == "too_complex"


ENUM = {"enum": [f"option {i}" for i in range(2000)]}
OBJECT = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}


@pytest.mark.parametrize("definition", [ENUM, OBJECT])
def test_a_definition_that_many_arguments_refer_to_is_not_written_without_end(definition):
    properties = {f"a{i}": {"$ref": "#/$defs/e"} for i in range(600)}
    with pytest.raises(GrammarError, match="refer to so much") as caught:
        _spec("glm", {"properties": properties, "$defs": {"e": definition}})
    assert caught.value.kind == "too_complex"
