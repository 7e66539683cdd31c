"""``aengine serve`` over a scripted engine: python serve_program.py SCRIPT TOKEN_DELAY ARGUMENTS..."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from aengine.__main__ import main
from aengine.cli import serve
from aengine.testing import FakeAsyncLLM, Reply


def fake(script: str, token_delay: float, model: str, **config: Any) -> FakeAsyncLLM:
    said: Any = Reply("x", num_deaths=1000) if script == "kill" else script * 1000
    config = {name: value for name, value in config.items() if name not in ("device", "dtype", "load_format")}
    return FakeAsyncLLM(said, token_delay=token_delay, **config)


if __name__ == "__main__":
    script, token_delay = sys.argv[1:3]
    if script == "no-uvicorn":
        sys.modules["uvicorn"] = None  # type: ignore[assignment]
    serve.AsyncLLM = partial(fake, script, float(token_delay))  # type: ignore[misc, assignment]
    raise SystemExit(main(["serve", "smollm2-135m", *sys.argv[3:]]))
