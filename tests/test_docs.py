"""What README.md and docs/ name exists: links, files, commands; every page has its place.

Their Python blocks run in tests/e2e/test_pages.py.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aengine.__main__ import build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    *RESULTS,
    *DOCS,
]
LANGUAGES = {"python", "bash", "sh", "text", "toml", "yaml", "dockerfile", "ini", "json", ""}
USERS_FILES = {"main.py", "app.py", "conftest.py", "requirements.txt", "fake_runner.py", "results/traffic.jsonl"}

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w*-])[\w-][\w./-]*\.(?:py|sh|md|jsonl)\b(?!\.\w)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in _BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `aengine` command: in shell blocks, Dockerfiles, and as code in the prose."""
    lines = [code for code in _CODE.findall(prose(page)) if code.startswith("aengine ")]
    for text in blocks(page, "bash", "sh", "dockerfile"):
        lines += text.replace("\\\n", " ").splitlines()
    for line in lines:
        said = line.split(" #")[0]
        found = re.search(r"(?:^|[\s/|]|-m )aengine +((?:run|chat|serve|bench|model|doctor|-)[^|;&>]*)", said)
        if found and "..." not in line:
            yield shlex.split(found[1])


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", prose(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        titles = re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in anchors, f"{target}: there are {anchors}"


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    """Those of the repository, by their name or the end of their path."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    known = ["/" + name for name in listed.splitlines()]
    for code in _CODE.findall(prose(page)):
        for name in set(_FILE.findall(code)) - USERS_FILES:
            assert any(path.endswith("/" + name) for path in known), f"`{code}`: there is no {name}"


@each_page
def test_commands_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        try:
            build_parser().parse_args(words)
        except SystemExit as end:
            said = capsys.readouterr().err
            is_just_named = len(words) == 1 and "arguments are required" in said  # in the prose, as `aengine run`
            assert end.code == 0 or is_just_named, f"aengine {shlex.join(words)}: {said}"


@each_page
def test_shell_blocks_are_shell(page: Path) -> None:
    for text in blocks(page, "bash", "sh"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stderr}"


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = [*_CODE.findall(prose(page)), *"\n".join(blocks(page, "bash", "sh")).splitlines()]
    for line in said:
        if found := re.match(r"make ([a-z]+)\b", line):
            assert found[1] in targets, line


@each_page
def test_blocks_say_what_they_are(page: Path) -> None:
    """A Python block within a list, or under another name, would not be run by test_pages.py."""
    for indent, language, text in _BLOCK.findall(page.read_text()):
        assert language in LANGUAGES, language
        assert language != "python" or not indent, text


def test_index_places_every_page() -> None:
    """How it works: the second part, and only pages of docs/internals/."""
    parts = prose(ROOT / "docs" / "index.md").split("## How it works")
    use, internals = ({target.partition("#")[0] for target in _LINK.findall(part)} for part in parts)
    names = {str(page.relative_to(ROOT / "docs")) for page in DOCS} - {"index.md"}
    assert {name for name in names if name.startswith("internals/")} == internals
    assert names - internals <= use


def test_architecture_places_every_module() -> None:
    named = set(_CODE.findall(prose(ROOT / "docs" / "internals" / "architecture.md")))
    for path in (ROOT / "aengine").iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"{path.name}/" in named, path.name
        elif path.suffix == ".py" and not path.name.startswith("__"):
            assert path.name in named, path.name


def names_of(tree: ast.AST, within: str = "") -> Iterator[str]:
    """All functions and classes, those of classes as `Class.function`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield within + node.name
            if isinstance(node, ast.ClassDef):
                yield from names_of(node, f"{within}{node.name}.")


def test_the_hour_of_reading_names_what_is_there() -> None:
    """Twelve files, together short enough, and each name that a file's section has in code is defined in the file."""
    page = ROOT / "docs" / "internals" / "read-the-code.md"
    _, *sections = re.split(r"^## \d+\. ", prose(page).partition("## From here")[0], flags=re.MULTILINE)
    assert len(sections) == 12
    num_lines = 0
    for section in sections:
        text = (page.parent / _LINK.findall(section)[0]).read_text()
        num_lines += sum(not line.isspace() for line in text.splitlines(keepends=True))
        said = {name for name in _CODE.findall(section) if re.fullmatch(r"[\w.]+", name)}
        assert said - set(names_of(ast.parse(text))) == set(), section.partition(":")[0]
        assert said, section
    assert num_lines <= 3500, f"{num_lines} lines without the blank ones take longer than an hour: name smaller files"


def test_examples_are_all_described() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f"]({example.name})" in text, example.name


def test_what_users_import_is_public() -> None:
    """Each module that a page of the index's first part imports from is in versions.md, but for those that extend."""
    use = prose(ROOT / "docs" / "index.md").partition("## How it works")[0]
    public = (ROOT / "docs" / "versions.md").read_text().partition("## What is not public")[0]
    names = set(_CODE.findall(public))
    extending = {"aengine.engine.structured.parts", "aengine.engine.structured.spec", "aengine.workers.loaded"}
    extending.add("aengine.runner.sampling.processors")
    for name in re.findall(r"\]\(([\w-]+\.md)\)", use):
        for module in re.findall(r"^from (aengine\.[\w.]+) import", (ROOT / "docs" / name).read_text(), re.MULTILINE):
            is_named = module in names or module.startswith("aengine.integrations.")
            assert is_named or module in extending, f"{name}: {module}"


def test_the_table_of_memory_is_computed() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "memory_table.py"), "--check"])
    assert done.returncode == 0, "python scripts/memory_table.py writes it"


def test_errors_page_has_every_error_and_what_it_carries() -> None:
    page = prose(ROOT / "docs" / "errors.md")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    carried = {name: set(_CODE.findall(attributes)) - {'""'} for name, attributes in rows}
    tree = ast.parse((ROOT / "aengine" / "errors.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for base in ("AEngineError", "RequestError", "EngineError"):  # in the text around the tables
        assert f"`{base}`" in page
        del classes[base]
    assert carried.keys() == classes.keys()
    for name, node in classes.items():
        assigned = [target for part in ast.walk(node) if isinstance(part, ast.Assign) for target in part.targets]
        assert carried[name] == {target.attr for target in assigned if isinstance(target, ast.Attribute)}, name


def test_nobody_is_sent_to_another_projects_package() -> None:
    """The name aengine on PyPI belongs to another project: this one's distribution is aengine-llm."""
    files = [
        *PAGES,
        *(ROOT / "aengine").rglob("*.py"),
        *(ROOT / "examples").glob("*"),
        *(ROOT / "benchmarks").glob("*"),
        *(ROOT / "scripts").glob("*"),
        ROOT / "pyproject.toml",
    ]
    wrong = re.compile(r"pip install [^`\n]*?(?<![\w/-])aengine(?![\w/.-])|(?<![\w.-])aengine(?:\[[a-z]| @ git)")
    for path in files:
        if path.is_file():
            assert not (found := wrong.search(path.read_text())), f"{path}: {found[0]}"


def test_messages_give_the_address_of_a_page() -> None:
    """pip does not bring docs/, so what a running engine says names a page by its address, and the page exists."""
    address = "https://github.com/aengine/aengine/blob/main/docs/"
    for path in {*(ROOT / "aengine").rglob("*.py")} - {ROOT / "aengine" / "settings.py"}:  # of docstrings only
        text = path.read_text()
        tree = ast.parse(text if "docs/" in text else "")
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
                continue
            for before, name in re.findall(r"(\S*?)docs/([\w/-]+\.md)", node.value):
                assert before + "docs/" == address, f"{path}: {node.value}"
                assert (ROOT / "docs" / name).is_file(), f"{path}: {name}"
