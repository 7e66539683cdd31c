"""What sets up .venv, and what checks that everybody else could: Makefile and scripts/, without the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHOW_ARGUMENTS = "import sys, json; print(json.dumps(sys.argv[1:]))"
NOBODY = "http://127.0.0.1:9/simple"  # the discard port: refused at once


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()
        thread.join()


def with_torch_index(index: str) -> tuple[list[str], str]:
    """(arguments that pip would get, what is said)"""
    script = ROOT / "scripts" / "pip_with_torch_index.sh"
    command = [str(script), index, sys.executable, "-c", SHOW_ARGUMENTS, "install"]
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout), done.stderr


def test_an_index_of_torch_that_answers_is_used(index: str) -> None:
    assert with_torch_index(index) == (["install", "--extra-index-url", index], "")


def test_an_index_of_torch_that_does_not_answer_is_left_out_and_that_is_said() -> None:
    arguments, said = with_torch_index(NOBODY)
    assert arguments == ["install"]
    assert f"{NOBODY} can't be reached" in said


def test_no_index_of_torch() -> None:
    assert with_torch_index("") == (["install"], "")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_cpu_build_of_torch_is_taken_where_there_is_no_nvidia_driver() -> None:
    def commands(*settings: str) -> str:
        command = ["make", "-C", str(ROOT), "-n", "-B", "install", *settings]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "'https://download.pytorch.org/whl/cpu'" in commands("NVIDIA_DRIVER=")
    assert "pip_with_torch_index.sh ''" in commands("NVIDIA_DRIVER=/dev/nvidiactl")
    assert "pip_with_torch_index.sh 'https://mirror'" in commands("NVIDIA_DRIVER=", "TORCH_INDEX=https://mirror")


def test_the_check_of_installs_says_when_it_checked_nothing() -> None:
    environment = os.environ | {"UV_DEFAULT_INDEX": NOBODY}
    command = [sys.executable, str(ROOT / "scripts" / "check_install.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert done.stdout.startswith(f"SKIPPED: {NOBODY} cannot be reached")
