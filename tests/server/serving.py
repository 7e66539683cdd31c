"""A program that serves, in a process of its own."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = Path(__file__).with_name("serve_program.py")
MOST_SECONDS = 90.0
"""Longest wait for what takes less than one: the machine may be busy with other things."""
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


class Served:
    """``aengine serve`` over a scripted engine. ``with``: it is gone at the end, whatever happens."""

    def __init__(self, *options: object, script: str = "a", token_delay: float = 0.0, **environment: str) -> None:
        command = [sys.executable, str(PROGRAM), script, str(token_delay), "--served-model-name", "fake"]
        self.process = subprocess.Popen(
            [*command, *map(str, options)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()  # its app processes end with it
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches."""
        deadline = time.monotonic() + MOST_SECONDS
        with self._news:
            while (found := re.search(pattern, self.log)) is None:
                assert self._news.wait(deadline - time.monotonic()), self.log
        return found

    def port(self) -> int:
        return int(self.until(r"served at http://127\.0\.0\.1:(\d+)")[1])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port(), timeout=MOST_SECONDS)

    def ask(self, path: str = "/v1/chat/completions", body: dict[str, Any] | None = None, key: str = "") -> Any:
        """Return status and body of an answer; of a chat without ``body``."""
        connection = self.connect()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if path.startswith("/v1/chat"):
            connection.request("POST", path, json.dumps(body or CHAT), headers | {"content-type": "application/json"})
        else:
            connection.request("GET", path, headers=headers)
        try:
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def begin_stream(self, uds: Path | None = None, **options: Any) -> socket.socket:
        """Begin a chat that streams, and wait for its first bytes."""
        if uds is None:
            sock = socket.create_connection(("127.0.0.1", self.port()), timeout=MOST_SECONDS)
        else:
            self.until("served at unix:")
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(MOST_SECONDS)
            sock.connect(str(uds))
        body = json.dumps({**CHAT, "stream": True, **options}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        sock.sendall(head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert sock.recv(20).startswith(b"HTTP/1.1 200")
        return sock

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the process to end; its exit code."""
        code = self.process.wait(MOST_SECONDS)
        self._reader.join()
        return code


def wait_until_full(sock: socket.socket) -> None:
    """Wait until no more comes into the buffer of a socket that nobody reads."""
    sizes = [0]
    while len(sizes) < 20 or len(set(sizes[-20:])) > 1 or not sizes[-1]:
        time.sleep(0.05)
        size = array("i", [0])
        fcntl.ioctl(sock, termios.FIONREAD, size)
        sizes.append(size[0])


def rest_of(sock: socket.socket) -> bytes:
    """Return what still comes, to the end of the connection; b"cut" at the end if it was reset."""
    data = bytearray()
    with sock:
        try:
            while part := sock.recv(65536):
                data += part
        except ConnectionResetError:
            data += b"cut"
    return bytes(data)
