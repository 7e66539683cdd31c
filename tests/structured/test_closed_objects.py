"""Objects that name properties and say nothing of others are closed, to what all parts of a place name together."""

from __future__ import annotations

import copy
import json
from itertools import combinations, product

import jsonschema
import pytest
from grammar_helpers import accepts, backend_of, tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aengine import StructuredOutput
from aengine.errors import GrammarError, InvalidRequestError
from aengine.structured.closed_objects import close_objects
from aengine.structured.spec import spec_of

A = {"properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
}
TWO_USES = {
    "properties": {
        "x": {"$ref": "#/$defs/A"},
        "y": {"allOf": [{"$ref": "#/$defs/A"}, B]},
        "z": {"allOf": [{"$ref": "#/$defs/A"}], "description": "d"},
    },
    "$defs": {"A": A},
}
CASES = {
    "properties": (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    "none named": ({"type": "object"}, [{"z": 1}], []),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": 2}, {"b": 1}], [{"a": "x", "b": 1}, {"a": 1, "b": 1, "c": 1}]),
    "beside anyOf": (
        {"properties": {"k": {}}, "anyOf": [A, B]},
        [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
        [{"k": 1, "c": 1}, {"b": "x"}],
    ),
    "anyOf of required": (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1, "c": 1}],
    ),
    "beside $ref": (
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
        [{"b": 1, "a": 1}, {"a": 1}],
        [{"a": 1, "c": 1}, {"a": "x"}],
    ),
    "beside a nullable $ref": (
        {"properties": {"k": {}}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": A}},
        [{"k": 1, "a": 1}, None],
        [{"a": 1, "z": 1}],
    ),
    "a definition of two uses": (
        TWO_USES,
        [{"x": {"a": 1}}, {"y": {"a": 1, "b": 1}}, {"z": {"a": 1}}],
        [{"x": {"a": 1, "b": 1}}, {"z": {"a": 1, "b": 1}}, {"y": {"c": 1}}, {"w": 1}],
    ),
    "a definition that refers to itself": (
        {
            "properties": {"n": {"$ref": "#/$defs/node"}, "m": {"$ref": "#/$defs/more"}},
            "$defs": {"node": NODE, "more": {"allOf": [{"$ref": "#/$defs/node"}, {"properties": {"w": {}}}]}},
        },
        [{"n": {"v": 1, "next": {"v": 1}}}, {"m": {"v": 1, "next": {"v": 2}, "w": 1}}],
        [{"n": {"v": 1, "w": 1}}, {"m": {"v": 1, "next": {"v": 2, "w": 3}}}],
    ),
    "an anchor": (
        {
            "properties": {"x": {"$ref": "#foo"}, "y": {"allOf": [{"$ref": "#foo"}, B]}},
            "$defs": {"A": {"$anchor": "foo", **A}},
        },
        [{"x": {"a": 1}}, {"y": {"a": 1, "b": 1}}],
        [{"x": {"b": 1}}, {"y": {"c": 1}}, {"w": 1}],
    ),
    "draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"A": A},
            "properties": {"x": {"description": "d", "$ref": "#/definitions/A"}},
        },
        [{"x": {"a": 1}}],
        [{"x": {"a": 1, "b": 1}}],
    ),
    "a name of its own": (
        {
            "$id": "https://e.x/y",
            "definitions": {"A": A},
            "properties": {
                "x": {"$ref": "https://e.x/y#/definitions/A"},
                "y": {"allOf": [{"$ref": "#/definitions/A"}, B]},
            },
        },
        [{"x": {"a": 1}}, {"y": {"a": 1, "b": 1}}],
        [{"x": {"a": 1, "b": 1}}, {"y": {"c": 1}}],
    ),
    "in a list": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"b": 1}]]),
    "oneOf told apart": (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": t}, t: {}}, "required": ["t"]} for t in ("p", "q")
            ]
        },
        [{"t": "p", "p": 1}, {"t": "q", "q": 1}],
        [{"t": "p", "q": 1}, {"t": "p", "z": 1}],
    ),
    "patternProperties": (
        {"allOf": [{"patternProperties": {"^x": {"type": "integer"}}}, A]},
        [{"a": 1, "x1": 2}],
        [{"x1": "s"}, {"b": 1}],
    ),
    "additionalProperties": ({**A, "additionalProperties": {"type": "string"}}, [{"a": 1, "z": "s"}], [{"z": 1}]),
    "open in one part": ({"allOf": [{**A, "additionalProperties": True}, B]}, [{"b": 1, "z": 1}], []),
    "required": ({**A, "type": "object", "required": ["z"]}, [{"a": 1, "z": 1}, {"z": 1}], [{"z": 1, "y": 1}, {}]),
    "counted": ({"type": "object", **A, "minProperties": 1}, [{"a": 1}], [{}, {"c": 1}]),
    "listed": ({**A, "enum": [{"a": 1, "b": 2}]}, [{"a": 1, "b": 2}], [{"a": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_place_is_closed_to_what_its_parts_name(name):
    schema, right, wrong = CASES[name]
    before = copy.deepcopy(schema)
    compiled = backend_of("tiny").compile(spec_of(StructuredOutput(json_schema=schema)))
    assert schema == before  # the caller's stays as it was
    for value in right:
        assert accepts(compiled.matcher(), tiny(), json.dumps(value)), value
    for value in wrong:
        assert not accepts(compiled.matcher(), tiny(), json.dumps(value)), value


def test_objects_are_open_where_that_is_asked_for():
    for schema in (A, {"allOf": [A, B]}, TWO_USES):
        spec = spec_of(StructuredOutput(json_schema=schema, open_objects=True))
        assert json.loads(spec.text) == schema
        assert accepts(backend_of("tiny").compile(spec).matcher(), tiny(), '{"other": 1}')
    with pytest.raises(InvalidRequestError, match="open_objects"):
        StructuredOutput(json_schema=A, open_objects="yes")  # type: ignore[arg-type]


NAMES = "abcd"
_MEMBER = st.sampled_from([{}, {"type": "integer"}, {"type": "string"}])
_PART = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(st.sampled_from(NAMES), _MEMBER, max_size=2),
        "required": st.lists(st.sampled_from(NAMES), max_size=1),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
        "patternProperties": st.just({"^[cd]": {"type": "integer"}}),
        "minProperties": st.integers(0, 3),
    },
)
_PARTS = st.recursive(
    st.one_of(_PART, st.sampled_from([{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}])),
    lambda part: st.builds(
        lambda own, kind, members: {**own, kind: members},
        _PART,
        st.sampled_from(["allOf", "anyOf"]),
        st.lists(part, min_size=1, max_size=3),
    ),
    max_leaves=6,
)
_SCHEMAS = st.builds(lambda root, p, q: {**root, "$defs": {"p": p, "q": q}}, _PARTS, _PART, _PART)
_VALUES = st.dictionaries(st.sampled_from(NAMES + "e"), st.sampled_from([1, "s"]), max_size=4)

_EVERY_VALUE = [
    {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    for values in product((None, 1, "s"), repeat=len(NAMES))
]


def _without_anyof(schema):
    return "anyOf" not in json.dumps(schema)


@example({"properties": {"a": {}, "c": {}}, "minProperties": 2, "allOf": [{}]}, [{"a": 1, "b": 1}], False)
@given(_SCHEMAS, st.lists(_VALUES, max_size=6), st.booleans())
@settings(deadline=None, max_examples=300)
def test_closing_forbids_other_names_and_nothing_else(schema, values, is_nested):
    if is_nested:
        definitions = schema.pop("$defs")
        schema = {"properties": {"x": schema}, "required": ["x"], "$defs": definitions}
        values = [{"x": value} for value in values]
    closed = copy.deepcopy(schema)
    close_objects(closed)
    silent, spoken = (jsonschema.Draft202012Validator(known) for known in (schema, closed))
    for value in values:
        inner = value["x"] if is_nested else value
        parts = [dict(kept) for count in range(len(inner) + 1) for kept in combinations(inner.items(), count)]
        kept = [spoken.is_valid({"x": part} if is_nested else part) for part in parts]
        if kept[-1]:
            assert silent.is_valid(value)
        if silent.is_valid(value):
            # A part of the value may have too few members, where others that are named would do.
            wrapped = ({"x": one} if is_nested else one for one in _EVERY_VALUE)
            assert any(kept) or any(map(spoken.is_valid, wrapped)), "what could be met can't be any more"
    if _without_anyof(schema) and not is_nested:
        unevaluated = jsonschema.Draft202012Validator({**schema, "unevaluatedProperties": False})
        for value in values:
            if unevaluated.is_valid(value):
                assert spoken.is_valid(value)


def test_a_schema_that_joins_too_much_is_refused_in_bounded_work():
    named = {"properties": {f"p{i}": {} for i in range(4000)}}
    places = {f"x{i}": {"allOf": [{"$ref": "#/$defs/A"}, B]} for i in range(2000)}
    with pytest.raises(GrammarError, match="additionalProperties") as caught:
        spec_of(StructuredOutput(json_schema={"properties": places, "$defs": {"A": named}}))
    assert caught.value.kind == "too_complex"
