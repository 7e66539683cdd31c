"""Snapshots of unfinished JSON: always a prefix of the value, only ever growing, and equal to json.loads at the end."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.structured.partial import PartialJson

# Lone surrogates too: JSON can write them as escapes.
STRINGS = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["", '"', "\\", "\U0001f600", "\ud83d", "é\n"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.builds(
    lambda value, ascii_, indent: (value, json.dumps(value, ensure_ascii=ascii_, indent=indent)),
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


def snapshots(text: str, cuts: list[int]) -> list[tuple[bool, Any]]:
    reader, found, start = PartialJson(), [], 0
    for cut in [*cuts, len(text)]:
        reader.feed(text[start:cut])
        found.append((reader.has_value, reader.value))
        start = cut
    reader.finish()
    assert reader.is_complete and reader.has_value
    return [*found, (True, reader.value)]


@given(TEXTS)
def test_every_cut_is_a_prefix_and_snapshots_only_grow(case: tuple[Any, str]) -> None:
    value, text = case
    value = json.loads(text)  # two lone surrogates side by side become one character
    found = snapshots(text, list(range(len(text))))
    begun = [has for has, _ in found]
    assert begun == sorted(begun)
    values = [snapshot for has, snapshot in found if has]
    assert all(is_prefix(snapshot, value) for snapshot in values)
    assert all(is_prefix(earlier, later) for earlier, later in pairwise(values))
    assert same(values[-1], value)


@given(TEXTS, st.data())
def test_pieces_do_not_matter(case: tuple[Any, str], data: st.DataObject) -> None:
    _, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    found = snapshots(text, cuts)
    for cut, snapshot in zip(cuts, found):
        whole = PartialJson()
        whole.feed(text[:cut])
        assert (whole.has_value, repr(whole.value)) == (snapshot[0], repr(snapshot[1]))


@given(TEXTS, st.data())
def test_snapshots_stay_as_they_were(case: tuple[Any, str], data: st.DataObject) -> None:
    _, text = case
    reader = PartialJson()
    kept: list[tuple[Any, str]] = []
    for letter in text:
        reader.feed(letter)
        kept.append((reader.value, json.dumps(reader.value)))
    assert all(json.dumps(snapshot) == shown for snapshot, shown in kept)


def outcome(text: str) -> str:
    reader = PartialJson()
    try:
        for letter in text:
            reader.feed(letter)
        reader.finish()
    except ValueError:
        return "refused"
    return json.dumps(reader.value)


def expected(text: str) -> str:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return json.dumps(json.loads(text, parse_constant=refuse))
    except ValueError:
        return "refused"


@given(st.text(st.sampled_from('[]{},:"\\ \n\t-+.0123eEtruefalsn/bud8cD\x00é'), max_size=12))
def test_any_text_is_read_or_refused_as_json_loads_does(text: str) -> None:
    assert outcome(text) == expected(text)


@given(TEXTS, st.data())
def test_damaged_text_is_read_or_refused_as_json_loads_does(case: tuple[Any, str], data: st.DataObject) -> None:
    _, text = case
    at = data.draw(st.integers(0, len(text)))
    text = (
        text[:at]
        + data.draw(st.sampled_from(list('[]{},:"\\ 0-.etfnu\x01') + [""]))
        + text[at + data.draw(st.integers(0, 2)) :]
    )
    assert outcome(text) == expected(text)


@pytest.mark.parametrize(
    ("text", "snapshot"),
    [
        ('{"name": "Ad', {"name": "Ad"}),
        ('{"name": "', {"name": ""}),
        ('{"name": ', {}),
        ('{"name', {}),
        ('{"name": "Ada", "age": 3', {"name": "Ada"}),
        ('{"name": "Ada", "age": 36,', {"name": "Ada", "age": 36}),
        ('{"a": tru', {}),
        ('{"a": true', {"a": True}),
        ('{"a": {"b": [1, [', {"a": {"b": [1, []]}}),
        ('["\\ud83d', [""]),
        ('["x\\ud83d\\ude0', ["x"]),
        ('["x\\ud83d\\ude00', ["x\U0001f600"]),
        ('["x\\', ["x"]),
        ("[-", []),
        ("[1.5e", []),
    ],
)
def test_examples(text: str, snapshot: Any) -> None:
    reader = PartialJson()
    reader.feed(text)
    assert reader.value == snapshot and not reader.is_complete


def test_null_is_not_nothing() -> None:
    reader = PartialJson()
    reader.feed(" nul")
    assert (reader.has_value, reader.value) == (False, None)
    reader.feed("l")
    assert (reader.has_value, reader.value, reader.is_complete) == (True, None, True)


def test_a_number_at_top_level_ends_with_the_text() -> None:
    reader = PartialJson()
    reader.feed("12")
    assert not reader.is_complete and not reader.has_value
    reader.finish()
    assert reader.is_complete and reader.value == 12


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("NaN", 0),
        ('{"a": Infinity}', 6),
        ("[1, 2] x", 7),
        ('{"a" 1}', 5),
        ("{a: 1}", 1),
        ("[1 2]", 3),
        ('["\\x"]', 3),
        ('["\\u12g4"]', 4),
        ('["a\nb"]', 3),
        ("[01]", 3),
        ("[trye]", 3),
        ("[" + "9" * 5000 + "]", 5001),
    ],
)
@pytest.mark.parametrize("step", [1, 1000000])
def test_garbage_is_refused_with_its_place(text: str, at: int, step: int) -> None:
    reader = PartialJson()
    with pytest.raises(ValueError, match=r"not JSON at character (\d+)") as first:
        for start in range(0, len(text), step):
            reader.feed(text[start : start + step])
    place = int(str(first.value).split("character ")[1].split(":")[0])
    assert abs(place - at) <= 2  # in \u the digit is found one by one or at once
    with pytest.raises(ValueError) as again:
        reader.feed(" ")
    assert str(again.value) == str(first.value)
    with pytest.raises(ValueError):
        reader.finish()


def test_the_value_before_the_garbage_stays() -> None:
    reader = PartialJson()
    with pytest.raises(ValueError):
        reader.feed('{"a": [1, "x"] garbage')
    assert reader.value == {"a": [1, "x"]}


def test_an_unfinished_text_can_not_finish() -> None:
    reader = PartialJson()
    reader.feed('{"a": 1')
    with pytest.raises(ValueError, match="ends too early"):
        reader.finish()


def test_nesting_is_not_recursion() -> None:
    depth = 100_000
    reader = PartialJson()
    reader.feed("[" * depth)
    levels, value = 1, reader.value
    while value:
        levels, value = levels + 1, value[0]
    assert levels == depth
    reader.feed("]" * depth)
    assert reader.is_complete


def test_a_key_given_twice_has_its_later_value() -> None:
    text = '{"a": [1], "b": 2, "a": {"c": 3}}'
    assert outcome(text) == json.dumps(json.loads(text))


def test_each_character_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a feed depends on the piece, not on what came before."""
    seen: list[int] = []
    original = PartialJson._value

    def counted(self: PartialJson, text: str, at: int) -> int:
        seen.append(len(text))
        return original(self, text, at)

    reader = PartialJson()
    monkeypatch.setattr(PartialJson, "_value", counted)
    for _ in range(1000):
        reader.feed("[1, ")
    assert seen and max(seen) == 4


def test_too_large_a_number_is_infinite_as_in_json_loads() -> None:
    reader = PartialJson()
    reader.feed("[1e999, -1e999]")
    assert reader.value == [math.inf, -math.inf]
