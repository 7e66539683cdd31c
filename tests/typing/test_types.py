"""What mypy and pyright know of the public interface; see typed_program.py."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")
EXPECTED = [i for i, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# expected error")]

CONFIG = """
[mypy]
strict = true
[mypy-aengine.*]
ignore_errors = true
follow_imports = silent
[mypy-numpy.*,pydantic.*,pydantic_core.*,torch.*,starlette.*,httpx.*,openai.*,anthropic.*]
follow_imports = skip
"""


def check_errors(errors: list[tuple[int, str]]) -> None:
    """``errors``: line and message of each that was reported."""
    assert {line for line, _ in errors} == set(EXPECTED), "\n".join(f"{line}: {text}" for line, text in errors)


@pytest.mark.slow
@pytest.mark.extended  # `test_pyright` sees the same errors in a third of the time
@pytest.mark.timeout(600)
def test_mypy(tmp_path: Path) -> None:
    """Without what the program doesn't use, which takes mypy ten seconds to find out; with a cache that stays."""
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    cache = ROOT / ".mypy_cache" / "typed_program"
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache)]
    done = subprocess.run([*command, str(PROGRAM)], capture_output=True, text=True, cwd=ROOT)
    check_errors([(int(line), text) for line, text in re.findall(r":(\d+): error: (.*)", done.stdout)])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright(tmp_path: Path) -> None:
    """By basedpyright, which is pyright with its node in a wheel."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    config = {"include": [str(PROGRAM)], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--project", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--level", "error", "--outputjson"], capture_output=True, text=True, cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert all(Path(item["file"]) == PROGRAM for item in found), done.stdout
    check_errors([(item["range"]["start"]["line"] + 1, item["message"]) for item in found])
