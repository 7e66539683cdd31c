"""What is noted of a test file holds as long as nothing that it read is another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import unchanged
from unchanged import ROOT, TESTS, Notes, digest, digests_of, is_known, read_by

READ = ["aengine/kernels/cpu/", "aengine/kernels/rotary.py", "pyproject.toml", "tests/kernels/test_rotary.py"]
TEST = TESTS / "kernels" / "test_rotary.py"


@pytest.mark.parametrize("changed", [*READ, "the machine", "aengine/kernels/gumbel.py"])
def test_what_a_test_read_is_what_it_depends_on(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "aengine/kernels/gumbel.py"
    notes = Notes(sorted([*READ, other]), {"kernels/test_rotary.py": (digest(READ), f"{0b11101:x}")})
    assert notes.reads("kernels/test_rotary.py") == READ
    monkeypatch.setattr(unchanged, "noted", lambda: notes)
    assert is_known(TEST) and not is_known(TEST.parent / "test_gumbel.py") and not is_known(TEST.parent)
    text_of, before = unchanged.sha256, unchanged.machine()
    monkeypatch.setattr(unchanged, "sha256", lambda file: "another" if file == changed else text_of(file))
    monkeypatch.setattr(unchanged, "machine", lambda: "another" if changed == "the machine" else before)
    assert is_known(TEST) == (changed == other)


def test_no_other_folder_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "noted", lambda: Notes([], {"server/test_streams.py": (digest([]), "0")}))
    assert not is_known(TESTS / "server" / "test_streams.py")


SOURCE = """
'''About it.'''
LIMIT = 3
class Box:
    size: int = LIMIT
    '''How much it holds.'''
    def room(self, used=9):
        '''What is left.'''
        return self.size - used  # as it is
    @property
    def half(self):
        def part():
            return 2
        return self.size / part()
"""
CHANGES = {
    "return self.size - used": "Box.room",
    "return 2": "Box.half",
    "used=9": "",
    "What is left": "",
    "@property": "",
    "LIMIT = 3": "",
    "About it": "",
    "How much it holds": None,
    "as it is": None,
}
"""Texts of the source: what is another if they are."""


@pytest.mark.parametrize("text", CHANGES)
def test_a_function_and_what_an_import_does_are_told_apart(text: str) -> None:
    before, after = digests_of(SOURCE), digests_of(SOURCE.replace(text, f"{text}1"))
    assert before.keys() == after.keys() == {"", "Box.room", "Box.half"}
    assert [name for name in before if before[name] != after[name]] == [CHANGES[text]] * (CHANGES[text] is not None)


def test_a_generator_that_is_not_begun_is_told_from_a_function() -> None:
    before, after = digests_of(SOURCE), digests_of(SOURCE.replace("return self.size -", "yield self.size -"))
    assert {name for name in before if before[name] != after[name]} == {"Box.room", ""}


READER = """
import importlib, inspect, os, subprocess, sys
sys.path.insert(0, {root!r})
open("docs/index.md").close()
os.listdir("docs/internals")
values = importlib.import_module("aengine.limits.values")
values.shown(1)
if {whole}:
    importlib.import_module("aengine.kernels.rotary")
    inspect.getsource(values)
subprocess.run([sys.executable, "-c", "import aengine.__version__"], cwd={root!r})
if {whole}:
    subprocess.run([sys.executable, "-c", ""], env={{}})
"""


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_read_is_seen(whole: bool, tmp_path: Path) -> None:
    """Whether it is opened, imported by a text, listed, or read by a process that the process starts. Of a module that
    is known by its functions, those that are called, until its source is read."""
    code, log = READER.format(root=str(ROOT), whole=whole), tmp_path / "log"
    environment = os.environ | {"NOTE_READS": str(log), "PYTHONPATH": str(TESTS / "reads")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    files, reasons = read_by(log)
    values = "aengine/limits/values.py"
    assert files >= {"docs/index.md", "docs/internals/", "aengine/__version__.py:", f"{values}:", f"{values}:shown"}
    assert f"{values}:nearest" not in files and files.issuperset({values, "aengine/kernels/rotary.py"}) == whole
    assert all(not name.startswith((".venv", "build")) for name in files)
    python = f"starts {Path(sys.executable).name}"
    assert reasons == [python, *[f"{python} unseen"] * whole], "a process without the variable is not seen through"
