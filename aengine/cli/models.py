"""``aengine models``: the families of models that an engine runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .families import FAMILIES, Family

_NOTE = """\
model_type: as in config.json. Models that are not listed are computed by transformers' own code, with the extra
aengine-llm[transformers], or refused with the reason. The format of tool calls follows from the model's chat template;
json is that of templates which show none."""


def add_models_parser(commands: Any) -> None:
    text = "the families of models that an engine runs, and in which formats"
    parser = commands.add_parser("models", help=text, description=text)
    parser.add_argument("--json", action="store_true", help="the same as a JSON array, with more of each")
    parser.set_defaults(main=models)


def models(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([family.to_json() for family in FAMILIES], indent=2))
        return 0
    rows = [("MODEL_TYPE", "CODE", "WEIGHTS", "TOOL CALLS", "MODELS"), *map(_row, FAMILIES)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    print(f"\n{_NOTE}")
    return 0


def _row(family: Family) -> tuple[str, ...]:
    types = family.model_types
    shown = types[0] + (", ..." if len(types) > 1 else "") if types else "*"
    return shown, family.path, ", ".join(family.formats), family.tool_calls, family.name
