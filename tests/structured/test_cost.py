"""What is compiled at once and what is tried first: told from the structure, without a grammar library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bombs import BOMBS
from grammar_helpers import schema_spec, wide

from aengine import StructuredOutput
from aengine.engine.structured.llguidance.cost import _divisor, _weight, is_quick
from aengine.engine.structured.parts import AnyOf, Choice, FreeText, Json, Regex, Text, TextUpTo, seq
from aengine.engine.structured.spec import GrammarSpec, composed_of, spec_of

SCHEMAS = Path(__file__).parents[2] / "benchmarks" / "schemas.jsonl"


def test_real_schemas_are_quick() -> None:
    for line in SCHEMAS.read_text().splitlines():
        row = json.loads(line)
        spec = spec_of(StructuredOutput(json_schema=row["schema"]))
        assert is_quick(spec), row["name"]
        assert is_quick(composed_of(seq(Text("("), spec.part()))), row["name"]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_not(name: str) -> None:
    spec = BOMBS[name]
    assert not is_quick(spec)
    if spec.kind == "json_schema":
        assert not is_quick(GrammarSpec("lark", "start: %json " + spec.text))
        assert not is_quick(schema_spec({"items": {"x": [json.loads(spec.text)]}}))  # for "#/items/x/0"
    if spec.kind in ("json_schema", "regex", "choice"):
        assert not is_quick(composed_of(seq(Text("("), AnyOf((Text("x"), spec.part())))))


def chain(num_references: int) -> dict[str, Any]:
    schemas = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(num_references)}
    return {"$defs": schemas | {f"d{num_references}": {}}, "$ref": "#/$defs/d0"}


def test_references_are_levels() -> None:
    assert is_quick(schema_spec(chain(100)))
    assert not is_quick(schema_spec(chain(400)))
    assert is_quick(schema_spec({"items": [{"$ref": "#/$defs/a"}] * 400, "$defs": {"a": {}}}))  # one place


def twice(depth: int, leaf: Any) -> dict[str, Any]:
    """Arrays of two arrays of two arrays ... of ``leaf``."""
    schemas = {f"d{i}": {"minItems": 2, "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": schemas | {f"d{depth}": leaf}, "$ref": "#/$defs/d0"}


LONG = "x" * 1000


@pytest.mark.parametrize(
    ("schema", "quick"),
    [
        ({"minItems": 3, "items": {"const": LONG}}, True),
        ({"minItems": 10_000, "items": {"type": "integer"}, "description": LONG}, True),
        ({"minItems": 10_000, "items": {"const": "x" * 60}}, True),  # the library's limit of items ends it
        ({"minItems": 100, "items": {"minItems": 100, "items": {"enum": [LONG]}}}, False),
        ({"minItems": 10_000, "items": {"const": [{"a": LONG}]}}, False),
        ({"minItems": 10_000, "items": {"properties": {LONG: {"const": 1}}}}, False),
        ({"minItems": 10_000, "items": {"const": ["x" * 60] * 9}}, False),
        ({"minItems": 1e9, "items": {"required": [LONG]}}, False),
        (twice(12, {"const": LONG}), False),
        (twice(2, {"const": LONG}), True),
        (twice(3, {"const": LONG[:900]}), True),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_literals_that_are_repeated_are_not_quick(schema: Any, quick: bool) -> None:
    assert is_quick(schema_spec(schema)) == quick


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        ("abc", 3),
        ("a{3,}", 3),
        ("(ab){10}c", 21),
        ("((a{10}){10}b){10}", 1010),
        ("(?x)(a{ 300 # ) \n}){300}", 90_000),
        ("a{99999999999}", 99999999999),
        ("(((a{100}){100}){100}){100}[](]", 10**8),
        ("a{100}?{100}?{100}+{100}", 10**8),
        ("(a{1000}[[a](]b){1000}", 10**6),
        ("a{9}" + "{999999}" * 9000, 10**20),
    ],
)
def test_a_pattern_has_at_least_so_many_letters(pattern: str, least: int) -> None:
    assert _weight(pattern) >= least


def ways(count: int) -> str:
    """A pattern that can go on in so many ways."""
    return "^" + "a?" * (count - 1)


APART = {"properties": {"a": {"pattern": ways(500)}, "b": {"pattern": ways(500)}}}
ORDINARY: list[Any] = [
    {"$ref": "#/$defs/x", "$defs": {"x": APART}},
    {"allOf": [APART]},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$", "maxLength": 10_000},
    {"type": "number", "multipleOf": 0.01},
    {"type": "integer", "multipleOf": 1_000},
    {"properties": {"pattern": {"type": "string"}, "multipleOf": {"type": "integer"}, "patternProperties": {}}},
    {"allOf": [{"pattern": "^a+$"}, {"properties": {"b": {"pattern": "^[0-9]{3}$"}}}]},
    {"patternProperties": {"^x-": {}, "^[a-z]+$": {"type": "integer"}}},
    {"const": {"pattern": 1, "multipleOf": "x", "patternProperties": []}},
    {"multipleOf": True, "pattern": 3, "patternProperties": 4},
    {"type": "object", "properties": wide(1000)},
]


@pytest.mark.parametrize("schema", ORDINARY, ids=lambda schema: json.dumps(schema)[:50])
def test_ordinary_schemas_are_quick(schema: Any) -> None:
    assert is_quick(schema_spec(schema))


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        ('start: "a" | "b"\n', True),
        ("start: A B\nA: B B\nB: /x+/\n", True),
        ('root ::= "(" root ")" | [0-9]+\n', True),
        ("start: A\nA: /.*a/ & /.*b/\n", False),
        ("start: /a{1,50}/\n", False),
        ('start: "a" ~ 3\n', False),
        ('start: %json {"type": "string"}\n', False),
        ("start: " + "(a|b)? " * 400 + "\n", False),
        ("start: A9\n" + "".join(f"A{i}: A{i - 1} A{i - 1}\n" for i in range(1, 10)), False),
        ("start: x::{3}\n", False),
    ],
)
def test_only_short_and_plain_grammars_are_quick(text: str, quick: bool) -> None:
    assert is_quick(GrammarSpec("ebnf" if "::=" in text else "lark", text)) == quick


def test_the_parts_of_a_grammar_are_judged_together() -> None:
    many = [Regex("a" * 500 + str(i)) for i in range(20)]
    assert is_quick(composed_of(AnyOf(tuple(many[:5])))) and not is_quick(composed_of(AnyOf(tuple(many))))
    choices = [Choice(("x" * 60_000 + str(i), "y")) for i in range(4)]
    assert is_quick(composed_of(AnyOf(tuple(choices[:3])))) and not is_quick(composed_of(AnyOf(tuple(choices))))
    assert is_quick(composed_of(AnyOf((Json("{}"), Regex("[a-z]+ [0-9]+", not_first=("x",))))))
    assert not is_quick(composed_of(AnyOf((Json("{}"), Regex(".*a......... " + ".*" * 4, not_first=("x",))))))


@pytest.mark.parametrize(
    ("number", "divisor"),
    [
        *((1, 1), (0.01, 1), (250, 250), (-0.125, 125), (1e-7, 1), (3.7e-5, 37), (604_800, 604_800)),
        *((0, 1), (0.0, 1), (True, 1), (None, 1), ("7", 1), ([7], 1), (float("inf"), 1), (float("nan"), 1)),
    ],
)
def test_the_divisor_of_a_number(number: Any, divisor: int) -> None:
    assert _divisor(number) == divisor


def test_divisors_beyond_all_bounds() -> None:
    assert not is_quick(schema_spec({"multipleOf": 7**1000}))
    assert not is_quick(schema_spec({"minItems": 7**1000, "items": {"const": LONG}}))
    assert not is_quick(GrammarSpec("json_schema", '{"multipleOf":' + "7" * 5000 + "}"))


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: GrammarSpec("choice", "x" * n), 200_000),
        (lambda n: composed_of(AnyOf((Choice(("x" * 150_000, "y")), Json('"' + "x" * (n - 150_003) + '"')))), 200_000),
        (lambda n: GrammarSpec("regex", "x" * n), 5_000),
        (lambda n: composed_of(AnyOf((Regex("x" * 1_000), FreeText(matching=("x" * 500, "x" * (n - 1_500)))))), 5_000),
        (lambda n: schema_spec({"properties": {"p": {"pattern": "x" * 1_000}}, "pattern": "y" * (n - 1_000)}), 5_000),
        (lambda n: composed_of(seq(Text("x"), Regex("." * n, not_first=("x",)))), 6),
        (lambda n: composed_of(seq(Text("x"), FreeText(matching=(ways(100), ways(n))))), 500),
        (lambda n: composed_of(seq(Text("x"), TextUpTo("x", matching=(ways(100), ways(n))))), 500),
        (lambda n: schema_spec({"allOf": [{"pattern": ways(100)}, {"pattern": ways(n)}]}), 500),
        (lambda n: schema_spec({"$ref": "#/$defs/x", "pattern": ways(100), "$defs": {"x": {"pattern": ways(n)}}}), 500),
        (lambda n: GrammarSpec("lark", "x" * n), 2_000),
        (lambda n: GrammarSpec("ebnf", "A " * n), 24),
        (lambda n: schema_spec({"patternProperties": {"x" * 1_000: {}, "y" * (n - 1_000): {}}}), 5_000),
        (lambda n: schema_spec({"patternProperties": {f"^{i}": {} for i in range(n)}}), 30),
        (lambda n: schema_spec({"multipleOf": 3, "properties": wide(n)}), 1_250),
        (lambda n: schema_spec({"multipleOf": 20, "items": {"multipleOf": n}}), 1_000),
        (lambda n: schema_spec({"minItems": 100, "items": {"minItems": 10, "items": {"const": "x" * (n - 2)}}}), 1_000),
        (lambda n: schema_spec({"minItems": n, "items": {"properties": {"x" * 98: {}}}}), 10_000),
        (lambda n: schema_spec(chain(98) | {"x": json.loads("[" * (n - 1) + "]" * (n - 1))}), 10),
    ],
)  # fmt: skip
def test_each_bound_is_what_just_passes(make: Any, most: int) -> None:
    assert is_quick(make(most)) and not is_quick(make(most + 1))


@pytest.mark.parametrize("kind", ["lark", "ebnf", "regex", "json_schema"])
@pytest.mark.parametrize("text", ["", '"', "/", "%json {", "((((", "{9}{9}{9}", "\\", "a: \\", "~ ~ & &", "A:" * 9])
def test_nonsense_is_no_error(kind: Any, text: str) -> None:
    is_quick(GrammarSpec(kind, text))
    is_quick(schema_spec({"pattern": text, "patternProperties": {text: {"multipleOf": 1e300}}}))
