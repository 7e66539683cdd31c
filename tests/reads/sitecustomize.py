"""Notes what of this repository Python reads: in each process that is started with this folder in ``PYTHONPATH`` and a
file's name in ``NOTE_READS``, a line to that file for each file that is opened, folder that is listed, and process that
is started. What `import` lists is left out: a module that is found is opened, too. Of a module that ``BY_FUNCTION``
matches, a line is written when it is imported, ``file:``, and one for each of its functions that is called,
``file:function``; the whole file is noted if anything but `import` opens it, as what prints source code does."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from os import write  # tests that refuse blocking calls wrap this and the next where they stand
from os.path import abspath
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(abspath(__file__)))) + "/"
OWN = tuple(ROOT + name for name in (".venv", ".git", ".hypothesis", "build/"))
CONFTEST = ROOT + "tests/conftest.py"
BY_FUNCTION = re.compile(r"aengine/([^/]*|(limits|ipc|workers)/.*)\.py")
"""What every engine imports: settings, messages, processes. No random input of a test chooses which of its functions
are called, as it does in what computes; so what was not called when a test passed isn't called when it runs again."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """Yield those of a module and of its classes by qualified name; what is defined inside a function is part of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield inside + node.name, node
        else:
            yield from functions_of(node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside)


def _is_import_or_pytest() -> bool:
    """Whether one of them lists a folder, or our conftest, which tells pytest the names of all helpers. What is found
    and used is opened, too."""
    frame = inspect.currentframe()
    while frame and re.search(r"/(sitecustomize|pathlib\b.*|glob)\.py$", frame.f_code.co_filename):
        frame = frame.f_back
    asked_by = frame.f_code.co_filename if frame else ""
    return "importlib" in asked_by or "_pytest" in asked_by or asked_by == CONFTEST


def note_reads(log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.set_inheritable(out, False)
    seen: set[str] = set()
    importing: set[int] = set()  # threads that read a module by its functions

    def note_line(line: str) -> None:
        if line not in seen:
            seen.add(line)
            write(out, f"{line}\n".encode())

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            where = args[0] if event == "open" or args[0] is not None else "."
            if not isinstance(where, str | bytes):
                return  # a descriptor that was opened before
            path = abspath(os.fsdecode(where))
            if not path.startswith(ROOT) or path.startswith(OWN) or threading.get_ident() in importing:
                return
            if event != "open":
                if _is_import_or_pytest() or path.endswith("__pycache__"):
                    return
                path += "/"
            line = path
        elif event == "subprocess.Popen":
            program, _, _, environment = args
            is_noting = environment is None or "NOTE_READS" in environment
            line = f"starts {os.path.basename(os.fsdecode(program))}{'' if is_noting else ' unseen'}"
        elif event in ("os.fork", "os.posix_spawn", "os.exec"):
            line = "starts a process"
        else:
            return
        note_line(line)

    code_of = SourceFileLoader.get_code

    def noting_code_of(loader: SourceFileLoader, name: str) -> Any:
        path = abspath(loader.path)
        if not BY_FUNCTION.fullmatch(path.removeprefix(ROOT)):
            return code_of(loader, name)
        importing.add(threading.get_ident())
        try:
            tree = ast.parse(loader.get_data(path))
        finally:
            importing.discard(threading.get_ident())
        note_line(f"{path}:")
        for function, node in functions_of(tree):
            called = ast.parse(f"_note_call({path + ':' + function!r})").body
            start = ast.get_docstring(node, clean=False) is not None
            node.body[start:start] = called
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    builtins._note_call = note_line  # type: ignore[attr-defined]
    SourceFileLoader.get_code = noting_code_of  # type: ignore[method-assign]
    sys.addaudithook(note)


if "NOTE_READS" in os.environ:
    note_reads(os.environ["NOTE_READS"])
