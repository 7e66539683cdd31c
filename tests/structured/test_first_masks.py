"""A grammar that runs out of a limit as soon as its first string begins is refused when it is compiled."""

from __future__ import annotations

import pytest
from grammar_helpers import accepts, backend_of, matcher_of, schema_spec, smollm2

from aengine import GrammarError
from aengine.engine.structured.llguidance.backend import _steps

WORDS = r"^(?:\S+\s+){0,99}\S+$"


def test_a_few_masks_are_tried_and_the_last() -> None:
    assert _steps([]) == [] and _steps([5]) == [[5]] and _steps([5, 6]) == [[5], [6]]
    assert _steps([*range(5)]) == [[0], [1], [2], [3], [4]]
    assert _steps([*range(9)]) == [[0], [1], [2], [3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_object_that_requires_nothing_but_itself_is_refused(is_closed: bool) -> None:
    """What must follow has no end; with a string beside it something is the model's choice."""
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    with pytest.raises(GrammarError) as error:
        backend_of("tiny").compile(schema_spec(schema | {"additionalProperties": not is_closed}))
    assert error.value.kind == "too_complex"
    beside = {"properties": {"name": {"type": "string"}, "next": {"$ref": "#"}}, "required": ["name", "next"]}
    matcher_of(backend_of("tiny"), schema_spec(beside | {"type": "object", "additionalProperties": not is_closed}))


def test_a_first_string_beyond_the_limits_is_refused_at_once() -> None:
    """Found in MaskBench (Github_easy---o21053): each request would fail at its fourth token, whatever its text."""
    text = {"type": "string", "maxLength": 5000, "pattern": WORDS}
    spec = schema_spec({"type": "object", "properties": {"question": text}, "required": ["question"]})
    with pytest.raises(GrammarError) as error:
        backend_of("smollm2").compile(spec)
    assert error.value.kind == "too_complex"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "object", "properties": {"q": {"type": "string", "pattern": WORDS}}, "required": ["q"]},
            '{"q": "a b"}',
        ),
        ({"const": {"a": "x" * 3000}}, '{"a": "' + "x" * 3000 + '"}'),  # more tokens forced than are followed
        ({"const": 1}, "1"),
        ({"type": "string"}, '"a"'),
    ],
)
def test_what_is_within_the_limits_compiles(schema: object, text: str) -> None:
    assert accepts(matcher_of(backend_of("smollm2"), schema_spec(schema)), smollm2(), text)
