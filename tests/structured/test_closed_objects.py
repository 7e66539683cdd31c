"""Objects that name properties and say nothing of others are closed, to what all parts of a place name together."""

from __future__ import annotations

import copy
import json
import sys
from itertools import product

import jsonschema
import pytest
from grammar_helpers import accepts, backend_of, tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aengine import StructuredOutput
from aengine.engine.structured.closed_objects import close_objects
from aengine.engine.structured.spec import spec_of
from aengine.errors import GrammarError, InvalidRequestError

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
    "a nullable $ref beside two sets of names": (
        {
            "properties": {
                "x": {"properties": {"k": {}}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
                "y": {"properties": {"m": {}}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
            },
            "$defs": {"A": A},
        },
        [{"x": {"k": 1, "a": 1}, "y": {"m": 1, "a": 1}}, {"x": None}],
        [{"x": {"m": 1}}, {"y": {"k": 1}}, {"y": {"z": 1}}],
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
    "a member of two parts": (
        {"allOf": [{"properties": {"x": {**A, "type": "object"}}}, {"properties": {"x": {**B, "required": ["b"]}}}]},
        [{"x": {"a": 1, "b": 1}}],
        [{"x": {"a": 1}}, {"x": {"b": 1, "c": 1}}],
    ),
    "a member and additionalProperties": (
        {"allOf": [{"properties": {"x": {**A, "type": "object"}}},
                   {"additionalProperties": {**B, "type": "object", "required": ["b"]}}]},
        [{"x": {"a": 1, "b": 1}}, {"y": {"b": 1}}],
        [{"x": {"a": 1}}, {"x": {"b": 1, "c": 1}}, {"y": {"a": 1, "b": 1}}],
    ),
    "a member and a pattern": (
        {"allOf": [{"properties": {"x": {**A, "type": "object"}}},
                   {"patternProperties": {"^x": {**B, "type": "object", "required": ["b"]}}}]},
        [{"x": {"a": 1, "b": 1}}, {"xy": {"b": 1}}],
        [{"x": {"a": 1}}, {"x": {"b": 1, "c": 1}}, {"y": {}}],
    ),
    "a member and a pattern that begins with anything": (
        {"allOf": [{"properties": {"x": {**A, "type": "object"}}},
                   {"patternProperties": {"(x|z)$": {**B, "type": "object"}}}]},
        [{"x": {"a": 1, "b": 1}}, {"yz": {"b": 1}}],
        [{"x": {"c": 1}}, {"yz": {"c": 1}}, {"y": {}}],
    ),
    "a member and a pattern of two beginnings": (
        {"allOf": [{"properties": {"x": {**A, "type": "object"}}},
                   {"patternProperties": {"^z|^x": {**B, "type": "object"}}}]},
        [{"x": {"a": 1, "b": 1}}, {"z": {"b": 1}}],
        [{"x": {"c": 1}}, {"z": {"c": 1}}, {"y": {}}],
    ),
    "items of two parts": (
        {"type": "array", "items": {**A, "type": "object"}, "allOf": [{"items": {**B, "required": ["b"]}}]},
        [[{"a": 1, "b": 1}]],
        [[{"a": 1}], [{"b": 1, "c": 1}]],
    ),
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


def test_what_depends_on_a_member_names_it_and_others():
    for keyword, needed in (
        ("dependentRequired", {"b": ["c"]}),
        ("dependencies", {"b": ["c"]}),
        ("dependentSchemas", {"b": {"properties": {"c": {}}}}),
    ):
        schema = {**A, keyword: needed}
        close_objects(schema)
        assert list(schema["properties"]) == ["a", "b", "c"] and schema["additionalProperties"] is False


REQUIRED = [{**A, "required": ["a"]}, {**B, "required": ["b"]}]
ELSEWHERE = {
    "a definition beside other keywords": (
        {"properties": {"x": {"$ref": "#/$defs/A"}, "y": {"$ref": "#/$defs/A", **B}}, "$defs": {"A": A}},
        [{"x": {"a": 1}, "y": {"a": 1, "b": 1}}],
        [{"x": {"b": 1}}, {"y": {"c": 1}}],
    ),
    "a definition that is a condition": (
        {
            "properties": {
                "x": {"$ref": "#/$defs/A"},
                "y": {**B, "if": {"$ref": "#/$defs/A"}, "then": {"required": ["b"]}},
            },
            "$defs": {"A": A},
        },
        [{"x": {"a": 1}}, {"y": {"a": 1, "b": 1}}],
        [{"x": {"b": 1}}, {"y": {"a": 1}}, {"y": {"b": 1, "c": 1}}],
    ),
    "oneOf that nothing tells apart": ({"oneOf": REQUIRED}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"a": 1, "c": 1}]),
    "a definition in oneOf that nothing tells apart": (
        {"properties": {"x": {"$ref": "#/$defs/A"}, "y": {"oneOf": [{"$ref": "#/$defs/A"}, REQUIRED[1]]}},
         "$defs": {"A": REQUIRED[0]}},
        [{"x": {"a": 1}, "y": {"b": 1}}, {"y": {"a": 1}}],
        [{"x": {"a": 1, "b": 1}}, {"y": {"a": 1, "b": 1}}, {"y": {"a": 1, "c": 1}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_places_are_closed_where_the_library_reads_no_such_schema(name):
    schema, right, wrong = copy.deepcopy(ELSEWHERE[name])
    close_objects(schema)
    closed = jsonschema.Draft202012Validator(schema)
    assert all(map(closed.is_valid, right)) and not any(map(closed.is_valid, wrong))


def test_a_place_that_refers_to_elsewhere_stays_open():
    for schema in ({**A, "$ref": "http://x/y"}, {"allOf": [A, {"$ref": "#/$defs/none"}]}):
        close_objects(schema)
        assert "additionalProperties" not in schema


def test_objects_are_open_where_that_is_asked_for():
    for schema in (A, {"allOf": [A, B]}, TWO_USES):
        spec = spec_of(StructuredOutput(json_schema=schema, open_objects=True))
        assert json.loads(spec.text) == schema
        assert accepts(backend_of("tiny").compile(spec).matcher(), tiny(), '{"other": 1}')
    with pytest.raises(InvalidRequestError, match="open_objects"):
        StructuredOutput(json_schema=A, open_objects="yes")  # type: ignore[arg-type]


NAMES = "abcx"
_INNER = {"properties": {"p": {"type": "integer"}}}, {"properties": {"q": {}}, "required": ["q"]}
_OBJECTS = [{**inner, "type": "object"} for inner in _INNER]
_MEMBER = st.sampled_from(
    [
        *({}, True, False, {"type": "integer"}, {"type": "string"}, {"const": 1, "type": "string"}, *_INNER, *_OBJECTS),
        {**_OBJECTS[0], "maxProperties": 1},
        {"properties": {"p": {}}, "anyOf": [{"required": ["p"]}, _INNER[1]]},
        {"$ref": "#/$defs/p"},
    ]
)
_OBJECT = st.dictionaries(st.sampled_from(NAMES), st.just(1), max_size=2)
_PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object"),
        "properties": st.dictionaries(st.sampled_from(NAMES), _MEMBER, max_size=2),
        "required": st.lists(st.sampled_from(NAMES + "e"), max_size=1),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}, *_INNER]),
        "patternProperties": st.dictionaries(st.sampled_from(["^c", "^x", "^[bc]"]), _MEMBER, min_size=1, max_size=2),
        "minProperties": st.integers(0, 3),
        "maxProperties": st.integers(0, 3),
    },
)
_RARE = st.fixed_dictionaries(
    {},
    optional={
        "propertyNames": st.sampled_from([{"enum": ["a", "b", "e"]}, {"pattern": "^[cxe]"}, {"not": {"const": "a"}}]),
        "dependentRequired": st.dictionaries(
            st.sampled_from(NAMES + "e"), st.lists(st.sampled_from(NAMES), max_size=1), max_size=1
        ),
        "enum": st.lists(_OBJECT, min_size=1, max_size=2),
        "const": _OBJECT,
        "unevaluatedProperties": st.booleans(),
    },
)
_REFERENCE = st.sampled_from([{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}])
_PARTS = st.recursive(
    st.one_of(_PART, _PART, _REFERENCE, st.builds(lambda part, rare: {**part, **rare}, _PART, _RARE)),
    lambda part: st.builds(
        lambda own, more: {**own, **more},
        _PART,
        st.one_of(
            st.dictionaries(
                st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(part, min_size=1, max_size=3), min_size=1
            ),
            st.fixed_dictionaries({"if": part}, optional={"then": part, "else": part}),
            st.fixed_dictionaries({"not": part}),
            st.fixed_dictionaries({"dependentSchemas": st.dictionaries(st.sampled_from("ae"), part, min_size=1)}),
        ),
    ),
    max_leaves=6,
)
_SCHEMAS = st.builds(lambda root, p, q: {**root, "$defs": {"p": p, "q": q}}, _PARTS, _PART, _PART)
_FLAT = st.sampled_from([1, "s"])
_VALUES = st.dictionaries(
    st.sampled_from(NAMES + "ez"), _FLAT | st.dictionaries(st.sampled_from("pqe"), _FLAT, max_size=2), max_size=4
)


def _parts(value):
    """Yield the value with any of its members left out, and any of theirs: itself at last."""
    if not isinstance(value, dict):
        return [value]
    kept = product(*([None, *_parts(member)] for member in value.values()))
    return [{name: one for name, one in zip(value, members, strict=True) if one is not None} for members in kept]


_EVERY_VALUE = [
    {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    for values in product((None, 1, "s", {}, {"p": 1}, {"q": 1}, {"p": 1, "q": 1}), repeat=len(NAMES))
]


def _is_plain(schema):
    return not any(word in json.dumps(schema) for word in ('"anyOf"', '"oneOf"'))


@pytest.mark.slow
@example({**A, "properties": {"a": {}, "c": {}}, "minProperties": 2, "allOf": [{}]}, [{"a": 1, "b": 1}], False)
@example({"anyOf": [{**A, "minProperties": 3}], "patternProperties": {"^c": {}}}, [{"a": 1, "b": 1, "e": 1}], False)
@example({**A, "patternProperties": {"^a": False}, "minProperties": 1}, [{"e": 1}], False)
@example({"properties": {"a": {}, "b": False}, "minProperties": 2}, [{"a": 1, "e": 1}], False)
@example({**A, "propertyNames": {"const": "e"}, "minProperties": 1}, [{"e": 1}], False)
@example({**A, "allOf": [{"properties": {"a": {"type": "string"}}}], "minProperties": 1}, [{"e": 1}], False)
@example({"properties": {}, "not": {"maxProperties": 0}}, [{"e": 1}], False)
@example({**A, "not": {"properties": {"e": {"type": "string"}}}}, [{"e": 1}], False)
@example({**A, "if": {"maxProperties": 1}, "then": False}, [{"b": 1, "e": 1}], False)
@example({"oneOf": [True, A]}, [{"a": 1, "e": 1}], False)
@example({"oneOf": [{**A, "required": ["a"]}, {**A, "required": ["a"], "maxProperties": 1}]}, [{"a": 1, "e": 1}], False)
@example({"anyOf": [A], "allOf": [{"anyOf": [{"enum": [{"e": 1}]}]}]}, [{"e": 1}], False)
@example({"allOf": [{"properties": {"a": part}, "required": ["a"]} for part in _OBJECTS]}, [{"a": {"q": 1}}], False)
@example(
    {"properties": {"a": _OBJECTS[0]}, "patternProperties": {"^a": _OBJECTS[1]}, "required": ["a"]},
    [{"a": {"q": 1}}],
    False,
)
@given(_SCHEMAS, st.lists(_VALUES, max_size=6), st.booleans())
@settings(max_examples=300)
def test_closing_forbids_other_names_and_nothing_else(schema, values, is_nested):
    if is_nested:
        definitions = schema.pop("$defs")
        schema = {"properties": {"x": schema}, "required": ["x"], "$defs": definitions}
        values = [{"x": value} for value in values]
    closed = json.loads(json.dumps(schema))
    close_objects(closed)
    silent, spoken = (jsonschema.Draft202012Validator(known) for known in (schema, closed))
    for value in values:
        if spoken.is_valid(value):
            assert silent.is_valid(value)
        elif silent.is_valid(value):
            # A part of the value may have too few members, where others that are named would do.
            parts = [{"x": part} for part in _parts(value["x"])] if is_nested else _parts(value)
            every = ({"x": one} if is_nested else one for one in _EVERY_VALUE)
            assert any(map(spoken.is_valid, parts)) or any(map(spoken.is_valid, every)), "nothing fits any more"
            if _is_plain(schema) and not any(isinstance(member, dict) for member in value.values()):
                unevaluated = jsonschema.Draft202012Validator({**schema, "unevaluatedProperties": False})
                assert not unevaluated.is_valid(value)


CHAINS = {
    "anyOf": ({}, lambda following: {"anyOf": [following]}),
    "places": ({"properties": {f"x{i}": {"$ref": f"#/$defs/{i}"} for i in range(900)}}, lambda following: following),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_of_references_is_closed_or_refused_in_bounded_work(name):
    root, link = CHAINS[name]
    links = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(900)}
    schema = {"$ref": "#/$defs/0", **root, "$defs": {**links, "900": A}}
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        close_objects(schema)
    except GrammarError as error:
        assert error.kind == "too_complex"
    finally:
        sys.setprofile(None)
    assert num_calls < 15_000_000


def test_a_schema_that_joins_too_much_is_refused_in_bounded_work():
    named = {"properties": {f"p{i}": {} for i in range(4000)}}
    places = {f"x{i}": {"allOf": [{"$ref": "#/$defs/A"}, B]} for i in range(2000)}
    with pytest.raises(GrammarError, match="additionalProperties") as caught:
        spec_of(StructuredOutput(json_schema={"properties": places, "$defs": {"A": named}}))
    assert caught.value.kind == "too_complex"


def test_members_are_counted_on_where_they_surely_have_a_value():
    """An object of at least one member is closed if one of those that are named can be there."""
    sure = [
        True,
        {},
        {"type": "string"},
        {"enum": [1]},
        {"const": 1},
        {"type": "integer", "minimum": 3},
        {"title": "t"},
    ]
    unsure = [False, {"enum": []}, {"minimum": 3, "maximum": 1}, {"not": {}}, {"type": "integer", "enum": ["x"]}]
    for members, is_closed in ((sure, True), (unsure, False)):
        for member in members:
            schema = {"type": "object", "properties": {"a": member}, "minProperties": 1}
            close_objects(schema)
            assert ("additionalProperties" in schema) is is_closed, member


def test_keywords_of_a_wrong_kind_are_left_for_the_library_to_tell():
    keywords = ("oneOf", "anyOf", "allOf", "properties", "patternProperties", "required", "dependentRequired", "items")
    for keyword in (*keywords, "$defs", "if", "not", "enum", "const", "type", "$ref", "minProperties", "$anchor"):
        for value in (None, 3, "x", {}, {"a": 1}, [], [1], True):
            for part in ({keyword: value}, {"type": "object", "properties": {"a": {}}, keyword: value}):
                for schema in (part, {"properties": {"p": part}}, {"allOf": [part, A]}, {"anyOf": [part]}):
                    try:
                        close_objects(copy.deepcopy(schema))
                    except GrammarError as error:
                        assert error.kind in ("invalid", "too_complex")
