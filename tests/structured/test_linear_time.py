"""What is searched in callers' text takes time as the text grows, not as its square: one search holds the GIL, so that
nothing else runs in the process, no deadline and no Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from aengine import GrammarError, StructuredOutput
from aengine.engine.structured.llguidance.cost import is_quick
from aengine.engine.structured.spec import GrammarSpec, spec_of

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
            is_quick(spec_of(StructuredOutput(**fields)))
        except GrammarError:  # those of spec_of come before it is judged
            if name == "grammar":
                is_quick(GrammarSpec("lark", str(text)))
            elif name == "json_schema" and isinstance(text, dict):
                is_quick(GrammarSpec("json_schema", json.dumps(text)))


def test_no_text_takes_time_as_its_square() -> None:
    done = subprocess.run([sys.executable, __file__], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    linear()
