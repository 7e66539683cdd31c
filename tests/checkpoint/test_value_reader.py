"""Each kind of value, at its bounds and beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aengine.checkpoint.value_reader import (
    ValueReader,
    check_nesting,
    check_settings,
    damage_explained,
    inner_path,
    read_any_json,
    read_bytes,
    read_json,
    read_text,
)
from aengine.errors import ModelLoadError, WorkerDiedError

VALUES: dict[str, Any] = {
    "zero": 0,
    "one": 1,
    "minus": -1,
    "half": 0.5,
    "large": 2**31 - 1,
    "off": False,
    "word": "word",
    "words": ["a", "b"],
    "counts": [0, 2**31 - 1],
    "numbers": [1, -0.5],
    "object": {"inner": 7},
    "objects": [{"inner": 7}, {}],
    "empty": [],
}


@pytest.mark.parametrize(
    ("read", "key", "options", "wanted"),
    [
        ("integer", "one", {}, 1),
        ("integer", "zero", {"least": 0}, 0),
        ("integer", "minus", {"least": -1}, -1),
        ("integer", "large", {}, 2**31 - 1),
        ("integer", "one", {"most": 1}, 1),
        ("number", "half", {}, 0.5),
        ("number", "half", {"above": 0.25}, 0.5),
        ("number", "half", {"least": 0.5}, 0.5),
        ("number", "one", {}, 1.0),
        ("numbers", "numbers", {}, [1.0, -0.5]),
        ("numbers", "gone", {}, []),
        ("integers", "counts", {}, [0, 2**31 - 1]),
        ("integers", "empty", {}, []),
        ("flag", "off", {"default": True}, False),
        ("flag", "one", {}, True),
        ("flag", "zero", {"default": True}, False),
        ("flag", "gone", {}, False),
        ("text", "word", {}, "word"),
        ("text", "gone", {}, ""),
        ("name", "word", {}, "word"),
        ("texts", "words", {}, ["a", "b"]),
        ("objects", "objects", {}, [{"inner": 7}, {}]),
        ("objects", "gone", {}, []),
        ("mapping", "object", {}, {"inner": 7}),
    ],
)
def test_a_value_that_can_be(read: str, key: str, options: dict[str, Any], wanted: Any) -> None:
    found = getattr(ValueReader(VALUES), read)(key, **options)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("read", "key", "options", "problem"),
    [
        ("integer", "zero", {}, "zero=0 must be an integer >= 1"),
        ("integer", "minus", {"least": 0}, "minus=-1 must be an integer >= 0"),
        ("integer", "one", {"least": 0, "most": 0.5}, "is more than any model has: 0.5 at most"),
        ("integer", "gone", {}, "has no 'gone'"),
        ("number", "half", {"above": 0.5}, "half=0.5 must be a finite number above 0.5"),
        ("number", "half", {"least": 0.75}, "half=0.5 must be a finite number >= 0.75"),
        ("number", "word", {}, "must be a finite number$"),
        ("number", "gone", {}, "has no 'gone'"),
        ("integers", "numbers", {}, "must be a list of integers >= 0"),
    ],
)
def test_a_value_that_can_not_be(read: str, key: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        getattr(ValueReader(VALUES), read)(key, **options)


def test_bounds_of_lists_and_names() -> None:
    for counts in ([2**31], [True], [-1]):
        with pytest.raises(ModelLoadError, match="list of integers >= 0"):
            ValueReader({"counts": counts}).integers("counts")
    assert ValueReader({"name": "n" * 100}).name("name") == "n" * 100
    with pytest.raises(ModelLoadError, match="at most 100 letters"):
        ValueReader({"name": "n" * 101}).name("name")


def test_places_within_a_file_are_named() -> None:
    values = ValueReader(VALUES, "a.json")
    assert list(values) == list(VALUES)
    assert values.at("object").integer("inner") == 7 and list(values.at("gone")) == []
    elements = values.elements("objects")
    assert list(elements) == ["0", "1"] and elements.at("0").integer("inner") == 7
    assert list(values.elements("gone")) == []
    with pytest.raises(ModelLoadError, match=r"^a\.json: object: inner=7 must be a text$"):
        values.at("object").text("inner")
    with pytest.raises(ModelLoadError, match=r"^a\.json: words: 1='b' must be an object$"):
        values.elements("words").mapping("1")
    with pytest.raises(ModelLoadError, match=r"^a\.json: word='word' must be a list of texts or objects$"):
        values.elements("word")


def test_numbers_in_json_have_at_most_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for digits in ("9" * 18, "9" * 19, "-" + "9" * 18, str(2**64 - 1), str(-(2**63))):
        path.write_text(digits)
        assert read_any_json(path) == int(digits) and type(read_any_json(path)) is int
    for digits in (str(2**64), str(-(2**63) - 1), "1" * 29, "1" * 30, "1" * 5000):
        path.write_text(digits)
        assert type(read_any_json(path)) is float


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    for read in (read_any_json, read_json, read_text, read_bytes):
        with pytest.raises(ModelLoadError, match="can't read .*No such file"):
            read(path)
        with pytest.raises(ModelLoadError, match="can't read .*Is a directory"):
            read(tmp_path)
    for content, problem in ((b"[1]", "not a list"), (b"{", "not valid JSON"), (b'"\xff"', "no text in UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=problem):
            read_json(path)
    path.write_text('{"a": "\\ud800"}')
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        read_json(path)
    path.write_text('{"a": "\\u00e9"}')
    assert read_json(path) == {"a": "é"}
    monkeypatch.setattr("aengine.checkpoint.value_reader._MOST_BYTES", 15)
    path.write_bytes(b" " * 15)
    assert read_bytes(path) == b" " * 15
    path.write_bytes(b" " * 16)
    for read in (read_bytes, read_text, read_any_json, read_json):
        with pytest.raises(ModelLoadError, match="it has 16 bytes, 15 at most"):
            read(path)


def test_what_is_nested_too_deeply() -> None:
    value: Any = 5
    for depth in range(1, 70):
        if depth <= 64:
            check_nesting(value, Path("x.json"))
        else:
            with pytest.raises(ModelLoadError, match=r"x\.json is nested more than 64 deep"):
                check_nesting(value, Path("x.json"))
        value = {"a": value, "b": 1} if depth % 2 else [1, value]


def test_settings_are_checked_before_anybody_reads_them() -> None:
    check_settings({"model_type": "llama", "num_hidden_layers": 4096, "num_experts": 0, "n_layer": "many"})
    for settings, problem in (
        ({"model_type": 5}, "must be a text"),
        ({"num_hidden_layers": 4097}, "4096 at most"),
        ({"num_experts": -1}, "an integer >= 0"),
        ({"num_labels": 1.5}, "an integer >= 0"),
    ):
        with pytest.raises(ModelLoadError, match=problem):
            check_settings(settings)


def test_a_file_names_others_of_its_folder_alone() -> None:
    folder = Path("/models/m")
    assert inner_path(folder, "a/b.json", Path("x.json")) == folder / "a" / "b.json"
    for name in ("/etc/passwd", "../x", "a/../../x", "a\0b", None, 5):
        with pytest.raises(ModelLoadError, match=r"x\.json names the file .*, which is not within"):
            inner_path(folder, name, Path("x.json"))


def test_errors_of_damaged_values_are_load_errors_and_others_pass() -> None:
    for error in (TypeError("t"), KeyError("k"), ZeroDivisionError(), AttributeError(), RecursionError(), ValueError()):
        with pytest.raises(ModelLoadError, match=rf"^/m: .*is damaged: {type(error).__name__}"), damage_explained("/m"):
            raise error
    for error in (WorkerDiedError("none left"), ModelLoadError("its own"), MemoryError(), OSError()):
        with pytest.raises(type(error)) as caught, damage_explained("/m"):
            raise error
        assert caught.value is error
