"""What the commands say on stderr: notices, and the start of an engine."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TextIO

from ..outputs import StartupProgress
from ..params import SamplingParams

_WIDTH = 24
_STAGES = {
    "resolve": "finding the model",
    "download": "downloading",
    "import": "importing the engine",
    "worker": "starting the worker",
    "weights": "loading weights",
    "profile": "measuring memory",
    "ready": "ready",
}


def tell(text: str, out: TextIO | None = None, *, end: str = "\n") -> None:
    """Write to stderr, at once. What has no room there, on a full disk, is left out: it is no reason to end."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr if out is None else out, end=end, flush=True)


class StartupLine:
    """One line on a terminal, rewritten; on anything else a line for each stage."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._tty = self._out.isatty()
        self._stage = ""
        self._begun = time.monotonic()

    def __call__(self, progress: StartupProgress) -> None:
        stage = _stage(progress)
        new_stage = stage != self._stage
        self._stage = stage
        if not self._tty:
            if new_stage:
                tell(self._text(progress), self._out)
            return
        tell(f"\r\x1b[2K{self._text(progress)}", self._out, end="")
        if progress.stage == "ready":
            tell("\r\x1b[2K", self._out, end="")

    def _text(self, progress: StartupProgress) -> str:
        seconds = time.monotonic() - self._begun
        text = f"[{seconds:4.1f} s] {_STAGES.get(self._stage, self._stage)}"
        if progress.total and self._tty:
            share = min(1.0, progress.done / progress.total)
            bar = "#" * round(share * _WIDTH)
            text += f" [{bar:<{_WIDTH}}] {share:4.0%}"
            if progress.unit == "bytes":
                text += f" of {progress.total / 1e6:.0f} MB"
        elif progress.detail:
            text += f": {progress.detail}"
        return text


def _stage(progress: StartupProgress) -> str:
    return "download" if progress.stage == "resolve" and progress.unit == "bytes" else progress.stage


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
    )
