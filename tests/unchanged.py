"""Tests of kernels that need not run again: all that they depend on is as it was when they passed.

    python tests/unchanged.py

runs the test files of tests/kernels that are not known to pass as they are, and notes those that pass in
tests/kernels/passed.json. `make test` leaves out what is noted there; whoever changes a kernel has its tests run again
by anybody's `make test` until they are noted.

A file's digest is that of its text, of all that it imports of this repository, directly or not, of the versions of
Python and of the libraries that compute, and of the processor, for which kernels are compiled.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "kernels"
NOTES = FOLDER / "passed.json"
LIBRARIES = ("torch", "triton", "llvmlite", "numpy", "gguf", "pytest")


def is_known(path: Path) -> bool:
    """Whether a test file of tests/kernels passed with all that it depends on as it is."""
    return path.parent == FOLDER and path.name in noted() and noted()[path.name] == digest(path)


@functools.cache
def noted() -> dict[str, str]:
    return dict(json.loads(NOTES.read_text())) if NOTES.exists() else {}


def digest(path: Path) -> str:
    """Hexadecimal; the same as long as nothing that the test file depends on is another."""
    todo = [path, FOLDER / "conftest.py"]
    files = {ROOT / "tests" / "conftest.py", *todo}
    while todo:
        new = _needed(todo.pop()) - files
        files |= new
        todo += new
    texts = sorted(f"{file.relative_to(ROOT)} {sha256(file)}" for file in files)
    return hashlib.sha256("\n".join([_machine(), *texts]).encode()).hexdigest()[:32]


@functools.cache
def _machine() -> str:
    """The processor, and the versions of what runs on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    parts = [platform.machine(), *features, platform.python_version()]
    for name in LIBRARIES:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return " ".join(parts)


@functools.cache
def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _modules_of_tests() -> dict[str, Path]:
    """By name: each folder of tests is in sys.path, and no two files have the same name."""
    return {path.stem: path for path in (ROOT / "tests").rglob("*.py")}


@functools.cache
def _needed(path: Path) -> frozenset[Path]:
    """The files of this repository that a file imports, anywhere in it, and the programs and tables that it names; all
    kernels, if it imports some by a text."""
    if path.suffix != ".py":
        return frozenset()
    package, text = list(path.relative_to(ROOT).parts[:-1]), path.read_text()
    beside = [*FOLDER.glob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "aengine" / "kernels").glob("*.json")]
    found = {own for own in beside if f'"{own.name}"' in text}
    if "import_module(" in text:
        found.update((ROOT / "aengine" / "kernels").rglob("*.py"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.update(_files(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            parts = [*above, *(node.module or "").split(".")] if node.module else above
            for alias in node.names:
                found.update(_files([*parts, alias.name]))
    return frozenset(found)


def _files(parts: list[str]) -> Iterator[Path]:
    """A module's, or that of the module a name is in, and those of the packages around it; not the face of the whole
    package, which imports the host half and is nothing to kernels."""
    if parts[:1] != ["aengine"]:
        if (path := _modules_of_tests().get(parts[0])) is not None:
            yield path
        return
    for end in range(2, len(parts) + 1):
        place = ROOT.joinpath(*parts[:end])
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists())


def main() -> int:
    unknown = [path for path in sorted(FOLDER.glob("test_*.py")) if not is_known(path)]
    digests = {path.name: digest(path) for path in unknown}  # before: they may be edited while they run
    failed = 0
    for path in unknown:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
        if subprocess.run(command, cwd=ROOT).returncode == 0:
            noted()[path.name] = digests[path.name]
            NOTES.write_text(json.dumps(dict(sorted(noted().items())), indent=1) + "\n")
        else:
            failed += 1
    print(f"{len(unknown) - failed} of {len(unknown)} noted")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
