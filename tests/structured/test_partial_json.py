"""Snapshots of unfinished JSON: always a prefix of the value, only ever growing, and equal to json.loads at the end."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.engine.structured.partial_json import partial_json
from aengine.errors import InvalidRequestError

STRINGS = st.text(st.characters(exclude_categories=("Cs",))) | st.sampled_from(
    ["", '"', "\\", "\U0001f600", "12", "é\n", "\\1"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.builds(
    lambda value, ascii_, indent: json.dumps(value, ensure_ascii=ascii_, indent=indent),
    VALUES,
    st.booleans(),
    st.sampled_from([None, 1]),
)


def is_prefix(part: Any, whole: Any) -> bool:
    """The definition. Types must be the same: 1, 1.0 and True are different values."""
    if type(part) is not type(whole):
        return False
    if isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(whole, list):
        if len(part) > len(whole) or not all(map(same, part[:-1], whole)):
            return False
        return not part or is_prefix(part[-1], whole[len(part) - 1])
    if isinstance(whole, dict):
        keys = list(part)
        if keys != list(whole)[: len(keys)] or not all(same(part[key], whole[key]) for key in keys[:-1]):
            return False
        return not part or is_prefix(part[keys[-1]], whole[keys[-1]])
    return same(part, whole)


def same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)


@given(TEXTS)
def test_every_cut_is_a_prefix_and_snapshots_only_grow(text: str) -> None:
    value = json.loads(text)
    found = [partial_json(text[:end]) for end in range(len(text))]
    begun = [snapshot is not None for snapshot in found]
    assert begun == sorted(begun)
    values = [*(snapshot for snapshot in found if snapshot is not None), partial_json(text, has_ended=True)]
    assert all(is_prefix(snapshot, value) for snapshot in values)
    assert all(is_prefix(earlier, later) for earlier, later in pairwise(values))
    assert same(values[-1], value)


@pytest.mark.parametrize(
    ("text", "snapshot"),
    [
        ("", None),
        (" ", None),
        (" nul", None),
        ("12", None),
        ("-", None),
        ('"12', "12"),
        ('{"name": "Ad', {"name": "Ad"}),
        ('{"name": "', {"name": ""}),
        ('{"name": "B12', {"name": "B12"}),
        ('{"name": ', {}),
        ('{"name', {}),
        ('{"name1', {}),
        ('{"name": "Ada", "age": 3', {"name": "Ada"}),
        ('{"name": "Ada", "age": 36,', {"name": "Ada", "age": 36}),
        ('{"a": tru', {}),
        ('{"a": true', {"a": True}),
        ('{"a": {"b": [1, [', {"a": {"b": [1, []]}}),
        ('["\\ud83d', [""]),
        ('["x\\ud83d\\ude0', ["x"]),
        ('["x\\ud83d\\ude00', ["x\U0001f600"]),
        ('["x\\', ["x"]),
        ('["x\\\\1', ["x\\1"]),
        ('["x\\u12', ["x"]),
        ("[-", []),
        ("[1, 1.5e", [1]),
        ("[1, 1.5e-1", [1]),
        ("[1e999,", [math.inf]),
        ('{"a": [1], "b": 2, "a": {"c": 3}}', {"a": {"c": 3}, "b": 2}),
    ],
)
def test_examples(text: str, snapshot: Any) -> None:
    assert partial_json(text) == snapshot


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("[1, 2", [1, 2]), ('"12', "12"), ("", None), ("nul", None)])
def test_a_number_ends_with_the_text(text: str, value: Any) -> None:
    assert partial_json(text, has_ended=True) == value


@pytest.mark.parametrize(
    "text",
    ["NaN", '{"a": Infinity}', '{"a" 1}', "{a: 1}", '["\\x"]', '["\\u12g4"]', '["a\nb"]', "[01]", "[trye]",
     "[" + "9" * 5000 + "]", "[" * 300],
)  # fmt: skip
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not JSON: "):
        partial_json(text)


def test_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_core", None)
    with pytest.raises(InvalidRequestError, match="pip install pydantic"):
        partial_json("[1, 2]")
