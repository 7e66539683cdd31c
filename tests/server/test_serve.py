"""``aengine serve`` as a process: its start, its stops, and what stands in its way."""

from __future__ import annotations

import json
import signal
import socket
import stat
from pathlib import Path

import pytest
from serving import CHAT, Served, rest_of, wait_until_full

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_without_a_word(number: int) -> None:
    with Served("--port", 0) as served:
        assert served.ask()[0] == 200
        assert served.ask("/health") == (200, '{"status":"ok"}')
        served.signal(number)
        assert served.end() == 0
        assert "Traceback" not in served.log and "Error" not in served.log


def test_running_requests_may_end_within_the_grace() -> None:
    with Served("--port", 0, "--grace", 80, token_delay=0.001) as served:
        stream = served.begin_stream()
        served.signal()
        text = rest_of(stream)
        assert text.count(b'"content":"a') > 100 and b'"finish_reason":"stop"' in text and b"[DONE]" in text
        assert served.end() == 0 and "Traceback" not in served.log


def test_requests_that_outlast_the_grace_are_ended_properly() -> None:
    with Served("--port", 0, "--grace", 1, token_delay=1.0) as served:
        stream = served.begin_stream()
        served.signal()
        text = rest_of(stream)
        assert b'"finish_reason":"abort"' in text and b'"code":"request_aborted"' in text and b"[DONE]" in text
        assert served.end() == 0 and "Traceback" not in served.log


def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "served"
    with Served("--uds", path, "--grace", 1, script="abc" * 2000) as served:
        stream = served.begin_stream(path, logprobs=True, top_logprobs=20)
        wait_until_full(stream)
        served.signal()
        assert served.end() == 0 and "Traceback" not in served.log
        assert b"[DONE]" not in rest_of(stream)


def test_the_second_signal_ends_it_at_once() -> None:
    with Served("--port", 0, "--grace", 100_000, token_delay=1.0) as served:
        stream = served.begin_stream()
        served.signal(signal.SIGINT)
        while True:  # it accepts no more: the first signal has been seen
            try:
                socket.create_connection(("127.0.0.1", served.port())).close()
            except ConnectionError:
                break
        served.signal(signal.SIGINT)
        assert served.end() == 1 and "Traceback" not in served.log
        rest_of(stream)


@pytest.mark.parametrize("is_told_twice", [False, True])
def test_a_template_without_an_end_holds_up_no_stop(is_told_twice: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "x" * 60_000}]}
    grace = 100_000 if is_told_twice else 1
    with Served("--port", 0, "--grace", grace, script="endless") as served:
        connections = [served.connect() for _ in range(6)]
        for connection, path in zip(connections, ["/tokenize", "/v1/chat/completions"] * 3, strict=True):
            connection.request("POST", path, json.dumps(chat), {"content-type": "application/json"})
        served.ask("/health")  # they have come
        served.signal(signal.SIGTERM)
        if is_told_twice:
            served.until("stopping: no new connections")
            served.signal(signal.SIGTERM)
        assert served.end() == is_told_twice and "Traceback" not in served.log
        for connection in connections:
            connection.close()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with Served("--port", other.getsockname()[1]) as served:
            assert served.end() == 1
            (line,) = served.log.splitlines()
            assert "is in use by another program" in line and "--port" in line


@pytest.mark.parametrize("workers", [(), ("--workers", 1)])
def test_wrong_options_are_known_before_the_model_loads(workers: tuple[object, ...]) -> None:
    for option in ("--api-key=", "--allow-origin=chat.example"):
        with Served("--port", 0, option, *workers) as served:
            assert served.end() == 2
            (line,) = served.log.splitlines()
            assert line.startswith("aengine: ") and "is served" not in line


def test_a_unix_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "served"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with Served("--uds", path) as served:
        served.until("served at unix:")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, "for its own user"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        with Served("--uds", path) as second:
            assert second.end() == 1 and "in use" in second.log
        served.signal()
        assert served.end() == 0
        assert not path.exists()


def test_a_unix_socket_may_be_opened_to_others(tmp_path: Path) -> None:
    path = tmp_path / "served"
    with Served("--uds", path, "--uds-mode", "660") as served:
        served.until("served at unix:")
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    for wrong in ("rw", "888", "1777"):
        with Served("--uds", path, "--uds-mode", wrong) as served:
            assert served.end() == 2 and "is no mode of a file" in served.log


def test_the_key_may_come_from_the_environment() -> None:
    with Served("--port", 0, AENGINE_API_KEY="secret") as served:
        assert served.ask()[0] == 401
        assert served.ask(key="secret")[0] == 200
        assert served.ask("/health")[0] == 200
        assert "secret" not in served.log


def test_an_engine_that_fails_ends_the_server() -> None:
    with Served("--port", 0, "--max-restarts", 0, script="kill") as served:
        status, _ = served.ask(body={**CHAT, "max_tokens": 10})
        assert status == 503
        assert served.end() == 1
        assert "Traceback" not in served.log and served.log.splitlines()[-1].startswith(
            "aengine: the engine has failed"
        )


@pytest.mark.parametrize("package", ["starlette", "pydantic"])
def test_a_package_of_the_application_that_is_missing_is_named(package: str) -> None:
    with Served(script=f"no-{package}") as served:
        assert served.end() == 1
        assert served.log == f"aengine: aengine serve needs {package}: pip install 'aengine-llm[server]'\n"


def test_what_is_missing_is_named() -> None:
    with Served(script="no-uvicorn") as served:
        assert served.end() == 1
        assert served.log == "aengine: aengine serve needs uvicorn: pip install 'aengine-llm[server]'\n"
