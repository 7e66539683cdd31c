"""JSON schemas that are refused: of which kind the error is, and the place that it names."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from grammar_helpers import backend_of
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine import GrammarError, StructuredOutput
from aengine.engine.structured.llguidance.faults import grammar_error
from aengine.engine.structured.schema_walk import json_path, pointed_at, relocated, walk
from aengine.engine.structured.spec import GrammarSpec, spec_of


def refused(schema: Any) -> tuple[str, str]:
    with pytest.raises(GrammarError) as caught:
        backend_of("tiny").compile(spec_of(StructuredOutput(json_schema=schema)))
    assert caught.value.path in ("$", "") or caught.value.path in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value.kind, caught.value.path


DEFS = {"$defs": {"a": {"type": "string"}, "b/c d~": {"type": "strong"}, "l": {"anyOf": [{}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("[]", "$"),
        ("3", "$"),
        ({"properties": {"age": {"type": "int"}}}, "$.properties.age.type"),
        ({"type": ["string", "any"]}, "$.type"),
        ({"type": {"string": 1}}, "$.type"),
        ({"properties": []}, "$.properties"),
        ({"properties": {"a b": {"minimum": "1"}}}, '$.properties["a b"].minimum'),
        ({"required": "a"}, "$.required"),
        ({"properties": {"a": {"required": True}}}, "$.properties.a.required"),
        ({"items": {"minLength": -1}}, "$.items.minLength"),
        ({"maxItems": 1.5}, "$.maxItems"),
        ({"exclusiveMinimum": "1"}, "$.exclusiveMinimum"),
        ({"anyOf": {}}, "$.anyOf"),
        ({"format": 1}, "$.format"),
        ({"pattern": "(a"}, "$.pattern"),
        ({"pattern": 1}, "$.pattern"),
        ({"patternProperties": {"(": {}}}, '$.patternProperties["("]'),
        ({"$ref": 1}, "$.$ref"),
        ({"items": {"$ref": "#/$defs/b~1c%20d~0"}, **DEFS}, '$.$defs["b/c d~"].type'),
        ({"$ref": "#/components/a", "components": {"a": {"type": "strong"}}}, "$.components.a.type"),
    ],
    ids=str,
)
def test_what_is_no_schema(schema: Any, path: str) -> None:
    assert refused(schema) == ("invalid", path)


@pytest.mark.parametrize("ref", ["https://example.com/a.json", "other.json#/x", "file:///etc/passwd"])
def test_nothing_is_fetched(ref: str) -> None:
    kind, path = refused({"properties": {"a": {"$ref": ref}}})
    assert (kind, path) == ("unsupported", "$.properties.a.$ref")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "string", "minLength": 5, "maxLength": 2}, "$.minLength"),
        ({"type": "number", "minimum": 5, "maximum": 5, "exclusiveMaximum": 5}, "$.minimum"),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, "$.pattern"),
        ({"allOf": [{}, False]}, ""),
        ({"anyOf": [False, {"type": "string", "minLength": 1, "maxLength": 0}]}, "$.anyOf[1].minLength"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "$.required"),
        (
            {"type": "object", "properties": {"a": {"type": "number", "minimum": 1, "maximum": 0}}, "required": ["a"]},
            "$.properties.a.minimum",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "enum": ["x"]}}}, "$.$defs.a"),
        ({"$ref": "#"}, ""),
        (False, "$"),
    ],
    ids=str,
)
def test_what_nothing_can_fit(schema: Any, path: str) -> None:
    assert refused(schema) == ("unsatisfiable", path)


def under_a(schema: Any) -> Any:
    """As a property, behind data and names that look like the keyword."""
    decoy = {key: 1 for key in schema if key.isalpha()}
    return {
        "type": "object",
        "examples": [decoy],
        "properties": {
            **{name: {"type": "string", "default": "x"} for name in decoy},
            "ok": {"enum": [decoy, "x"]},
            "at": {"$ref": "#/$defs/at"},
        },
        "required": ["at"],
        "$defs": {"unused": schema, "at": schema},
    }


@pytest.mark.parametrize(
    ("schema", "kind", "keyword"),
    [
        ({"not": {"type": "string"}}, "unsupported", ".not"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "unsupported", ".oneOf"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {}, "else": {}}, "unsupported", ".else"),
        ({"type": "array", "uniqueItems": True}, "unsupported", ".uniqueItems"),
        ({"type": "string", "format": "made-up"}, "unsupported", ".format"),
        ({"type": "object", "patternProperties": {"^(?!x)": {}}}, "unsupported", '.patternProperties["^(?!x)"]'),
        ({"type": "string", "pattern": "^(?!x)"}, "unsupported", ".pattern"),
        ({"type": "string", "pattern": "[z-a]"}, "invalid", ".pattern"),
        ({"type": "array", "contains": {"type": "string"}}, "unsupported", ".contains"),
        ({"type": "object", "unevaluatedProperties": False}, "unsupported", ".unevaluatedProperties"),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 2}, "unsupported", ".maxProperties"),
        ({"$dynamicRef": "#a"}, "unsupported", ".$dynamicRef"),
        ({"type": "number", "multipleOf": 1e-30}, "too_complex", ".multipleOf"),
        ({"type": "strong"}, "invalid", ".type"),
    ],
    ids=str,
)
def test_the_place_is_where_a_schema_is_used(schema: Any, kind: str, keyword: str) -> None:
    assert refused(under_a(schema)) == (kind, "$.$defs.at" + keyword)


@pytest.mark.parametrize("schema", [{"pattern": "^(?!x)"}, {"const": 2**60 + 1}], ids=str)
def test_what_is_only_defined_is_not_at_fault(schema: Any) -> None:
    whole = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"unused": schema, "a": {"type": "string"}}}
    assert not backend_of("tiny").compile(spec_of(StructuredOutput(json_schema=whole))).warnings
    whole["$defs"]["a"] = {"$ref": "#/$defs/unused"}
    assert refused(whole)[0] == "unsupported"


def test_a_one_of_whose_types_differ_is_not_at_fault() -> None:
    schema = {"prefixItems": [{"oneOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{}, {"type": "null"}]}]}
    assert refused(schema) == ("unsupported", "$.prefixItems[1].oneOf")


@pytest.mark.timeout(30)
def test_a_search_among_thousands_ends() -> None:
    """Each part is compiled by itself: so it is given a time."""
    properties = {f"p{i}": {"type": "object", "properties": {"a": {"enum": list(range(9))}}} for i in range(1200)}
    kind, path = refused({"type": "object", "properties": properties, "required": list(properties), "not": {}})
    assert (kind, path) == ("unsupported", "$.not")


@given(
    st.recursive(st.booleans() | st.integers(), lambda x: st.dictionaries(st.sampled_from("ab"), x), max_leaves=5),
    st.text() | st.sampled_from(["Unimplemented keys: [", "Invalid type: x", "regex parse error", "Pointer ''"]),
)
@settings(max_examples=50)
def test_no_message_is_beyond_it(properties: Any, message: str) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"properties": properties, "pattern": "("}))
    error = grammar_error(spec, message)
    assert error.kind in ("invalid", "unsupported", "unsatisfiable", "too_complex") and len(str(error)) < 600


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["(?s:.{1})", "regex parse error ", "error: ", "1(2): ", "in regex /", "too "])
@pytest.mark.timeout(30)
def test_long_messages_take_time_as_they_grow(unit: str) -> None:
    """They show what callers wrote."""
    grammar_error(GrammarSpec("json_schema", '{"pattern":"("}'), unit * (600_000 // len(unit)))


def test_walk_meets_every_schema_once_in_order() -> None:
    schema = {
        "properties": {"not": {"items": [True, {"enum": [{"not": {}}]}]}, "b": {}},
        "default": {"not": {}},
        "anyOf": [{"x-unknown": {"not": {}}}],
        "dependencies": {"a": ["b"], "c": {"then": {}}},
    }
    assert [json_path(path) for path, _ in walk(schema)] == [
        "$",
        "$.properties.not",
        "$.properties.not.items[0]",
        "$.properties.not.items[1]",
        "$.properties.b",
        "$.anyOf[0]",
        "$.dependencies.c",
        "$.dependencies.c.then",
    ]


def test_references_follow_a_schema_to_its_new_place() -> None:
    schema = {
        "$id": "https://a.b/c",
        "properties": {"$ref": {"$ref": "#/$defs/x"}, "enum": {"$ref": "https://a.b/c#/$defs/x"}},
        "items": {"$ref": "#"},
        "anyOf": [{"$ref": "https://other/d"}, {"$ref": "#anchor"}],
        "const": {"$ref": "#/$defs/x"},
        "components": [{"$ref": "#/$defs/x"}],
    }
    assert relocated(schema, "#/$defs/r") == {
        "properties": {"$ref": {"$ref": "#/$defs/r/$defs/x"}, "enum": {"$ref": "#/$defs/r/$defs/x"}},
        "items": {"$ref": "#/$defs/r"},
        "anyOf": [{"$ref": "https://other/d"}, {"$ref": "#anchor"}],
        "const": {"$ref": "#/$defs/x"},
        "components": [{"$ref": "#/$defs/r/$defs/x"}],
    }


def test_a_pointer_leads_to_what_it_names_and_nowhere_else() -> None:
    root = {"a/b": {"~": [1, {"x y": 2}], "~1": 3}, "0": {"1": "named"}, "list": [[10, 11], 12], "": {"%": 4}}

    def check(value: Any, path: tuple[Any, ...], ref: str) -> None:
        assert pointed_at(root, ref) == (path, value)
        members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, member in members:
            check(member, (*path, key), ref + "/" + quote(str(key).replace("~", "~0").replace("/", "~1")))

    check(root, (), "#")
    for ref in (
        "list/2",
        "list/-1",
        "list/x",
        "list/\u00b2",
        "list/0000000001",
        "list/1/0",
        "b",
        "0/2",
        "a~1b/~0/1/x/0",
    ):
        assert pointed_at(root, f"#/{ref}") is None


def test_a_message_is_one_line_with_its_place_and_no_picture() -> None:
    def told(kind: Any, message: str) -> str:
        return str(grammar_error(GrammarSpec(kind, "x"), message))

    picture = "12(34): expected a rule\n  |\n  | start: ;\n"
    for kind in ("lark", "ebnf"):
        assert told(kind, picture).endswith("line 12, column 34: expected a rule")
    assert "line 12" not in told("regex", picture) and told("regex", picture).endswith("expected a rule")
    assert told("regex", "\n  first  \nsecond").endswith("first")
    assert told("regex", "regex parse error:\n   (\n   ^\nerror: unclosed group (in regex)").endswith("unclosed group")
    for length in (300, 301):
        shown = told("regex", "y" * length).rpartition(" ")[2]
        assert shown == ("y" * 300 if length == 300 else "y" * 297 + "...")
