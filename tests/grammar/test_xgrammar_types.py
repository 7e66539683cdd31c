"""xgrammar passes over ``type`` next to an enum or a const: refused where it would matter."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_helpers import NEEDS_XGRAMMAR, accepts, backend_of, matcher_of, schema_spec, tiny

from aengine import GrammarError
from aengine.grammar.xgrammar_schema import ignored

MIXED = [
    {"type": "object", "enum": ["a"]},
    {"type": "integer", "enum": [1, 1.5]},
    {"type": ["string", "null"], "enum": ["a", None, 3]},
    {"type": "string", "const": 3},
    {"type": "number", "enum": [1, True]},
]
ALIKE = [
    {"type": "string", "enum": ["a", "b"]},
    {"type": "integer", "enum": [1, 2.0]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"type": "number", "const": 1},
    {"enum": [1, "a"]},
]


@pytest.mark.parametrize("schema", MIXED, ids=str)
def test_values_of_other_types_are_found(schema: dict[str, Any]) -> None:
    """Found in MaskBench (Github_medium---o30322): a property of type object with an enum of strings."""
    found = ignored({"properties": {"a": schema}})
    assert found == [("$.properties.a", "type next to enum or const, which has values of other types")]


@pytest.mark.parametrize("schema", ALIKE, ids=str)
def test_values_of_the_type_are_fine(schema: dict[str, Any]) -> None:
    assert ignored({"properties": {"a": schema}}) == []


@NEEDS_XGRAMMAR
def test_refused_or_with_a_warning() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "enum": ["x"]}}}
    backend = backend_of("xgrammar", "tiny")
    with pytest.raises(GrammarError) as error:
        backend.compile(schema_spec(schema, backend="xgrammar"))
    assert (error.value.kind, error.value.path) == ("unsupported", "$.properties.a")
    compiled = backend.compile(schema_spec(schema, backend="xgrammar", relax=True))
    assert compiled.warnings and "type next to enum" in compiled.warnings[0]


@NEEDS_XGRAMMAR
def test_an_enum_of_its_type_compiles() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
    matcher = matcher_of(backend_of("xgrammar", "tiny"), schema_spec(schema, backend="xgrammar"))
    assert accepts(matcher, tiny(), '{"a": "x"}')
