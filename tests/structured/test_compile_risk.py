"""What is compiled at once and what is tried first: told from the text, without a grammar library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bombs import BOMBS, COUNTED, ENDLESS
from grammar_helpers import schema_spec

from aengine import StructuredOutput
from aengine.structured.compile_risk import _divisor, _weight, is_hopeless, risk_of
from aengine.structured.spec import GrammarSpec, spec_of

SCHEMAS = Path(__file__).parents[2] / "benchmarks" / "schemas.jsonl"


def lark(text: str) -> GrammarSpec:
    return GrammarSpec("lark", text)


def test_real_schemas_are_safe() -> None:
    for line in SCHEMAS.read_text().splitlines():
        row = json.loads(line)
        spec = spec_of(StructuredOutput(json_schema=row["schema"]))
        assert risk_of(spec) == "safe", row["name"]
        assert risk_of(lark("start: %json " + spec.text)) == "safe", row["name"]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_not(name: str) -> None:
    assert risk_of(BOMBS[name]) != "safe"
    if BOMBS[name].kind == "json_schema":
        assert risk_of(lark("start: %json " + BOMBS[name].text)) != "safe"
        assert risk_of(schema_spec({"items": {"x": [json.loads(BOMBS[name].text)]}})) != "safe"  # for "#/items/x/0"


def test_bombs_are_of_two_kinds() -> None:
    assert {risk_of(spec) for spec in COUNTED.values()} == {"costly"}
    assert {risk_of(ENDLESS[name]) for name in ("intersection", "allOf", "large divisor", "name patterns")} == {"wild"}


@pytest.mark.parametrize(
    ("pattern", "weight"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{3,}", 3),
        ("a{2,5}b", 6),
        ("(ab){10}c", 21),
        ("((a{10}){10}b){10}", 1010),
        ("[a-z{9}(]{4}", 4),
        ("(?x)(a{ 300 # ) \n}){300}", 5_001),
        (r"\{5}", 3),
        ("a{0}", 1),
        ("a{99999999999}", 99999999999),
        (")){3}((", 1),
        ("(((a{100}){100}){100}){100}[](]", 10**8),
        ("(a{100}){100}[^](]", 10_000),
        ("(((a{100}){100}", 10_000),
        ("a{100}?{100}?{100}+{100}", 10**8),
        ("(a{1000}[[a](]b){1000}", 22 * 10**6),
        ("a{" + "0" * 5000 + "3}", 3),
        ("a{9}" + "{999999}" * 9000, 10**20),
    ],
)
def test_the_weight_of_a_pattern(pattern: str, weight: int) -> None:
    assert abs(_weight(pattern) - weight) <= max(5, weight // 100)


@pytest.mark.parametrize(
    ("pattern", "hopeless"),
    [
        ("(((a{100}){100}){100}){100}", True),
        ("(abc{5000}x{0,9}){10000}", True),
        ("(a{100}){100}", False),
        ("[ab]{100000000}", False),  # 2 ms
        (r"(\w|\d|.){100000000}c{20000}", False),
        ("(?x)(((a{100}){100}){100}){100}", False),
        ("(((a{100}){100}){100}){100}[[a]b]", False),
    ],
)
def test_what_is_not_even_tried(pattern: str, hopeless: bool) -> None:
    assert is_hopeless(GrammarSpec("regex", pattern)) is hopeless
    nested = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": pattern}}}
    assert is_hopeless(schema_spec(nested)) is hopeless
    assert not is_hopeless(schema_spec({"description": pattern}))
    assert not is_hopeless(lark(f"start: /{pattern}/"))


SAFE: list[Any] = [
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$", "maxLength": 10_000},
    {"type": "number", "multipleOf": 0.01},
    {"type": "integer", "multipleOf": 1_000_000},
    {"properties": {"pattern": {"type": "string"}, "multipleOf": {"type": "integer"}, "patternProperties": {}}},
    {"allOf": [{"pattern": "^a+$"}, {"properties": {"b": {"pattern": "^[0-9]{3}$"}}}]},
    {"patternProperties": {"^x-": {}, "^[a-z]+$": {"type": "integer"}}},
    {"const": {"pattern": 1, "multipleOf": "x", "patternProperties": []}},
]


@pytest.mark.parametrize("schema", SAFE, ids=json.dumps)
def test_ordinary_schemas_are_safe(schema: Any) -> None:
    assert risk_of(schema_spec(schema)) == "safe"


@pytest.mark.parametrize(
    ("text", "risk"),
    [
        ('start: "a" | "b"\n', "safe"),
        ("start: /a{1,50}/ B\nB: C C\nC: /x+/\n", "safe"),
        ("start: T\nT: /(?s:.+)/ & ~/(?s:.*)<tool>(?s:.*)/ & ~/[ \\n]*<think>(?s:.*)/\n", "safe"),
        ('start: "a & ~b" ~ 2..3 // & ~\n', "safe"),
        ("start: A\nA: /.*a.{20}/\n  & /.*b.{19}/ & ~/.*c.{22}/\n", "wild"),
        ('start: A\nA: "/" & /.*a.........../ & ~/.*b........../ & "/"\n', "wild"),
        ('start: A\nA: "%json {" & /.*a.{9}/ & /.*b.{9}/ & ": " & /x/ & "}"\n', "wild"),
        ('start: %json {"p\\u0061ttern": "x"}\n', "safe"),
        ('start: %json {"type": "string", "p\\u0061ttern": "^(a{300}){300}$"}\n', "costly"),
        ("start: %json {nonsense}\n", "wild"),
        ('start: %regex {"substring_chars": "x"}\n', "wild"),
        ('start: %lark { start: A\nA: "x" }\n', "wild"),
        ("start: /(a{0000000000300}){0000000000300}/\n", "costly"),
        ('start: "a" ~ // x\n 30000\n', "costly"),
        ("start: " + "(a|b)? " * 600 + "\n", "wild"),
        ("start: " + "(a|) " * 600 + "\n", "wild"),
        ('start: "a\n', "wild"),
        ('start: a ~ 300\na: (B ~ 300)\nB: "x" ~ 3..300\n', "costly"),
    ],
)
def test_lark(text: str, risk: str) -> None:
    assert risk_of(lark(text)) == risk


@pytest.mark.parametrize(
    ("number", "divisor"),
    [
        *((1, 1), (0.01, 1), (250, 250), (250.0, 250), (-0.125, 125), (1e-7, 1), (3.7e-5, 37), (10**400, 1)),
        *((604_800, 604_800), (604_800.0, 604_800), (1_000_000, 1), (12345678901, 12345678901)),
    ],
)
def test_the_divisor_of_a_number(number: float, divisor: int) -> None:
    assert _divisor(number) == [divisor]


@pytest.mark.parametrize("number", [0, 0.0, True, None, "7", [7], float("inf"), float("nan")])
def test_what_divides_nothing(number: Any) -> None:
    assert _divisor(number) in ([], [10**100])
    risk_of(schema_spec({"multipleOf": number}))
    assert risk_of(schema_spec({"multipleOf": 7**1000})) == "wild"


@pytest.mark.parametrize("kind", ["lark", "ebnf", "regex"])
@pytest.mark.parametrize("text", ["", '"', "/", "%json {", "((((", "{9}{9}{9}", "\\", "a: \\", "~ ~ & &", "A:" * 9])
def test_nonsense_is_no_error(kind: Any, text: str) -> None:
    risk_of(GrammarSpec(kind, text))
    risk_of(schema_spec({"pattern": text, "patternProperties": {text: {"multipleOf": 1e300}}}))
