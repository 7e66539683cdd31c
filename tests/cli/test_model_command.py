"""``aengine model``, by its arguments, output and exit status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aengine.__main__ import main
from aengine.checkpoint import embedded
from aengine.checkpoint.embedded import EmbeddedModel
from aengine.cli.progress import StartupLine
from aengine.outputs import StartupProgress


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One embedded model, which no package has, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in list(embedded.EMBEDDED_MODELS):
        monkeypatch.delitem(embedded.EMBEDDED_MODELS, name)
    model = EmbeddedModel(("no-such-package-anywhere==1.0",), "tiny.gguf", 3_000_000, "0" * 64)
    monkeypatch.setitem(embedded.EMBEDDED_MODELS, "tiny", model)


def place(tmp_path: Path) -> Path:
    path = tmp_path / "aengine" / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_a_model_that_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place(tmp_path)
    for verb in ("add", "path"):
        assert main(["model", verb, "Tiny"]) == 0
        assert capsys.readouterr().out == f"{path}\n"
    assert main(["model", "list"]) == 0
    assert capsys.readouterr().out.split() == ["tiny", "3", "MB", str(path)]
    assert main(["model", "remove", "tiny"]) == 0
    assert not path.exists()


def test_a_model_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert "not here: aengine model add tiny" in capsys.readouterr().out
    assert main(["model", "path", "tiny"]) == 1
    assert "run `aengine model add tiny`" in capsys.readouterr().err
    assert main(["model", "remove", "tiny"]) == 0
    assert "nothing to remove" in capsys.readouterr().err
    assert main(["model", "path", "owner/repository"]) == 2
    assert "'owner/repository' is no embedded model (tiny)" in capsys.readouterr().err


def test_a_folder_without_a_model_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "add", "-q", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert not said.out and "config.json" in said.err


def test_pips_failure_is_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["model", "add", "tiny"]) == 1
    said = capsys.readouterr().err
    assert "fetching tiny (3 MB)" in said and "No matching distribution" in said


def test_a_download_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    line = StartupLine()
    line(StartupProgress("resolve", detail="owner/model"))
    line(StartupProgress("resolve", 1, 100, "bytes", "owner/model"))
    line(StartupProgress("resolve", 2, 100, "bytes", "owner/model"))
    said = capsys.readouterr().err.splitlines()
    assert [text.partition("] ")[2] for text in said] == [
        "finding the model: owner/model",
        "downloading: owner/model",
    ]
