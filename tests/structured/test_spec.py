"""What a request asks for becomes a spec: canonical, bounded, and refused with its place."""

from __future__ import annotations

import enum
import json
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine import GrammarError, StructuredOutput
from aengine.engine.structured import spec
from aengine.engine.structured.spec import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    MAX_NUMBER_BITS,
    MAX_PATTERN_BYTES,
    GrammarSpec,
    check_schema_size,
    plain_json,
    spec_of,
)


def schema_spec(schema: Any, **options: Any) -> GrammarSpec:
    return spec_of(StructuredOutput(json_schema=schema, **options))


def refused(schema: Any) -> GrammarError:
    with pytest.raises(GrammarError) as error:
        schema_spec(schema)
    return error.value


def nested(depth: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def test_each_kind() -> None:
    assert schema_spec({"type": "object"}) == GrammarSpec("json_schema", '{"type":"object"}')
    assert schema_spec(True).text == "true"
    assert spec_of(StructuredOutput(json_object=True)) == schema_spec({"type": "object"})
    assert spec_of(StructuredOutput(regex="a+")) == GrammarSpec("regex", "a+")
    assert spec_of(StructuredOutput(choice=("yes", 'n"é'))) == GrammarSpec("choice", '["yes","n\\"é"]')


@pytest.mark.parametrize(("pattern", "is_right"), [("a\\\\", True), ("a\\", False), ("\\\\\\", False), ("\\", False)])
def test_a_regex_that_ends_with_a_lone_backslash_is_refused(pattern: str, is_right: bool) -> None:
    """The library would take "a" for it."""
    if is_right:
        assert spec_of(StructuredOutput(regex=pattern)).text == pattern
        return
    with pytest.raises(GrammarError, match="lone backslash") as caught:
        spec_of(StructuredOutput(regex=pattern))
    assert caught.value.kind == "invalid"


def test_options() -> None:
    spec = schema_spec({}, whitespace="any", on_unsupported="relax", backend="other")
    assert (spec.whitespace, spec.relax, spec.backend) == ("any", True, "other")
    spec = schema_spec({}, backend="auto")
    assert (spec.whitespace, spec.relax, spec.backend) == ("compact", False, "llguidance")


def test_equal_schemas_are_one_grammar_and_the_order_of_properties_counts() -> None:
    schema = {"properties": {"b": {"type": "string"}, "a": {}}, "required": ("b",)}
    assert schema_spec(schema) == schema_spec(json.dumps(schema, indent=4))
    assert hash(schema_spec(schema)) == hash(schema_spec(types.MappingProxyType(schema)))
    assert schema_spec({"properties": {"a": {}, "b": {}}}) != schema_spec({"properties": {"b": {}, "a": {}}})


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        ('start: "a"', "lark"),
        ('# EBNF is ::=\n  start: x\nx: "::="', "lark"),
        ('?start: "a"', "lark"),
        ('%llguidance {}\nroot: "a"', "lark"),
        ('start[capture]: "a"', "lark"),
        ('root ::= "start: "', "ebnf"),
        ('root ::= x\nx ::= "a"', "ebnf"),
        ('<root> ::= "a"', "ebnf"),
        ('my-rule ::=\n  "start: x"', "ebnf"),
        ('start ::= "a"', "ebnf"),
    ],
)
def test_the_notation_of_a_grammar(grammar: str, kind: str) -> None:
    assert spec_of(StructuredOutput(grammar=grammar)) == GrammarSpec(kind, grammar)  # type: ignore[arg-type]


@pytest.mark.parametrize("grammar", ["", "hello", 'begin: "a"', '"start: x"'])
def test_a_grammar_in_no_notation(grammar: str) -> None:
    with pytest.raises(GrammarError, match="no known notation") as error:
        spec_of(StructuredOutput(grammar=grammar))
    assert error.value.kind == "invalid"


class Level(enum.IntEnum):
    LOW = 1


class Name(enum.StrEnum):
    A = "a"


def test_plain_json_makes_plain_copies() -> None:
    source = {"a": (1, 2.5, True, None), Name.A: Level.LOW, "m": types.MappingProxyType({"x": Name.A})}
    copy = plain_json(source)
    assert copy == {"a": 1, "m": {"x": "a"}} | {"a": Level.LOW}
    assert type(copy["a"]) is int and type(copy["m"]) is dict and type(copy["m"]["x"]) is str
    assert all(type(key) is str for key in copy)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_plain_json_keeps_values_and_order(value: Any) -> None:
    assert json.dumps(plain_json(value)) == json.dumps(value)


@given(JSON)
def test_text_and_mapping_are_the_same(value: Any) -> None:
    schema = {"default": value}
    assert schema_spec(schema) == schema_spec(json.dumps(schema))
    assert json.loads(schema_spec(schema).text) == schema


def cyclic() -> Any:
    inner: list[Any] = []
    inner.append({"deep": inner})
    return {"default": inner}


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"default": {1, 2}}, "$.default", "of type set"),
        ({"default": [0, b"x"]}, "$.default[1]", "of type bytes"),
        ({"default": {"a": {"b": 1}, "c": [[0], {"d": b"x"}]}}, "$.default.c[1].d", "of type bytes"),
        ({"default": {"a b": float("nan")}}, '$.default["a b"]', "nan"),
        ({"default": float("inf")}, "$.default", "inf"),
        ('{"default": 1e999}', "$.default", "inf"),
        ('{"default": [NaN]}', "$.default[0]", "nan"),
        ({"default": {1: 2}}, "$.default", "key 1"),
        ({None: 2}, "$", "key None"),
        ({"default": "\ud800"}, "$.default", "surrogate"),
        ({"\ud800": 1}, '$["\\ud800"]', "surrogate"),
        ('{"default": "\\ud800"}', "$.default", "surrogate"),
        (cyclic(), "$.default[0].deep", "part of"),
        ({"default": 1 << MAX_NUMBER_BITS}, "$.default", "bits"),
        ('{"default": ' + "9" * 5000 + "}", "", "not JSON"),
        ("{", "", "not JSON"),
        ('"\ud800"', "$", "surrogate"),
        ("", "", "not JSON"),
        ("{} x", "", "not JSON"),
        ("[" * 100, "", "not JSON"),
        ("]" * 100, "", "not JSON"),
    ],
)
def test_what_is_not_json_is_refused_with_its_path(schema: Any, path: str, reason: str) -> None:
    error = refused(schema)
    assert (error.kind, error.path) == ("invalid", path)
    assert reason in str(error)


def test_depth() -> None:
    schema_spec(nested(MAX_DEPTH))
    schema_spec(json.dumps(nested(MAX_DEPTH)))
    for schema in (nested(MAX_DEPTH + 1), json.dumps(nested(MAX_DEPTH + 1)), nested(100_000), "[" * 500_000):
        assert refused(schema).kind == "too_complex"
    assert schema_spec('{"default": "' + "[" * 500 + '\\"{{{{"}'), "brackets in a string are no depth"


def test_a_small_schema_that_is_huge_when_written() -> None:
    shared: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 2):
        shared = {"a": shared, "b": shared}
    assert refused({"default": shared}).kind == "too_complex"


def test_size() -> None:
    room = MAX_JSON_BYTES - len('{"default":""}')
    largest = schema_spec({"default": "x" * room})
    assert len(largest.text) == MAX_JSON_BYTES and schema_spec(largest.text) == largest
    check_schema_size(largest.text)
    with pytest.raises(GrammarError, match="larger than 1024 KiB"):
        check_schema_size(largest.text + " ")
    for schema in ({"default": "x" * (room + 1)}, {"default": "é" * (room // 2 + 1)}, " " * MAX_JSON_BYTES + "{}"):
        assert refused(schema).kind == "too_complex"


@pytest.mark.parametrize("name", ["regex", "grammar"])
def test_patterns_are_bounded_unicode(name: str) -> None:
    start = 'start: "' if name == "grammar" else ""
    fits = start + "x" * (MAX_PATTERN_BYTES - len(start))
    assert spec_of(StructuredOutput(**{name: fits})).text == fits
    for pattern, kind in ((fits + "x", "too_complex"), (start + "\ud800", "invalid")):
        with pytest.raises(GrammarError, match=name) as error:
            spec_of(StructuredOutput(**{name: pattern}))
        assert error.value.kind == kind


@pytest.mark.parametrize(
    ("choice", "kind", "path"),
    [
        (["a", ""], "invalid", "$[1]"),
        (["a", "b", "a"], "invalid", "$[2]"),
        (["\ud800"], "invalid", "$[0]"),
        (["x" * MAX_JSON_BYTES], "too_complex", ""),
    ],
)
def test_choices(choice: list[str], kind: str, path: str) -> None:
    with pytest.raises(GrammarError) as error:
        spec_of(StructuredOutput(choice=choice))
    assert (error.value.kind, error.value.path) == (kind, path)


def test_a_schema_is_checked() -> None:
    for text in ("3", "[]", '"a"', "null"):
        error = refused(text)
        assert (error.kind, error.path) == ("invalid", "$")


def test_numbers_beyond_a_floats_range() -> None:
    schema_spec({"type": "integer", "minimum": 1, "maximum": 10**400})
    schema_spec({"type": "integer", "exclusiveMinimum": -(10**400), "maximum": 10**400})


def test_a_schema_is_checked_once_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"an option {i}" for i in range(20_000)]
    first = spec_of(StructuredOutput(json_schema={"enum": options}))
    as_text = spec_of(StructuredOutput(json_schema=json.dumps({"enum": options})))
    assert as_text == first
    monkeypatch.setattr(spec, "_checked_text", None)
    assert spec_of(StructuredOutput(json_schema={"enum": options})) == first
    assert spec_of(StructuredOutput(json_schema=json.dumps({"enum": options}))) == first
    with pytest.raises(TypeError):  # another
        spec_of(StructuredOutput(json_schema={"enum": options[1:]}))
