"""load.svg and the table of gpu.md show load.json, in benchmarks/results, as scripts/load_picture.py writes."""

import json
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "load_picture.py"


def test_the_page_shows_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check"])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_medians_of_rounds_are_shown(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    line = {"kind": "result", "workload": "poisson", "engine": "mine"}
    lines = [
        line | {"params": {"rate": rate}, "first_token_ms": {"p50": p50, "p99": 9.0}, "tokens_per_s": 1000.0 * rate}
        for rate, p50 in ((20.0, 4.0), (5.0, 3.0), (20.0, 6.0), (20.0, 5.0))
    ]
    lines += [line | {"params": {"rate": 20.0}, "error": "it fell over"}, line | {"workload": "agents"}]
    file = tmp_path / "traffic.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = script["points"]([str(file)])
    assert [(point["rate"], point["p50"]) for point in figures["mine"]] == [(5.0, 3.0), (20.0, 5.0)]
    figures["theirs"] = [{"rate": 20.0, "p50": 17.0, "p99": 56.0, "tokens_per_s": None}]
    assert "| 20 | 5.0; 9.0 | 17.0; 56.0 | 20,000 |  |" in script["table"](figures)
    picture = ElementTree.fromstring(script["picture"](figures))
    circles = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 * (2 + 1) + 2, "p50 and p99 of all points, and tokens/s where it is known"
