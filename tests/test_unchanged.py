"""What is noted of a test file holds as long as nothing that it depends on is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import unchanged
from unchanged import FOLDER, ROOT, digest, is_known

KERNELS = ROOT / "aengine" / "kernels"


@pytest.mark.parametrize(
    ("test", "changed", "matters"),
    [
        ("test_rotary.py", FOLDER / "test_rotary.py", True),
        ("test_rotary.py", KERNELS / "rotary.py", True),
        ("test_rotary.py", FOLDER / "conftest.py", True),
        ("test_rotary.py", KERNELS / "gumbel.py", False),
        ("test_gumbel.py", KERNELS / "triton" / "launch.py", True),
        ("test_cpu_products.py", KERNELS / "cpu" / "compiler" / "emit.py", True),
        ("test_grouped_codes.py", ROOT / "aengine" / "runner" / "weights" / "plain.py", True),
        ("test_linear_script.py", ROOT / "benchmarks" / "gpu_linear.py", True),
        ("test_compiles.py", FOLDER / "compile_everything.py", True),
        ("test_compiles.py", KERNELS / "triton" / "gumbel.py", True),
        ("test_linear_ways.py", KERNELS / "linear_tilings.json", True),
        ("test_gumbel.py", ROOT / "tests" / "conftest.py", True),
        ("test_gumbel.py", ROOT / "aengine" / "async_llm.py", False),
    ],
)
def test_what_a_test_depends_on(test: str, changed: Path, matters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = FOLDER / test, digest(FOLDER / test)
    monkeypatch.setattr(unchanged, "noted", lambda: {test: before})
    assert is_known(path)
    text_of = unchanged.sha256
    monkeypatch.setattr(unchanged, "sha256", lambda file: "another" if file == changed else text_of(file))
    assert changed.exists() and is_known(path) != matters


def test_no_other_folder_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "tests" / "runner" / "test_rows.py"
    monkeypatch.setattr(unchanged, "noted", lambda: {path.name: digest(path)})
    assert not is_known(path)
    assert not is_known(FOLDER / "__pycache__")
