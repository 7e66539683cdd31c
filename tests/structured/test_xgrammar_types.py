"""What xgrammar does not do as a schema says is refused: ``type`` beside an enum, patterns whose text needs escapes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from grammar_helpers import NEEDS_XGRAMMAR, accepts, allowed, backend_of, matcher_of, schema_spec, tiny, vocabulary

from aengine import GrammarError
from aengine.structured.xgrammar_schema import ignored

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


RAW = [
    *(
        '^["]b$',
        '"',
        r"^\"$",
        r"^[A-Z]:\\[a-z]+$",
        "^a\nb$",
        r"^a\nb$",
        r"^[\n\t]$",
        r"^[\x00-\x1f]$",
        r"^\cJ$",
        r"^[\b]$",
    ),
    *(r"^\x22b$", r"^\u0022$", "^[^]$", "^[^\x01]$", r"^[^\S ]$", r"^[^\x20-\u{10ffff}]$", '^(.|")$'),
    # a quote comes for "." and the like where xgrammar takes its other way to read a pattern
    *("^.{1,300}$", "^.é$", "^.]$", r"^\S{129}$", r"^[é\s]$", "^[ -~]é$", r"^\D{200}$", "^[^a]]$"),
]
FINE = [
    *("^[A-Z]{3}$", r"^\d+-[a-f]*$", r"^[\w\-.]+@[a-z]+\.com$", "^(a|b)?c{2,300}$", "^é+$", "^[a-z]{1,300}$", "", "^$"),
    *(
        ".",
        r"^\S+$",
        r"^[^\s/]+/.*$",
        r"^[ -~]{1,100}$",
        r'^[^"\\]*$',
        r"^[^\r\n]{1,128}$",
        r"^\x41\u0042.$",
        r"^\W\D$",
    ),
]


@pytest.mark.parametrize("pattern", RAW, ids=ascii)
def test_patterns_whose_text_may_need_escapes_are_found(pattern: str) -> None:
    ((path, what),) = ignored({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert path == "$.properties.a" and "without its escape" in what


@NEEDS_XGRAMMAR
@pytest.mark.parametrize("pattern", FINE, ids=ascii)
def test_what_comes_for_other_patterns_is_json_of_the_schema(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert ignored(schema) == []
    backend = backend_of("xgrammar", "tiny")
    compiled = backend.compile(schema_spec(schema, backend="xgrammar"))
    texts = vocabulary("tiny").token_bytes
    ids = {id for id, text in enumerate(texts) if len(text) == 1}
    needs_escape = {id for id in ids if texts[id] < b" " or texts[id] in b'"\\'}
    rng = random.Random(5)
    for _ in range(10):
        matcher, said = compiled.matcher(), b""
        while may := sorted(allowed(backend, matcher) & ids):
            ending = [id for id in may if id in needs_escape]
            id = rng.choice(ending if ending and rng.random() < 0.3 else may)
            matcher.accept([id])
            said += texts[id]
        value = json.loads(said.decode(errors="replace"))
        assert isinstance(value, str) and (re.search(pattern, value, re.ASCII) or "\ufffd" in value)


@NEEDS_XGRAMMAR
def test_a_pattern_whose_text_may_need_escapes_is_refused_or_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": '^["]b$'}}, "required": ["a"]}
    backend = backend_of("xgrammar", "tiny")
    with pytest.raises(GrammarError, match="a pattern by which") as error:
        backend.compile(schema_spec(schema, backend="xgrammar"))
    assert (error.value.kind, error.value.path) == ("unsupported", "$.properties.a")
    compiled = backend.compile(schema_spec(schema, backend="xgrammar", relax=True))
    assert ["a pattern by which" in warning for warning in compiled.warnings] == [True]
    assert accepts(compiled.matcher(), tiny(), r'{"a": "\"b"}')
    assert not accepts(compiled.matcher(), tiny(), '{"a": ""b"}')
