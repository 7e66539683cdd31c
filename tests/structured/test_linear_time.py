"""What is searched in callers' text takes time as the text grows, not as its square: one search holds the GIL, so that
nothing else runs in the process, no deadline and no Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from aengine import GrammarError, StructuredOutput
from aengine.structured.compile_risk import risk_of
from aengine.structured.schema_faults import explain
from aengine.structured.spec import GrammarSpec, spec_of

LETTERS = 60_000
UNITS = [
    *'[({])}\\"/10 \t\n,.~?*|aA:%#&^_!x',
    *("[a", "a[", "[]", "[^", "(?", '"\\', "/\\", "[\\", "{ ", "{1", "1 ", "{,", "{3}", "~ ", "~1", "\\\n", "|\n"),
    *("a\n", "a ", "%json ", "[^]", '"\n', "(?s:.*)", "::", "| "),
]
REGEXES = ["", "a{", "a{1,", "[", "(?"]
GRAMMARS = ["", 'start: "a"\n', 'start: "', "start: /a{1", 'start: "a" ~ 1 ']
SCHEMAS = ["", '"', '{"a":']


def linear() -> None:
    """Run in a process of its own: `python test_linear_time.py`."""
    wanted: list[dict[str, Any]] = []
    for unit in UNITS:
        text = unit * (LETTERS // len(unit))
        wanted += [{"regex": prefix + text} for prefix in REGEXES]
        wanted += [{"grammar": prefix + text} for prefix in GRAMMARS]
        wanted += [{"json_schema": prefix + text} for prefix in SCHEMAS]
        wanted += [{"json_schema": {"pattern": prefix + text}} for prefix in REGEXES[:2]]
        wanted += [{"json_schema": {"patternProperties": {text + "]": True}}}]
    for fields in wanted:
        name, text = next(iter(fields.items()))
        try:
            risk_of(spec_of(StructuredOutput(**fields)))
        except GrammarError:  # none of spec_of's is one of risk_of, which has seen the rest before
            if name == "grammar":
                risk_of(GrammarSpec("lark", str(text)))
            elif name == "json_schema" and isinstance(text, dict):
                risk_of(GrammarSpec("json_schema", json.dumps(text)))


def test_no_text_takes_time_as_its_square() -> None:
    done = subprocess.run([sys.executable, __file__], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


MESSAGES = [
    *("(?s:.{1})", "(?s:.{11", "regex parse error ", "Pointer '", "Resource '", "Expected ", "Invalid type: "),
    *("Unsatisfiable schema: required property '", "Unsatisfiable schema: a (b) is ", "Unimplemented keys: ["),
]


@pytest.mark.parametrize("unit", MESSAGES)
@pytest.mark.timeout(30)
def test_messages_that_show_the_callers_text(unit: str) -> None:
    """Searched again from each place, they take a minute and more."""
    explain('{"pattern": "x"}', unit * (600_000 // len(unit)))


if __name__ == "__main__":
    linear()
