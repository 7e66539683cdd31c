"""What llguidance reads wrongly is told to it otherwise, and what can't be enforced is said."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aengine import GrammarError, StructuredOutput
from aengine.engine.structured.backend import Compiled
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
from aengine.engine.structured.llguidance.json_schema import left_out_of, make_readable
from aengine.engine.structured.patterns import rust_pattern
from aengine.engine.structured.spec import MAX_DEPTH, spec_of
from aengine.engine.structured.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def letters() -> LLGuidanceBackend:
    """A token a byte, and the end."""
    tokens = [bytes([byte]) for byte in range(128)]
    return LLGuidanceBackend(Vocabulary(129, (*tokens, b""), (128,), frozenset({128})))


def compiled(backend: LLGuidanceBackend, schema: Any, *, relax: bool = False) -> Compiled:
    return backend.compile(spec_of(StructuredOutput(json_schema=schema, on_unsupported="relax" if relax else "error")))


def accepts(grammar: Compiled, text: str) -> bool:
    matcher = grammar.matcher()
    return matcher.accept(list(text.encode())) == len(text) and matcher.is_accepting


def test_the_deepest_schema_is_read(letters: LLGuidanceBackend) -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        schema = {"items": schema}
    assert accepts(compiled(letters, schema), "[[1]]")
    with pytest.raises(GrammarError, match="deeper than"):
        compiled(letters, {"items": schema})


BOUNDS = (-10, -1.5, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 1.5, 2, 10, 10.5)
NUMBERS = ("0", "-0", "0.0", "0.05", "0.1", "0.5", "-0.5", "-0.05", "1", "-1", "1.0", "1.25", "-1.0", "-1.25", "1.5")
NUMBERS += ("2", "-2", "10", "10.0", "10.25", "10.5", "-10")


def test_bounds_that_are_left_out_are_left_out(letters: LLGuidanceBackend) -> None:
    """The library's own reading takes 0 for {"exclusiveMinimum": 0, "maximum": 0.5}."""
    names = [*itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))]
    for low, high in itertools.combinations(BOUNDS, 2):
        for lower, upper in names:
            schema = {"type": "number", lower: low, upper: high}
            grammar, judge = compiled(letters, schema), Draft202012Validator(schema)
            for text in NUMBERS:
                accepted, fits = accepts(grammar, text), judge.is_valid(json.loads(text))
                assert fits or not accepted, (schema, text)
                if low < json.loads(text) < high and json.loads(text) > 0:  # at a bound, 1.0 may not do for 1
                    assert accepted, (schema, text)


def test_what_needs_no_change_is_not_changed() -> None:
    schema = {
        "type": "object",
        "properties": {"exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 0, "maximum": 1}, "uniqueItems": {}},
        "enum": [{"uniqueItems": False}],
        "exclusiveMinimum": 0,
        "maximum": 1,
        "propertyNames": {"maxLength": 3},
        "uniqueItems": True,
    }
    before = copy.deepcopy(schema)
    assert make_readable(schema, relax=False) == () and schema == before


FAULT = {"pattern": "(?=a)b"}
NAMED = {"properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 2}


@pytest.mark.parametrize(
    ("schema", "readable", "left_out"),
    [
        ({"x-guidance": {"lenient": True}}, {}, []),
        ({"properties": {"x-guidance": {}}}, {"properties": {"x-guidance": {}}}, []),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"exclusiveMinimum": 1e-12, "maximum": 0.5}, []),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, {"exclusiveMaximum": -1e-12, "minimum": -0.5}, []),
        ({"exclusiveMinimum": 2, "maximum": 2.5}, {"exclusiveMinimum": 2 + 2e-12, "maximum": 2.5}, []),
        ({"exclusiveMaximum": -2, "minimum": -2.5}, {"exclusiveMaximum": -2 - 2e-12, "minimum": -2.5}, []),
        *(
            (schema, schema, [])
            for schema in (
                {"exclusiveMinimum": 0, "maximum": 0.5, "type": "integer"},
                {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"exclusiveMinimum": -1, "maximum": -0.5},
                {"exclusiveMaximum": 1, "minimum": 0.5},
                {"exclusiveMinimum": 0.25, "maximum": 0.5},
                {"exclusiveMinimum": 0, "maximum": True},
                {"patternProperties": {"^a": {}, "^b": {}}, "additionalProperties": False},
            )
        ),
        (
            {"patternProperties": {"a": {}, r"\x61": {}}, "additionalProperties": False},
            {"patternProperties": {"a": {}}, "additionalProperties": True},
            [r'$.patternProperties["\\x61"]'],
        ),
        ({"const": [2**53 + 1]}, {"allOf": [{"type": "array"}]}, ["$.const"]),
        (
            {"enum": ["x", {"a": 2**53 + 1}, 2**53 + 1], "allOf": [True]},
            {"allOf": [True, {"anyOf": [{"enum": ["x"]}, {"type": "object"}, {"type": "number"}]}]},
            ["$.enum[1]", "$.enum[2]"],
        ),
        (NAMED, {"properties": {"a": {}, "b": {}}}, ["$.minProperties", "$.maxProperties"]),
        *(
            (NAMED | more, NAMED | more, [])
            for more in (
                {"required": ["a", "b"]},
                {"required": ["a", "b", "c"]},
                {"additionalProperties": False},
                {"additionalProperties": False, "patternProperties": {}},
                {"properties": []},
            )
        ),
        (
            NAMED | {"additionalProperties": False, "patternProperties": {"^c": {}}},
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "patternProperties": {"^c": {}}},
            ["$.minProperties", "$.maxProperties"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_is_written_for_the_library(schema: Any, readable: Any, left_out: list[str]) -> None:
    changed = json.loads(json.dumps(schema))
    said = make_readable(changed, relax=True)
    assert changed == readable and [text.partition(" is not enforced: ")[0] for text in said] == left_out


def test_faults_in_what_nothing_refers_to_are_none() -> None:
    for refs, is_used in (
        ([], False),
        (["#/$defs/other"], False),
        (["#/$defs/a~1b"], True),
        (["#/$defs/a~1b/items"], True),
        (["#/$defs/0", "#/$defs/a%7E1b", "#/$defs/z"], True),
        (["elsewhere#name"], True),
    ):
        schema = {"anyOf": [{"$ref": ref} for ref in refs], "$defs": {"a/b": {**FAULT}, "other": {}, "0": {}, "z": {}}}
        if is_used:
            with pytest.raises(GrammarError) as caught:
                make_readable(schema, relax=False)
            assert caught.value.path == '$.$defs["a/b"].pattern'
        else:
            assert make_readable(schema, relax=False) == ()
    with pytest.raises(GrammarError):
        make_readable({"items": {**FAULT}, "$defs": {}}, relax=False)


def test_a_whole_number_is_an_integer_where_one_is_meant(letters: LLGuidanceBackend) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 2.0}, "minItems": 1e0}
    grammar = compiled(letters, schema)
    assert accepts(grammar, '["ab"]') and not accepts(grammar, '["abc"]') and not accepts(grammar, "[]")
    with pytest.raises(GrammarError) as caught:
        compiled(letters, {"type": "string", "maxLength": 2.5})
    assert caught.value.path == "$.maxLength"


@pytest.mark.parametrize("limit", [{}, True, {"type": "string"}])
def test_keywords_that_say_nothing_are_no_fault(letters: LLGuidanceBackend, limit: Any) -> None:
    schema = {
        "type": "array",
        "uniqueItems": False,
        "items": {"type": "object", "propertyNames": limit, "additionalProperties": {"type": "integer"}},
    }
    assert accepts(compiled(letters, schema), '[{"a": 1}, {"a": 1}]')
    with pytest.raises(GrammarError) as caught:
        compiled(letters, schema | {"uniqueItems": True})
    assert caught.value.path == "$.uniqueItems"


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?=.*\d)[a-z\d]{4,8}$",
        "^(?!x)a+$",
        "(?<=a)b",
        "(?<!a)b",
        r"\bfoo\b",
        r"^a\Bb",
        r"(a)\1",
        "(?>a)b",
    ],
)
def test_a_pattern_of_another_dialect_has_a_place_and_can_be_left_out(letters: LLGuidanceBackend, pattern: str) -> None:
    schema = {"type": "object", "properties": {"e": {"type": "string", "pattern": pattern}}, "required": ["e"]}
    schema["additionalProperties"] = False
    with pytest.raises(GrammarError) as caught:
        compiled(letters, schema)
    assert caught.value.path == "$.properties.e.pattern" and caught.value.kind in ("unsupported", "invalid")
    grammar = compiled(letters, schema, relax=True)
    assert accepts(grammar, '{"e": "anything"}')
    (warning,) = grammar.warnings
    assert warning.startswith("$.properties.e.pattern is not enforced: ")
    assert left_out_of(json.dumps(schema)) == grammar.warnings


@pytest.mark.parametrize("pattern", [r"\\b", r"a\\1", "[(]?=", r"\(?=", r"\d{2}", "(?:a)", "(?i)a", r"\p{L}", ""])
def test_patterns_that_only_look_so(pattern: str) -> None:
    rust_pattern(pattern)


def test_what_is_left_out_of_many_definitions_takes_linear_work():
    schema = {
        "properties": {f"x{i}": {"$ref": f"#/$defs/e{i}"} for i in range(2000)},
        "$defs": {f"{kind}{i}": {"type": "string", "pattern": "(?=a)b"} for kind in "de" for i in range(2000)},
    }
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        warnings = make_readable(schema, relax=True)
    finally:
        sys.setprofile(None)
    assert len(warnings) == 2000
    assert num_calls < 4_000_000
