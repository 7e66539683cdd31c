"""Writes the table of families in docs/models.md from `aengine.cli.families`.

python scripts/families.py            # write it
python scripts/families.py --check    # exit status 1 if the page has another one
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aengine.cli.families import FAMILIES, Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = (
    "| models | `model_type` | code | weights | tool calls | compared with transformers |\n|---|---|---|---|---|---|\n"
)


def table() -> str:
    return HEAD + "".join(f"| {' | '.join(_cells(family))} |\n" for family in FAMILIES)


def _cells(family: Family) -> list[str]:
    types = _codes(family.model_types) or "any other"
    tested = "; ".join(family.tested)
    return [family.name, types, family.path, ", ".join(family.formats), family.tool_calls, tested]


def _codes(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def written(page: str) -> str:
    """The page's text with the table as it should be."""
    before, _, rest = page.partition(HEAD)
    if not rest:
        raise SystemExit(f"{PAGE} has no table that begins with {HEAD.splitlines()[0]}")
    rows = rest.splitlines(keepends=True)
    end = next((i for i, row in enumerate(rows) if not row.startswith("|")), len(rows))
    return before + table() + "".join(rows[end:])


def main() -> int:
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(written(page) != page)
    PAGE.write_text(written(page))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
