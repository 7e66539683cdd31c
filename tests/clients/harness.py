"""What each client is run with: an environment of its own, the server's address, and checks that are written down."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Check", "Ran", "Session", "install_from_npm", "install_from_pypi", "node_package"]

MOST_SECONDS = 240.0
"""Longest run of one command. A machine that does other things, too, is several times slower."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int | None
    """Its exit status; None: it ran for too long."""
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last that was printed, of what is meant for the user if there is any."""
        lines = [line for line in (self.stdout.strip() or self.stderr).splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else ""


@dataclasses.dataclass(frozen=True)
class Check:
    """What a user did with a client, and what came of it."""

    what: str
    command: str
    passed: bool
    saw: str


@dataclasses.dataclass
class Session:
    """One client beside one server.

    Args:
        home: where the client is installed.
        work: an empty folder.
        url: the server's, without ``/v1``.
        model: the name under which the model is served.
        tokenizer: a folder with the model's tokenizer, as transformers reads it; None with the scripted engine.
    """

    home: Path
    work: Path
    url: str
    model: str
    tokenizer: Path | None = None
    checks: list[Check] = dataclasses.field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of the user's own: no keys, no settings, no proxies, no hub, no telemetry."""
        user = self.work / "user"
        user.mkdir(exist_ok=True)
        return {
            "PATH": os.pathsep.join([str(self.home / "bin"), str(self.home / "node_modules" / ".bin"), os.defpath]),
            "HOME": str(user),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(user / "hub"),
            "NO_COLOR": "1",
        }

    @property
    def node(self) -> Path:
        """The program of `node_package`."""
        return next((self.home / "node_modules").glob("node-linux-*")) / "bin" / "node"

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = MOST_SECONDS,
        interrupt_after: float | None = None,
    ) -> Ran:
        """Run one of the client's commands; with ``interrupt_after`` press Ctrl-C after so many seconds."""
        words = [str(word) for word in command]
        process = subprocess.Popen(
            words,
            cwd=cwd or self.work,
            env=self.environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=interrupt_after or timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT if interrupt_after else signal.SIGKILL)
            out, err = process.communicate(timeout=timeout)
            return Ran(process.returncode if interrupt_after else None, out, err)
        return Ran(process.returncode, out, err)

    def wait_until_idle(self, seconds: float = 5.0) -> bool:
        """Whether the server computes nothing, now or within a few seconds."""
        deadline = time.monotonic() + seconds
        while True:
            with urllib.request.urlopen(f"{self.url}/stats", timeout=seconds) as answer:
                stats = json.load(answer)
            if not stats["num_running"] + stats["num_waiting"]:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def check(self, what: str, command: Sequence[str | Path], passed: bool, saw: str) -> None:
        """Write down what came of a command, in words that hold for another machine, too."""
        shown = shlex.join(str(word) for word in command)
        for place, name in ((self.url, "$URL"), (str(self.tokenizer), "$TOKENIZER"), (str(self.work), ".")):
            shown = shown.replace(place, name)
        self.checks.append(Check(what, shown.replace(f"{self.home}/bin/", ""), passed, saw))


def install_from_pypi(home: Path, *requirements: str, constraints: Path | None = None) -> None:
    """Make a virtual environment with these packages, unless it is there. Raises CalledProcessError."""
    if _is_installed(home, requirements):
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    limits = ["-c", str(constraints)] if constraints else []
    command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", *limits, *requirements]
    subprocess.run(command, check=True)
    _mark_installed(home, requirements)


def install_from_npm(home: Path, *packages: str) -> None:
    """Put packages into a folder, unless they are there. Raises CalledProcessError, FileNotFoundError without npm."""
    if _is_installed(home, packages):
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    options = ["--no-audit", "--no-fund", "--silent", "--omit=optional" if packages[0].startswith("promptfoo") else ""]
    subprocess.run(["npm", "install", *filter(None, options), *packages], cwd=home, check=True)
    _mark_installed(home, packages)


def node_package() -> str:
    """A node of npm's own, newer than what distributions have."""
    return f"node-linux-{'arm64' if platform.machine() == 'aarch64' else 'x64'}@24.9.0"


def _is_installed(home: Path, packages: Sequence[str]) -> bool:
    mark = home / "installed.json"
    return mark.is_file() and json.loads(mark.read_text()) == list(packages)


def _mark_installed(home: Path, packages: Sequence[str]) -> None:
    (home / "installed.json").write_text(json.dumps(list(packages)))
