"""Every Python block of README.md and docs/ runs as it stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from page_runner import ForkedPages, blocks_of
from pairs import some

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks_of(page)]
WITH_A_TINY_MODEL = {"gpu"}
"""About the worker. All other pages show the interface: they run over the real host and a scripted worker."""


@pytest.mark.extended  # three engines; the README's first program is that of examples/stream.py
def test_the_readme_over_the_real_model(tmp_path: Path, forked_pages: ForkedPages) -> None:
    check(forked_pages, PAGES[0], tmp_path)


@pytest.mark.parametrize(
    "page",
    some(PAGES, *(page for page in PAGES if page.stem != "integrations")),  # its imports alone take ten seconds
    ids=lambda page: page.stem,
)
def test_page(page: Path, tmp_path: Path, forked_pages: ForkedPages) -> None:
    over = ["--scripted"]
    if page.stem in WITH_A_TINY_MODEL:
        over = [str(write_tiny_model(tmp_path / "tiny", "llama"))]
    check(forked_pages, page, tmp_path, *over)


def check(pages: ForkedPages, page: Path, folder: Path, *over: str) -> None:
    done = pages.run(str(page), *over, cwd=folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_the_first_program_is_whole() -> None:
    """It is copied into a file: no await outside of a function, no names from elsewhere."""
    _, text = blocks_of(ROOT / "README.md")[0]
    compile(text, "README.md", "exec")
    assert "import asyncio" in text and text.rstrip().endswith("asyncio.run(main())")
