"""benchmarks/divisions.py: names of divisions, and figures beside those of the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import divisions
import pytest
from divisions import settings_of, times

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "divisions.py"


def test_names() -> None:
    assert settings_of("one") == {}
    assert settings_of("tp2") == {"tensor_parallel_size": 2}
    assert settings_of("tp2pp4dp16") == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 4,
        "data_parallel_size": 16,
    }
    assert settings_of("dp2ep") == {"data_parallel_size": 2, "enable_expert_parallel": True}
    for wrong in ("", "tp", "ep", "tp2tp2", "ep2", "tp2 ", "tp2one", "TP2", "tp0"):
        with pytest.raises(ValueError, match="is no division"):
            settings_of(wrong)


def test_times() -> None:
    first = {"start": {"first_token_s": 2.0}, "single": {"itl_ms_mean": 4.0, "tok_s": 250.0}}
    figures = {"start": {"first_token_s": 3.0}, "single": {"itl_ms_mean": 2.0, "tok_s": 500.0}, "failed": ["burst"]}
    wanted = {"start": {"first_token_s": 1.5}, "single": {"itl_ms_mean": 0.5, "tok_s": 2.0}}
    assert times(figures, first) == wanted


@pytest.mark.slow
@pytest.mark.extended
def test_two_stages_beside_one_process(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--divisions", "one", "pp2", "--tasks", "single"]
    command += ["--reps", "1", "--set", "device=cpu", "--set", "num_threads=1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(out.read_text()) == result
    one, stages = (result["divisions"][name] for name in ("one", "pp2"))
    single = "single_128_256_greedy"
    ratio = stages[single]["itl_ms_mean"] / one[single]["itl_ms_mean"]
    assert result["times_the_first"]["pp2"][single]["itl_ms_mean"] == pytest.approx(ratio, abs=0.001)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--divisions", "one", "tpx"], "'tpx' is no division"),
        (["--divisions", "one", "tp2", "one"], "a division is named twice"),
        (["--out", "/no/such/folder/result.json"], "No such file or directory: '/no/such/folder/result.json'"),
        (["--shape", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_what_is_wrong_is_told_first(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["divisions.py", "--shape", "tiny", *words])
    with pytest.raises(SystemExit):
        divisions.main()
    assert said in capsys.readouterr().err


def test_a_division_that_fails_costs_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, dict[str, Any]] = {
        "one": {"single": {"tok_s": 2.0}},
        "tp3": {"failed": 1},
        "pp2": {"single": {"tok_s": 3.0}},
    }
    monkeypatch.setattr(divisions, "run", lambda args, division, out: found[division])
    monkeypatch.setattr(sys, "argv", ["divisions.py", "--shape", "tiny", "--divisions", *found])
    assert divisions.main() == 1
    result = json.loads(capsys.readouterr().out)
    assert result["divisions"] == found
    assert result["times_the_first"] == {"tp3": {}, "pp2": {"single": {"tok_s": 1.5}}}
