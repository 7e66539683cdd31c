"""Notes what of this repository Python reads: in each process that is started with this folder in ``PYTHONPATH`` and a
file's name in ``NOTE_READS``, a line to that file for each file that is opened, folder that is listed, and process that
is started. What `import` lists is left out: a module that is found is opened, too."""

from __future__ import annotations

import inspect
import os
import sys
from os.path import abspath  # tests that refuse blocking calls wrap that of the module
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(abspath(__file__)))) + "/"
OWN = tuple(ROOT + name for name in (".venv", ".git", "build/"))


def note_reads(log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.set_inheritable(out, False)
    seen: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            where = args[0] if event == "open" or args[0] is not None else "."
            if not isinstance(where, str | bytes):
                return  # a descriptor that was opened before
            path = abspath(os.fsdecode(where))
            if not path.startswith(ROOT) or path.startswith(OWN):
                return
            if event != "open":
                caller = inspect.currentframe().f_back  # type: ignore[union-attr]
                asked_by = caller.f_code.co_filename if caller else ""
                if "importlib" in asked_by or "_pytest" in asked_by:
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
        if line not in seen:
            seen.add(line)
            os.write(out, f"{line}\n".encode())

    sys.addaudithook(note)


if "NOTE_READS" in os.environ:
    note_reads(os.environ["NOTE_READS"])
