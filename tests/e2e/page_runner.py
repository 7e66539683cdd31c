"""Run the Python blocks of a Markdown page in their order, as one session:

    python page_runner.py PAGE [--scripted | FOLDER]

A block with ``await``, ``async for`` or ``async with`` outside of a function runs on the session's event loop, as in a
notebook or in ``python -m asyncio``; any other runs as a file does, without a running loop. All blocks of a page share
their names. With ``--scripted`` its engines are those of `aengine.testing`, whatever model they name; with a FOLDER
they are of the model in it. Exit code 1 and the traceback, with the page's line numbers, at the first that fails. A
PAGE that is a Python file is run as it is.

    python page_runner.py --forks

runs for each line of its input, a JSON list of such arguments, in a fork: what most pages import is imported once.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

IMPORTED = (
    *(
        "openai.types.responses",
        "openai.resources",
        "starlette.applications",
        "uvicorn",
        "anthropic.resources.messages",
    ),
    *(
        "aengine.testing",
        "aengine.server.app",
        "aengine.server.in_process",
        "aengine.engine.structured.pydantic_schema",
    ),
)
"""By most pages, when they run."""
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """(line of its first statement, text) of each Python block."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in _BLOCK.finditer(text)]


def run_page(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(page)}
    with asyncio.Runner() as runner:
        for line, text in blocks_of(page):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile("\n" * (line - 1) + text, str(page), "exec", flags=flags, dont_inherit=True)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(_awaited(code, names))
            else:
                exec(code, names)
        runner.run(_close(names))


def script_engines() -> None:
    """Make ``AsyncLLM`` and ``LLM`` of the package engines without a model."""
    import aengine
    from aengine.testing import FakeAsyncLLM, FakeLLM

    class ScriptedAsyncLLM(FakeAsyncLLM):
        def __init__(self, model: str | aengine.EngineConfig, **settings: Any) -> None:
            super().__init__(**settings)
            name = model if isinstance(model, str) else model.model
            handle: Any = self._handle
            handle.config = self.config.replace(model=name)  # a server answers for the model that the page names

    class ScriptedLLM(FakeLLM):
        def __init__(self, model: str, **settings: Any) -> None:
            super().__init__(**settings)

    aengine.AsyncLLM, aengine.LLM = ScriptedAsyncLLM, ScriptedLLM


def put_model(folder: str) -> None:
    """Make ``AsyncLLM`` of the package engines of this model."""
    import aengine

    class AsyncLLMOfFolder(aengine.AsyncLLM):
        def __init__(self, model: str, **settings: Any) -> None:
            super().__init__(folder, **settings)

    aengine.AsyncLLM = AsyncLLMOfFolder


async def _awaited(code: Any, names: dict[str, Any]) -> None:
    await eval(code, names)


async def _close(names: dict[str, Any]) -> None:
    """End what a page leaves open, as the end of a notebook's kernel does."""
    for value in list(names.values()):
        if hasattr(value, "aclose") and getattr(value, "state", "") == "running":
            await value.aclose()


def main() -> int:
    is_scripted = "--scripted" in sys.argv
    del sys.argv[0]
    if is_scripted:
        sys.argv.remove("--scripted")
        script_engines()
    elif sys.argv[0].endswith(".md") and len(sys.argv) > 1:
        put_model(sys.argv[1])
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            run_page(Path(sys.argv[0]))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> int:
    """Fork for each line of the input, and say the fork's exit code. A fork ends as any program does."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the forks' first collections would copy every page
    for line in sys.stdin:
        folder, streams, arguments = json.loads(line)
        if not (pid := os.fork()):
            for fd, (name, mode) in enumerate(zip(("in", "out", "err"), "rww", strict=True)):
                with open(f"{streams}/{name}", mode) as file:
                    os.dup2(file.fileno(), fd)
            os.chdir(folder)
            sys.stdin = open(0, closefd=False)
            sys.argv[1:] = arguments
            return main()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return 0


class ForkedPages:
    """Runs pages as this program does, without its imports."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", __file__, "--forks"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, *arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as streams:
            Path(streams, "in").write_text(stdin)
            self._process.stdin.write(json.dumps([str(cwd), streams, arguments]) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            said = (Path(streams, name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(arguments, code, *said)

    def close(self) -> None:
        with self._process as process:  # closes the pipes, and waits
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--forks"] else main())
