"""The examples and the command line, run as a user would."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from page_runner import ForkedPages

from aengine.__main__ import main

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
Runs = Callable[..., "subprocess.CompletedProcess[str]"]


def run(*command: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture
def run_scripted(forked_pages: ForkedPages) -> Runs:
    """An example over engines of `aengine.testing`: the real model runs in others."""
    return partial(forked_pages.run, "--scripted", cwd=ROOT)


def test_stream() -> None:
    done = run("examples/stream.py", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "prompt tokens" in done.stdout


def test_batch(run_scripted: Runs) -> None:
    done = run_scripted("examples/batch.py", "40")
    assert done.returncode == 0, done.stderr
    assert "40 completions" in done.stdout
    assert "40/40" in done.stderr  # the progress bar


def test_synchronous(run_scripted: Runs) -> None:
    done = run_scripted("examples/synchronous.py", "8")
    assert done.returncode == 0, done.stderr
    assert "8 completions" in done.stdout and len(done.stdout.splitlines()) > 6 and not done.stderr


def test_extract(run_scripted: Runs) -> None:
    done = run_scripted("examples/extract.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(line.startswith(("Review(mood=", "(length)")) for line in lines)


def test_agent(run_scripted: Runs) -> None:
    done = run_scripted("examples/agent.py", "What is the weather in Paris?")
    assert done.returncode == 0, done.stderr
    assert 'calls get_weather({"city": "' in done.stdout and "Report(city=" in done.stdout.splitlines()[-1]


def test_agent_session(run_scripted: Runs) -> None:
    done = run_scripted("examples/agent_session.py", "What is the weather in Paris?")
    assert done.returncode == 0, done.stderr
    shown = [line.partition(": ") for line in done.stdout.splitlines()]
    assert [name for name, *_ in shown] == ["answer", "packing", "poem", "session", "session", "session", "fork"]
    cached = [int(text.split()[3]) for name, _, text in shown if name in ("session", "fork")]
    assert cached[0] < cached[1] < cached[2] == cached[3]


def test_pydantic_ai_agents(run_scripted: Runs) -> None:
    done = run_scripted("examples/pydantic_ai_agents.py", "Paris", "Oslo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Paris: City(") and lines[1].startswith("Oslo: City(") and "requests" in lines[2]


def test_chat(run_scripted: Runs) -> None:
    done = run_scripted("examples/chat.py", stdin="My name is Ada.\nWhat is my name?\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model: ") == 2
    cached = [int(part.split("[")[-1].split()[0]) for part in done.stdout.split(" prompt tokens cached]")[:-1]]
    assert cached[1] > cached[0]


UVICORN = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", "fastapi_embed:app"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path


@pytest.fixture
def server(tmp_path: Path, short_model: str) -> Iterator[Server]:
    port, log = free_port(), tmp_path / "log"
    with log.open("w") as out:
        environment = os.environ | {"MODEL": short_model}
        command = [*UVICORN, "--port", str(port)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}")
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        if process.poll() is None:
            process.kill()


def wait_until_up(process: subprocess.Popen, url: str) -> None:
    for _ in range(600):
        try:
            httpx.get(f"{url}/statistics", timeout=30)
            return
        except httpx.TransportError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
    pytest.fail("the server does not answer")


def statistics(url: str) -> dict:
    return httpx.get(f"{url}/statistics").json()


def test_fastapi(server: Server) -> None:
    check_answers(server.url)
    check_told_to_stop(server)


def check_answers(server: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    assert len(httpx.post(f"{server}/generate", json=body, timeout=60).text) > 8
    bad = httpx.post(f"{server}/generate", json=body | {"temperature": -1})
    assert bad.status_code == 400 and "temperature" in bad.json()["error"]
    long = httpx.post(f"{server}/generate", json=body | {"prompt": "word " * 20_000}, timeout=60)
    assert long.status_code == 400 and "max_model_len" in long.json()["error"]
    with httpx.stream("POST", f"{server}/generate", json=body | {"max_tokens": 5000}, timeout=60) as response:
        next(response.iter_text())
    assert num_aborted(server) == 1  # the client has gone: its request is aborted and its memory free
    assert httpx.post(f"{server}/chat", json=body, timeout=60).json()["usage"]["completion_tokens"] == 8
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/chat", json=LONG, timeout=httpx.Timeout(1, connect=30))
    assert num_aborted(server) == 2
    assert httpx.get(f"{server}/livez").status_code == httpx.get(f"{server}/readyz", timeout=30).status_code == 200


def num_aborted(server: str) -> int:
    """Requests so far, once nothing runs."""
    for _ in range(400):
        now = statistics(server)
        if now["num_free_blocks"] == now["num_blocks"]:
            break
        time.sleep(0.05)
    assert now["num_free_blocks"] == now["num_blocks"], now
    number: int = now["num_aborted"]
    return number


LONG = {"prompt": "Write down the numbers from 1 to 1000, in words.", "max_tokens": 5000, "temperature": 0}


def check_told_to_stop(server: Server) -> None:
    """By SIGTERM, with streams and chats under way: they end where they are, nothing is left, nothing is
    shouted."""
    url, process, texts, answers = server.url, server.process, [""] * 6, [{}] * 2
    children = psutil.Process(process.pid).children(recursive=True)

    def read(i: int) -> None:
        with httpx.stream("POST", f"{url}/generate", json=LONG, timeout=120) as response:
            for text in response.iter_text():
                texts[i] += text

    def ask(i: int) -> None:
        answers[i] = httpx.post(f"{url}/chat", json=LONG, timeout=120).json()

    lines = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(6)]
    lines += [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(2)]
    for line in lines:
        line.start()
    while not all(texts) or statistics(url)["num_running"] < 8:
        assert process.poll() is None and all(line.is_alive() for line in lines)
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    for line in lines:
        line.join(30)
    said = server.log.read_text()
    assert "Traceback" not in said and "ERROR" not in said, said
    assert "Application shutdown complete" in said
    assert [answer["finish_reason"] for answer in answers] == ["abort"] * 2
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_command_line(
    tmp_path: Path, short_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as workers then are forks of one that has imported torch."""

    def command(*options: str, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        assert main(options) == 0
        return capsys.readouterr()

    said, errors = command("run", short_model, "-", "--max-tokens", "8", "-q", stdin="What is 2 plus 2?")
    assert said.strip() and not errors
    model = str(write_tiny_model(tmp_path, "llama"))
    said, _ = command("bench", model, "--streams", "2", "--output-len", "4", "--repeats", "1", "-q")
    assert json.loads(said)["streams_2"]["tokens_per_s"] > 0
    said, errors = command("chat", short_model, "--max-tokens", "8", stdin="Hi\n/help\n/clear\n/exit\n")
    assert "[cut at --max-tokens 8]" in said and "/clear" in errors


def test_command_line_errors_are_one_line() -> None:
    for code, arguments in (
        (1, ("run", "no-such-model", "Hi")),
        (2, ("run", "smollm2-135m", "Hi", "--temperature", "-1")),
        (2, ("run", "smollm2-135m", "")),
    ):
        done = run("-m", "aengine", *arguments, "-q")
        assert done.returncode == code
        assert done.stderr.startswith("aengine: ") and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("when", ["it starts", "it answers"])
def test_interrupt(when: str, short_model: str) -> None:
    """Ctrl-C at any moment: no traceback, no worker left."""
    command = [sys.executable, "-m", "aengine", "run", short_model, "Tell me a very long story."]
    process = subprocess.Popen([*command, "--max-tokens", "4000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    if when == "it answers":
        process.stdout.read(1)
    else:
        while not psutil.Process(process.pid).children():  # its worker
            assert process.poll() is None
            time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert not [name for name in os.listdir("/dev/shm") if f"aengine-{process.pid}-" in name]
