"""``aengine serve --workers N``: app processes that die, and the end of all of them."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from serving import MOST_SECONDS, Served, rest_of

pytestmark = pytest.mark.slow


def app_processes(served: Served) -> list[psutil.Process]:
    return psutil.Process(served.process.pid).children()


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def process_of(served: Served, stream: socket.socket) -> psutil.Process:
    """The app process that answers a stream."""
    port = stream.getsockname()[1]
    (found,) = [
        process
        for process in app_processes(served)
        if any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp"))
    ]
    return found


def streams_of_two_processes(served: Served) -> tuple[socket.socket, socket.socket]:
    first = served.begin_stream()
    while True:
        second = served.begin_stream()
        if process_of(served, second) != process_of(served, first):
            return first, second
        second.close()


def test_all_end_properly_when_one_is_told_to() -> None:
    with Served("--port", 0, "--workers", 2, "--grace", 1, token_delay=0.01) as served:
        assert served.ask("/health")[0] == 200
        streams = streams_of_two_processes(served)
        processes = app_processes(served)
        served.signal(signal.SIGTERM)
        for stream in streams:
            text = rest_of(stream)
            assert b'"finish_reason":"abort"' in text and b'"code":"request_aborted"' in text and b"[DONE]" in text
        assert served.end() == 0
        assert "Traceback" not in served.log and "another is started" not in served.log
        until(lambda: not any(process.is_running() for process in processes))


def test_a_process_that_dies_takes_its_requests_only_and_is_replaced() -> None:
    with Served("--port", 0, "--workers", 2, "--log-level", "debug", token_delay=0.001) as served:
        first, second = streams_of_two_processes(served)
        dying = process_of(served, first)
        served.until("first token")
        dying.send_signal(signal.SIGKILL)
        assert b"[DONE]" not in rest_of(first)
        served.until("request chatcmpl-[0-9a-f]+: abort")  # the engine's own record of the request
        served.until("an app process ended with exit code -9; another is started")
        until(lambda: len(app_processes(served)) == 2)
        text = rest_of(second)
        assert b'"finish_reason":"stop"' in text and b"[DONE]" in text
        for _ in range(20):  # some of them to the new process
            assert served.ask("/health")[0] == 200


def test_the_end_of_the_engines_process_ends_all(tmp_path: Path) -> None:
    """And leaves no socket."""
    with Served("--port", 0, "--workers", 2, token_delay=0.01, TMPDIR=str(tmp_path)) as served:
        first, second = streams_of_two_processes(served)
        processes = app_processes(served)
        served.signal(signal.SIGKILL)
        served.process.wait()
        for stream in (first, second):
            assert b'"finish_reason":"stop"' not in rest_of(stream)
        until(lambda: not any(process.is_running() for process in processes))
        assert list(tmp_path.iterdir()) == []


def test_errors_and_tools_travel() -> None:
    with Served("--port", 0, "--workers", 1) as served:
        messages = [{"role": "user", "content": "hello"}]
        status, text = served.ask(body={"model": "fake", "messages": [{"role": "nobody"}]})
        assert status == 400 and json.loads(text)["error"]["param"] == "messages"
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
        status, text = served.ask(body={"model": "fake", "messages": messages, "response_format": wrong})
        assert status == 400 and json.loads(text)["error"]["code"] == "schema_invalid"
        status, text = served.ask(
            body={"model": "fake", "messages": messages, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
        )
        answer = json.loads(text)
        assert status == 200 and len(answer["choices"][0]["logprobs"]["content"]) == 3
        assert re.fullmatch("a+", answer["choices"][0]["message"]["content"])
        served.signal()
        assert served.end() == 0
