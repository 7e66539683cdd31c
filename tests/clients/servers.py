"""Servers for the clients: ``aengine serve`` with a real, small model, and the scripted engine of `scripted`."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer

__all__ = ["answers_in", "real_server", "scripted_server", "write_tokenizer"]

REAL_MODEL = "smollm2-135m"
_HERE = Path(__file__).parent


@contextlib.contextmanager
def real_server(log: Path) -> Iterator[tuple[str, str]]:
    """Serve the real model. Yields the address, without ``/v1``, and the model's name."""
    port = _free_port()
    command = [sys.executable, "-m", "aengine", "serve", REAL_MODEL, "--port", str(port), "--max-model-len", "4096"]
    with _running(command, log, f"http://127.0.0.1:{port}") as url:
        yield url, REAL_MODEL


@contextlib.contextmanager
def scripted_server(client: str, log: Path) -> Iterator[tuple[str, str]]:
    """Serve the scripted engine, with the replies of a client's module. Yields as `real_server`."""
    port = _free_port()
    command = [sys.executable, str(_HERE / "scripted.py"), client, str(port)]
    with _running(command, log, f"http://127.0.0.1:{port}") as url:
        yield url, "fake"


@contextlib.contextmanager
def _running(command: list[str], log: Path, url: str) -> Iterator[str]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=_HERE.parents[1])
        try:
            _wait_until_served(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_served(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server is not up: {log.read_text()[-2000:]}")


def answers_in(log: Path) -> dict[str, int]:
    """Return how often each path was answered with each status, as ``POST /v1/responses 200``."""
    counts: dict[str, int] = {}
    for method, path, status in re.findall(r'"([A-Z]+) (\S+) HTTP/1\.1" (\d{3})', log.read_text(errors="replace")):
        name = f"{method} {path.partition('?')[0]} {status}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def write_tokenizer(folder: Path) -> None:
    """Write the real model's tokenizer as transformers reads it, for clients that count tokens themselves."""
    tokenizer = Tokenizer.load(resolve_model(EngineConfig.create(REAL_MODEL, {})))
    template = tokenizer.chat_template_source
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
