"""Numbers of schemas are held to in all their digits, or refused with their place."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import pytest
from grammar_helpers import accepts, backend_of, schema_spec, tiny

from aengine.engine.structured.llguidance.numbers import inexact_value, says_nothing, unusable_bound
from aengine.engine.structured.output_type import OutputType
from aengine.errors import GrammarError

BIG = 1234567890123456789


def _compile(schema: Any, **options: Any) -> Any:
    return backend_of("tiny").compile(schema_spec(schema, **options))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"enum": [1, BIG]}, "$.enum[1]"),
        ({"const": BIG}, "$.const"),
        ({"const": 2**53 + 1}, "$.const"),
        ({"const": -(2**64)}, "$.const"),
        ({"const": 123456789.12345679}, "$.const"),
        ({"properties": {"a": {"enum": [{"b": [BIG]}]}}}, "$.properties.a.enum[0]"),
        ({"items": {"type": "integer", "minimum": BIG}}, "$.items.minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "$.exclusiveMinimum"),
        ({"type": "integer", "minimum": 10**18}, "$.minimum"),
        ({"type": "number", "maximum": 1e20}, "$.maximum"),
        ({"type": "number", "minimum": 1e-100}, "$.minimum"),
        ({"type": "integer", "multipleOf": 10**10}, "$.multipleOf"),
        ({"multipleOf": 0}, "$.multipleOf"),
        (json.loads(OutputType.of(Literal[1, 1234567890123456789]).schema_text), "$.enum[1]"),
    ],
)
def test_a_number_that_can_not_be_exact_is_refused_or_left_out(schema: Any, path: str) -> None:
    with pytest.raises(GrammarError) as caught:
        _compile(schema)
    assert (caught.value.kind, caught.value.path) == ("unsupported", path)
    relaxed = _compile(schema, relax=True)
    assert [warning.partition(" ")[0] for warning in relaxed.warnings] == [path]


def test_options_that_are_exact_stay_beside_one_that_is_not() -> None:
    relaxed = _compile({"enum": [BIG, "x", 2]}, relax=True)
    for text, is_right in ((str(BIG), True), ('"x"', True), ('"y"', False), ("true", False)):
        assert accepts(relaxed.matcher(), tiny(), text) is is_right


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": ["integer", "null"], "minimum": -(2**63)},
    ],
)
def test_a_limit_that_nothing_reaches_says_nothing(schema: Any) -> None:
    for relax in (False, True):
        compiled = _compile(schema, relax=relax)
        assert compiled.warnings == ()
        assert accepts(compiled.matcher(), tiny(), "-5") and accepts(compiled.matcher(), tiny(), str(2**62))


@pytest.mark.parametrize(
    ("keyword", "usable", "unusable"),
    [
        ("multipleOf", [1, 0.5, 7, 4 * 10**8, 1e-9, 2.5, 120.0], [0, -3, -0.5, 429_496_730, 5 * 10**8, 0.12345678901]),
        ("minimum", [0, -3, 2.5, 10**17, -(2**62), 3e-30, -1e-40], [10**17 + 16, 9e-31, 2**53 + 1, 1e18, -1e19]),
        ("maximum", [0, 3, -2.5, -(10**17), 2**62, -3e-30, 1e-40], [-(10**17) - 16, -9e-31, -(2**53) - 1, 1e19]),
        ("exclusiveMinimum", [0.5, 2**53 - 1, 1 - 2**53], [2**53, -(2**53), 2.0**60]),
        ("exclusiveMaximum", [-0.5, 2**53 - 1, 1 - 2**53], [2**53, -(2**53), -(2.0**60)]),
    ],
)
def test_the_last_bound_that_the_library_holds_to(keyword: str, usable: list[Any], unusable: list[Any]) -> None:
    for value in unusable:
        assert unusable_bound({keyword: value}, keyword), value
    for value in usable:
        assert unusable_bound({keyword: value}, keyword) == "", value
        matcher = _compile({"type": "number", keyword: value}).matcher
        if keyword == "multipleOf" and isinstance(value, int):
            assert all(accepts(matcher(), tiny(), str(times * value)) for times in (1, 3, 17))
            assert value == 1 or not accepts(matcher(), tiny(), str(17 * value + 1))
        if keyword == "multipleOf" or not isinstance(value, int) or abs(value) > 2**50:
            continue
        step = 1 if keyword.lower().endswith("minimum") else -1
        for number, is_right in ((value + step, True), (value - step, False), (value, not keyword.startswith("ex"))):
            assert accepts(matcher(), tiny(), str(number)) is is_right, (value, number)
    assert not unusable_bound({"multipleOf": 429_496_729}, "multipleOf")
    for value in ("1", True, None):
        assert unusable_bound({keyword: value}, keyword) == "" and not says_nothing(keyword, value)


def test_a_bound_that_nothing_reaches_begins_at_64_bits_and_at_the_last_double() -> None:
    last = 1.7976931348623157e308
    for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        least = 2**63 - 1 if sign > 0 else 2**63
        assert [says_nothing(keyword, sign * value) for value in (least - 1, least, 2**70, 1e300, last)] == [
            False, True, True, False, True,
        ]  # fmt: skip
        assert not says_nothing(keyword, -sign * 2**70) and not says_nothing(keyword, -sign * last)
    assert not says_nothing("multipleOf", 2**70)


def test_constants_are_whole_as_64_bits() -> None:
    for value in (2**62, -(2**62), 2**53 - 1, 2**53, 0, 0.0, 1.5, 1e308, 1e-308, "x", None, True, [1, {"a": 2}]):
        assert inexact_value(value) is None
    for value in (2**63, -(2**63), 2**53 + 1, 2**1024 - 1, 123456789.12345679, 5e-324):
        assert inexact_value({"a": ["x", value]}) == value


def test_numbers_that_pass_are_exact() -> None:
    rng = random.Random(5)
    floats = [rng.choice((1, -1)) * rng.random() * 10.0 ** rng.randint(-12, 15) for _ in range(60)]
    for value in [*floats, 0.1, 1 / 3, 1e-7, 2**53, -(2**60), 2**62, 10**15]:
        if inexact_value(value) is None:
            written = _only_text(_compile({"const": value}))
            assert float(written) == value and (isinstance(value, float) or int(written) == value), value


def _only_text(compiled: Any) -> str:
    """Follow what is forced, byte by byte."""
    from grammar_helpers import allowed

    matcher, text = compiled.matcher(), ""
    while True:
        ids = sorted(allowed(backend_of("tiny"), matcher) - tiny().eos_token_ids)
        if not ids:
            return text
        text += tiny().token_bytes(ids[0]).decode()
        assert matcher.accept([ids[0]]) == 1
