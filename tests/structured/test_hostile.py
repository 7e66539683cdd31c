"""Grammars made to do harm: each ends in a result or in one error, and the backend is as good as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_helpers import accepts, allowed_by, bitmask, matcher_of, schema_spec, smollm2, vocabulary, wide

from aengine.engine.structured.backend import Backend, MatcherError
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.spec import GrammarSpec
from aengine.errors import GrammarError


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, GrammarSpec] = {
    "optional groups": GrammarSpec("regex", "(a|ab|abc)?" * 30 + "x"),
    "overlapping stars": GrammarSpec("regex", "(.*a){30}" + "(a|a)*b" * 20),
    "counted twice": GrammarSpec("regex", "(a{300}){300}"),
    "counted four times": GrammarSpec("regex", "(((a{1,50}){1,50}){1,50}){1,50}"),
    "long enum": schema_spec({"enum": [f"option number {i}" for i in range(50_000)]}),
    "long choice": GrammarSpec("choice", json.dumps([f"option number {i}" for i in range(50_000)])),
    "deep": schema_spec(nested(200)),
    "very deep": GrammarSpec("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
    "wide": schema_spec({"type": "object", "properties": wide(1000)}),
    "remote": schema_spec({"$ref": "http://169.254.169.254/latest"}),
    "file": schema_spec({"$ref": "file:///etc/passwd"}),
    "itself": schema_spec({"$ref": "#"}),
    "circle": schema_spec({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    "recursive": schema_spec(
        {"type": "object", "properties": {"next": {"$ref": "#"}, "all": {"items": {"$ref": "#"}}}}
    ),
    "options": schema_spec({"x-guidance": {"lenient": True}, "not": {}}),
    "many items": schema_spec({"type": "array", "minItems": 10**6, "maxItems": 10**7, "items": {"type": "integer"}}),
    "huge number": schema_spec({"type": "integer", "minimum": 10**30, "maximum": 10**31}),
    "long string": schema_spec({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "pattern bomb": schema_spec({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 5000}),
    "empty name": schema_spec({"type": "object", "properties": {"": {}, "\x00": {}, "\u2028": {}}}),
    "left recursion": GrammarSpec("lark", 'start: start start | "a" | \n'),
    "ebnf brackets": GrammarSpec("ebnf", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000),
    "nothing": GrammarSpec("lark", "start:\n"),
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Backend]:
    backend = load_backend("llguidance", vocabulary("smollm2"), 1.0)
    yield backend
    backend.close()


@pytest.mark.parametrize("attack", list(HOSTILE))
def test_hostile_grammars_end_in_a_result_or_an_error(impatient: Backend, attack: str) -> None:
    """And afterwards the backend is as good as before."""
    try:
        matcher = impatient.compile(HOSTILE[attack]).matcher()
        mask = bitmask(impatient)
        for _ in range(8):
            matcher.fill(mask, 0)
            may = allowed_by(mask[0])
            assert len(may)
            assert matcher.accept([int(may[len(may) // 2])]) == 1
            if matcher.is_finished:
                break
    except GrammarError as error:
        assert error.kind in ("invalid", "unsupported", "unsatisfiable", "too_complex")
        assert "\n" not in str(error)
        assert len(str(error)) < 600
    except MatcherError as error:
        assert "\n" not in str(error)
    assert accepts(matcher_of(impatient, GrammarSpec("regex", "ab")), smollm2(), "ab")
