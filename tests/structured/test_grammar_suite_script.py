"""benchmarks/grammar_suite.py reads a file of lines and a directory, samples them evenly, and counts what happens."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grammar_helpers import backend_of, tiny, vocabulary

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "grammar_suite.py"
ORDERED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "object", "properties": {"x": {}, "y": {}}}},
    "required": ["a"],
    "$defs": {"n": {"type": "integer"}},
}
GROUPS: list[dict[str, Any]] = [
    {"name": "b", "schema": {"not": {}}, "tests": [{"valid": False, "data": 1}]},
    {
        "name": "a",
        "schema": ORDERED,
        "tests": [
            {"valid": True, "data": {"a": 1}},
            {"valid": True, "data": {"b": {"y": 1, "x": 2}, "a": 1}},
            {"valid": True, "data": {"a": 1.0}},  # right, but no grammar writes an integer so
            {"valid": False, "data": {"a": "1"}},
        ],
    },
    {"name": "c\u2028d", "schema": {"enum": ["\u2028"]}, "tests": [{"valid": False, "data": "\u2028"}]},
    {"name": "optional__e", "schema": {}, "tests": []},
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grammar_suite_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(group, ensure_ascii=False) + "\n" for group in GROUPS), encoding="utf-8")
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    for group in GROUPS:
        members = {"description": "", "meta": {}, "schema": group["schema"], "tests": group["tests"]}
        (path / f"{group['name']}.json").write_text(json.dumps(members), encoding="utf-8")
    (path / "readme.txt").write_text("not a group")
    return path


def test_reads_lines_in_their_order(script: ModuleType, lines: Path) -> None:
    assert [group.name for group in script.Groups(lines)] == ["b", "a", "c\u2028d"]
    assert [tuple(group) for group in script.Groups(lines, optional=True)] == [
        (group["name"], group["schema"], group["tests"]) for group in GROUPS
    ]


def test_reads_a_directory_in_the_order_of_names(script: ModuleType, directory: Path) -> None:
    groups = script.Groups(directory)
    assert len(groups) == 4
    assert [group.name for group in groups] == ["a", "b", "c\u2028d", "optional__e"]
    assert next(iter(groups)).schema == ORDERED


def test_a_sample_is_spread_evenly(script: ModuleType, directory: Path, lines: Path) -> None:
    assert [group.name for group in script.Groups(directory, sample=2)] == ["a", "c\u2028d"]
    assert [group.name for group in script.Groups(lines, sample=1)] == ["b"]
    assert len(script.Groups(directory, sample=99)) == 4


@pytest.mark.parametrize("source", ["lines", "directory"])
def test_counts_what_happens(script: ModuleType, source: str, request: pytest.FixtureRequest) -> None:
    backend, words = backend_of("tiny"), vocabulary("tiny")
    suite = script.Suite(backend, tiny(), words, relax=False, time_limit=10.0)
    for group in script.Groups(request.getfixturevalue(source), optional=True):
        suite.group(group)
    result = script.report(suite)
    assert (result["schemas"], result["schemas compiled"]) == (4, 3)
    assert result["refused"] == {"unsupported": 1} and result["instances of refused schemas"] == 1
    assert (result["valid accepted"], result["valid accepted in the schema's order"]) == (1, 1)
    assert (result["valid rejected"], result["invalid rejected"]) == (1, 1)
    assert result["invalid accepted"] == result["invalid accepted, the first"]["count"] == 1
    assert result["invalid accepted, and no warning"]["count"] == 1
    assert result["invalid accepted, the first"]["names"][0].startswith("invalid accepted: c\u2028d: ")
    assert result["mask disagreements"] == result["crashes"] == 0
    assert set(result["mask fill us"]) == set(result["compile ms"]) == {"p50", "p99", "max"}
    assert 'valid rejected: a: {"a": 1.0}' in suite.wrong


def test_a_crash_is_counted_and_named(script: ModuleType) -> None:
    class Broken:
        name = "llguidance"

        def compile(self, spec: object) -> None:
            raise ValueError("it broke")

    suite = script.Suite(Broken(), tiny(), vocabulary("tiny"), relax=False, time_limit=10.0)
    suite.group(script.Group("a", {}, []))
    assert script.report(suite)["crashes"] == 1
    assert suite.wrong == ["crash: a: ValueError('it broke')"]


def test_a_mask_that_disagrees_is_counted(script: ModuleType) -> None:
    class Stubborn:
        """Accepts everything, and its masks allow nothing."""

        def compile(self, spec: object) -> Stubborn:
            return self

        def matcher(self) -> Stubborn:
            return self

        clone = matcher
        name = "llguidance"
        warnings = ()

        def fill(self, bitmask: Any, row: int) -> None:
            bitmask[row] = 0

        def accept(self, token_ids: list[int]) -> int:
            return len(token_ids)

        def forced_tokens(self) -> list[int]:
            return []

    suite = script.Suite(Stubborn(), tiny(), vocabulary("tiny"), relax=False, time_limit=10.0)
    suite.group(script.Group("a", {}, [{"valid": False, "data": 1}]))
    result = script.report(suite)
    assert result["mask disagreements"] == 2  # "1" and the end
    assert result["invalid accepted"] == 1


def test_spread_of_nothing_and_of_some(script: ModuleType) -> None:
    from array import array

    assert script.spread(array("d")) == {}
    assert script.spread(array("d", [1.0, 2.0, 3.0])) == {"p50": 2.0, "p99": 2.98, "max": 3.0}


AB = {"properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("schema", "data", "ordered"),
    [
        (AB, {"z": 3, "b": 2, "a": 1}, '{"a": 1, "b": 2, "z": 3}'),
        ({"allOf": [{"properties": {"a": {}}}, AB]}, {"b": 2, "a": 1}, '{"a": 1, "b": 2}'),
        ({"anyOf": [{"$ref": "#"}, {"properties": {"a": {}}}]}, {"b": 2, "a": 1}, '{"a": 1, "b": 2}'),  # and it ends
        ({**AB, "additionalProperties": {"$ref": "#"}}, {"z": {"b": 2, "a": 1}}, '{"z": {"a": 1, "b": 2}}'),
        ({"items": {"$ref": "#/$defs/ab"}, "$defs": {"ab": AB}}, [{"b": 2, "a": 1}, 3], '[{"a": 1, "b": 2}, 3]'),
        ({"patternProperties": {"^p": AB}}, {"p": {"b": 2, "a": 1}}, '{"p": {"a": 1, "b": 2}}'),
        (True, {"b": 2, "a": 1}, '{"b": 2, "a": 1}'),
    ],
    ids=str,
)
def test_properties_in_the_schemas_order(script: ModuleType, schema: Any, data: Any, ordered: str) -> None:
    assert json.dumps(script.in_order(data, schema)) == ordered
