"""`aengine serve` as shells and supervisors may start it: without standard files, on full disks, in odd places."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import MOST_SECONDS, PROGRAM, Served

pytestmark = pytest.mark.slow


def answers(path: Path, process: subprocess.Popen[bytes]) -> bytes:
    """Ask /health at a Unix socket, once it is there."""
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(MOST_SECONDS)
            try:
                client.connect(str(path))
            except OSError:
                time.sleep(0.05)
                continue
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return client.recv(1000)
    return b""


CASES = [(files, 0) for files in ("<&-", ">&-", "2>&-", "2>/dev/full")] + [("<&- >&- 2>&-", 1), (">/dev/full 2>&1", 1)]


@pytest.mark.parametrize(("files", "workers"), CASES)
def test_standard_files_that_are_closed_or_full(files: str, workers: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, str(PROGRAM), "a", "0", "--uds", str(path), *(["--workers", "1"] * workers)]
    line = f"exec {shlex.join(command)} {files}"
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert answers(path, process).startswith(b"HTTP/1.1 200"), process.poll()
            process.send_signal(signal.SIGTERM)
            assert process.wait(MOST_SECONDS) == 0
        finally:
            process.kill()


def test_app_processes_do_with_a_long_tmpdir(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with Served("--port", 0, "--workers", 1, TMPDIR=str(folder)) as served:
        assert served.ask("/health")[0] == 200
        served.signal()
        assert served.end() == 0 and list(folder.iterdir()) == []
