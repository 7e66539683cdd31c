"""JSON schemas: what is refused and where, that nothing usable is, and the place of what llguidance refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aengine import GrammarError
from aengine.structured.schema import check_schema, explain, json_path
from aengine.structured.schema_walk import walk


def refused(schema: Any) -> tuple[str, str]:
    with pytest.raises(GrammarError) as error:
        check_schema(schema)
    if error.value.path:
        assert error.value.path in str(error.value)
    return error.value.kind, error.value.path


DEFS = {
    "$defs": {"a": {"type": "string"}, "b/c d~": {}, "n": {"$anchor": "here"}, "l": {"anyOf": [{}, {"type": "null"}]}}
}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (3, "$"),
        ([], "$"),
        ({"properties": {"age": {"type": "int"}}}, "$.properties.age.type"),
        ({"type": []}, "$.type"),
        ({"type": ["string", "any"]}, "$.type"),
        ({"type": {"string": 1}}, "$.type"),
        ({"properties": []}, "$.properties"),
        ({"properties": {"a": None}}, "$.properties.a"),
        ({"properties": {"a b": {"minimum": "1"}}}, '$.properties["a b"].minimum'),
        ({"required": "a"}, "$.required"),
        ({"properties": {"a": {"required": True}}}, "$.properties.a.required"),
        ({"required": [1]}, "$.required"),
        ({"enum": []}, "$.enum"),
        ({"enum": "a"}, "$.enum"),
        ({"items": {"minLength": -1}}, "$.items.minLength"),
        ({"minLength": True}, "$.minLength"),
        ({"maxItems": 1.5}, "$.maxItems"),
        ({"maximum": True}, "$.maximum"),
        ({"exclusiveMinimum": "1"}, "$.exclusiveMinimum"),
        ({"multipleOf": 0}, "$.multipleOf"),
        ({"uniqueItems": 1}, "$.uniqueItems"),
        ({"anyOf": []}, "$.anyOf"),
        ({"anyOf": {}}, "$.anyOf"),
        ({"anyOf": [{}, {"not": 3}]}, "$.anyOf[1].not"),
        ({"items": [{}, 3]}, "$.items[1]"),
        ({"prefixItems": {}}, "$.prefixItems"),
        ({"format": 1}, "$.format"),
        ({"$schema": 1}, "$.$schema"),
        ({"pattern": 1}, "$.pattern"),
        ({"pattern": "(a"}, "$.pattern"),
        ({"pattern": "a)"}, "$.pattern"),
        ({"pattern": "a\\"}, "$.pattern"),
        ({"patternProperties": {"(": {}}}, '$.patternProperties["("]'),
        ({"dependentRequired": {"a": "b"}}, "$.dependentRequired"),
        ({"dependencies": {"a": 3}}, "$.dependencies.a"),
        ({"$ref": 1}, "$.$ref"),
        ({"items": {"$ref": "#/$defs/x"}, **DEFS}, "$.items.$ref"),
        ({"$ref": "#nowhere", **DEFS}, "$.$ref"),
        ({"$ref": "#/$defs/l/anyOf/2", **DEFS}, "$.$ref"),
        ({"$ref": "#/$defs/a/type", **DEFS}, "$.$ref"),
        ({"$ref": "http://[", "$id": "https://a.b/c"}, "$.$ref"),
        ({"items": {"$id": "http://["}, "$id": "https://a.b/c"}, "$.items.$id"),
        ({"$ref": "#/components/a", "components": {"a": {"type": "strong"}}}, "$.components.a.type"),
    ],
)
def test_what_is_no_schema(schema: Any, path: str) -> None:
    assert refused(schema) == ("invalid", path)


@pytest.mark.parametrize("ref", ["https://example.com/a.json", "other.json#/x", "file:///etc/passwd"])
def test_nothing_is_fetched(ref: str) -> None:
    assert refused({"properties": {"a": {"$ref": ref}}}) == ("unsupported", "$.properties.a.$ref")


def test_a_list_of_values_is_bounded() -> None:
    check_schema({"enum": list(range(100_000))})
    assert refused({"items": {"enum": list(range(100_001))}}) == ("too_complex", "$.items.enum")


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (False, "$"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "$.minLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "$.minItems"),
        ({"type": "object", "minProperties": 3, "maxProperties": 2}, "$.minProperties"),
        ({"type": "number", "minimum": 5, "maximum": 2}, "$.minimum"),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, "$.exclusiveMinimum"),
        ({"type": "number", "minimum": 5, "exclusiveMinimum": True, "maximum": 5}, "$.minimum"),
        ({"type": "number", "minimum": 5, "exclusiveMinimum": 5, "maximum": 5}, "$.exclusiveMinimum"),
        ({"type": "number", "minimum": 5, "maximum": 5, "exclusiveMaximum": 5}, "$.minimum"),
        ({"type": "integer", "minimum": 2.2, "maximum": 2.8}, "$.minimum"),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, "$.exclusiveMinimum"),
        ({"type": "string", "enum": [1, None]}, "$.enum"),
        ({"type": ["string", "null"], "const": 1}, "$.const"),
        ({"type": "integer", "const": True}, "$.const"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "$.properties.a"),
        (
            {"type": "object", "properties": {"a": {"type": "number", "minimum": 1, "maximum": 0}}, "required": ["a"]},
            "$.properties.a.minimum",
        ),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, "$.required[0]"),
        ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "$.maxProperties"),
        ({"type": "array", "items": False, "minItems": 1}, "$.items"),
        ({"type": "array", "prefixItems": [{}, False], "minItems": 2}, "$.prefixItems[1]"),
        ({"type": "array", "items": [{}], "additionalItems": False, "minItems": 2}, "$.additionalItems"),
        ({"allOf": [{}, False]}, "$.allOf[1]"),
        ({"anyOf": [False]}, "$.anyOf[0]"),
        ({"anyOf": [False, {"type": "string", "minLength": 1, "maxLength": 0}]}, "$.anyOf[1].minLength"),
        ({"anyOf": [False, False]}, "$.anyOf"),
        ({"$ref": "#"}, "$.$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$.$defs.b.$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS}}, "$.$defs.a.properties.x.$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": False}}, "$.$ref"),
    ],
)
def test_what_nothing_can_fit(schema: Any, path: str) -> None:
    assert refused(schema) == ("unsatisfiable", path)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"$ref": "#/$defs/a", **DEFS},
        {"$ref": "#/$defs/b~1c%20d~0", **DEFS},
        {"$ref": "#here", **DEFS},
        {"$ref": "#/$defs/l/anyOf/1", **DEFS},
        {"$ref": "https://a.b/c#/$defs/a", "$id": "https://a.b/c", **DEFS},
        {"$id": "https://a.b/c", "$ref": "d", "$defs": {"d": {"$id": "d", "type": "string"}}},
        {"$id": "https://a.b/c", "items": {"$id": "d/", "items": {"$ref": "e"}, "not": {"$id": "e"}}},
        {"maxLength": 2.0},
        {"id": "http://a.b/c", "definitions": {"x": {"id": "#x"}}, "$ref": "#x"},
        {"$ref": "http://json-schema.org/draft-07/schema#"},
        {"type": "object", "properties": {"a": False}},
        {"type": ["string", "null"], "minLength": 5, "maxLength": 2},
        {"minLength": 5, "maxLength": 2},
        {"anyOf": [{"type": "string", "minLength": 5, "maxLength": 2}, {"type": "null"}]},
        {"type": "array", "items": False},
        {"type": "array", "prefixItems": [{}, False], "minItems": 1},
        {"type": "object", "required": ["ab"], "additionalProperties": False, "patternProperties": {"^a": {}}},
        {"type": "object", "properties": {"x": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, ENDLESS], "$defs": {"a": {"$ref": "#"}}},
        {"type": "number", "minimum": 5, "exclusiveMinimum": True},
        {"type": "integer", "const": 1.0},
        {"type": "integer", "exclusiveMinimum": 2.5, "exclusiveMaximum": 3.5},
        {"pattern": "^\\p{L}+[^]()]*(?<name>\\(|[)(])$"},
        {"properties": {"type": {"type": "string"}, "$ref": {"type": "string"}, "enum": True}},
        {"enum": [{"type": 3, "$ref": 4}], "const": {"not": 1}, "default": {"minLength": "x"}, "examples": 3},
        {"x-vendor": {"type": 3}, "nullable": True, "discriminator": {"propertyName": "a"}},
        {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_what_can_be_used(schema: Any) -> None:
    check_schema(schema)


def test_a_long_schema_takes_a_bounded_number_of_passes() -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i - 1}"} for i in range(1, 3000)}
    check_schema({"$ref": "#/$defs/a2999", "$defs": {"a0": {"type": "null"}, **chain}})


# ---- against a validator

NAMES = st.sampled_from(["a", "b"])
SMALL = st.integers(-1, 3)
COUNT = st.integers(0, 3)
SCALARS = st.sampled_from([None, True, 0, 1, 1.5, 2, "", "x", "xy", "xyz"])
INSTANCES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2), max_leaves=5
)
KINDS = st.sampled_from(["array", "boolean", "integer", "null", "number", "object", "string"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True),
            "enum": st.lists(SCALARS, min_size=1, max_size=2),
            "const": SCALARS,
            "minLength": COUNT,
            "maxLength": COUNT,
            "minimum": SMALL,
            "maximum": SMALL | st.just(1.5),
            "exclusiveMinimum": SMALL,
            "exclusiveMaximum": SMALL,
            "minItems": COUNT,
            "maxItems": COUNT,
            "minProperties": COUNT,
            "maxProperties": COUNT,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "items": inner,
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(NAMES, inner, max_size=1),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b"]),
        },
    )


SCHEMAS = st.recursive(st.booleans() | st.builds(dict), schemas, max_leaves=6)
ROOTS = st.builds(
    lambda root, a, b: {**root, "$defs": {"a": a, "b": b}} if isinstance(root, dict) else root,
    SCHEMAS,
    SCHEMAS,
    SCHEMAS,
)


def turns_in_place(root: Any) -> bool:
    """Whether a validator may come to a schema again with the same instance: then it recurses until it fails."""
    targets = {"#": root, **{f"#/$defs/{name}": part for name, part in root["$defs"].items()}}

    def visit(schema: Any, above: tuple[int, ...]) -> bool:
        if not isinstance(schema, dict):
            return False
        if id(schema) in above:
            return True
        next_ = [targets[schema["$ref"]]] if "$ref" in schema else []
        next_ += [schema["not"]] if "not" in schema else []
        next_ += [member for keyword in ("allOf", "anyOf", "oneOf") for member in schema.get(keyword, ())]
        return any(visit(part, (*above, id(schema))) for part in next_)

    return any(visit(part, ()) for _, part in walk(root))


@given(ROOTS, INSTANCES)
@settings(max_examples=400)
def test_what_has_a_value_is_not_refused(schema: Any, instance: Any) -> None:
    """A schema that the instance fits, by a validator, can't be called unsatisfiable."""
    jsonschema = pytest.importorskip("jsonschema")
    assume(isinstance(schema, bool) or not turns_in_place(schema))
    if jsonschema.Draft202012Validator(schema).is_valid(instance):
        check_schema(schema)


KEYWORDS = ["type", "enum", "required", "properties", "items", "minLength", "minimum", "multipleOf", "anyOf", "pattern"]
ANY = st.sampled_from(["string", "", "(", 1, -1, 0, 1.5, True, None, [], ["string"], ["a", 1], {}, {"a": {}}, {"a": 1}])


@given(st.dictionaries(st.sampled_from(KEYWORDS), ANY, min_size=1, max_size=3))
@settings(max_examples=400)
def test_what_the_metaschema_takes_is_a_schema(schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    try:
        check_schema(schema)
        kind = ""
    except GrammarError as error:
        kind = error.kind
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        metaschema_takes = True
    except jsonschema.SchemaError:
        metaschema_takes = False
    # The metaschema calls an empty enum fine, and looks into no pattern.
    if metaschema_takes and schema.get("enum") != [] and schema.get("pattern") != "(":
        assert kind != "invalid"
    if not metaschema_takes and not (isinstance(schema.get("items"), list) or _is_repeated(schema)):
        assert kind == "invalid"


def _is_repeated(schema: dict[str, Any]) -> bool:
    return schema.get("required") == ["a", "a"]


# ---- where a keyword is


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


@pytest.fixture(scope="module")
def refusal() -> Callable[[Any], str]:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")

    def of(schema: Any) -> str:
        options = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            return str(error)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        assert matcher.is_error(), "llguidance takes it: choose another example"
        return matcher.get_error()

    return of


def under_a(schema: Any) -> Any:
    """As a property, behind data and a name that look like the keyword."""
    decoy = {key: 1 for key in schema if key.isalpha()}
    return {
        "type": "object",
        "examples": [decoy],
        "properties": {
            **{name: {"type": "string", "default": "x"} for name in decoy},
            "ok": {"enum": [decoy, "x"]},
            "at": schema,
        },
        "required": ["at"],
    }


@pytest.mark.parametrize(
    ("schema", "kind", "keyword"),
    [
        ({"not": {"type": "string"}}, "unsupported", ".not"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "unsupported", ".oneOf"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {}, "else": {}}, "unsupported", ".if"),
        ({"type": "array", "uniqueItems": True}, "unsupported", ".uniqueItems"),
        ({"type": "string", "format": "made-up"}, "unsupported", ".format"),
        ({"type": "object", "patternProperties": {"^(?!x)": {}}}, "unsupported", '.patternProperties["^(?!x)"]'),
        ({"type": "string", "pattern": "^(?!x)"}, "unsupported", ".pattern"),
        ({"type": "string", "pattern": "(a)\\1"}, "unsupported", ".pattern"),
        ({"type": "string", "pattern": "[z-a]"}, "invalid", ".pattern"),
        ({"type": "string", "pattern": "*a"}, "invalid", ".pattern"),
        ({"type": "array", "contains": {"type": "string"}}, "unsupported", ".contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "unsupported", ".dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unsupported", ".unevaluatedProperties"),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 2}, "unsupported", ".maxProperties"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "unsupported", ".propertyNames"),
        ({"$dynamicRef": "#a"}, "unsupported", ".$dynamicRef"),
        ({"$ref": "https://x.y/z"}, "unsupported", ".$ref"),
        ({"$ref": "#/$defs/nowhere"}, "invalid", ".$ref"),
        ({"type": "number", "multipleOf": 1e-30}, "too_complex", ".multipleOf"),
        ({"type": "string", "maxLength": 10**12}, "too_complex", ".maxLength"),
        ({"type": "strong"}, "invalid", ".type"),
        ({"type": "string", "minLength": -1}, "invalid", ".minLength"),
        ({"type": "object", "properties": []}, "invalid", ".properties"),
        ({"additionalProperties": 1, "type": "object"}, "invalid", ".additionalProperties"),
    ],
)
def test_the_place_of_what_llguidance_refuses(
    schema: Any, kind: str, keyword: str, refusal: Callable[[Any], str]
) -> None:
    whole = under_a(schema)
    assert explain(json.dumps(whole), refusal(whole)) == (kind, "$.properties.at" + keyword)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "string", "minLength": 5, "maxLength": 2}, "$.minLength"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "$.minimum"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "$.required"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "$.allOf"),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, "$.pattern"),
        ({"$ref": "#"}, ""),
    ],
)
def test_the_place_of_what_llguidance_finds_unsatisfiable(
    schema: Any, path: str, refusal: Callable[[Any], str]
) -> None:
    assert explain(json.dumps(schema), refusal(schema)) == ("unsatisfiable", path)


def test_a_one_of_whose_types_differ_is_not_at_fault(refusal: Callable[[Any], str]) -> None:
    schema = {"prefixItems": [{"oneOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{}, {"type": "null"}]}]}
    assert explain(json.dumps(schema), refusal(schema)) == ("unsupported", "$.prefixItems[1].oneOf")


def test_a_limit_is_too_complex(refusal: Callable[[Any], str]) -> None:
    schema: dict[str, Any] = {}
    for _ in range(130):
        schema = {"items": schema}
    assert explain(json.dumps(schema), refusal(schema)) == ("too_complex", "")


@given(
    ROOTS, st.text() | st.sampled_from(["Unimplemented keys: [", "Invalid type: x", "regex parse error", "Pointer ''"])
)
def test_explain_never_fails(schema: Any, message: str) -> None:
    kind, path = explain(json.dumps(schema), message)
    assert kind in ("invalid", "unsupported", "unsatisfiable", "too_complex") and isinstance(path, str)
