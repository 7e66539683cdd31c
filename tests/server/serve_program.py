"""``aengine serve`` over a scripted engine: python serve_program.py SCRIPT TOKEN_DELAY ARGUMENTS..."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from functools import partial
from typing import Any

from aengine.__main__ import main
from aengine.cli import serve
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.testing import FakeAsyncLLM, Reply

NOT_OF_A_FAKE = ("model", "device", "dtype", "load_format")


def fake(script: str, token_delay: float, config: EngineConfig) -> FakeAsyncLLM:
    said: Any = Reply("x", num_deaths=1000) if script == "kill" else script * 1000
    given = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in NOT_OF_A_FAKE}
    changed = {name: value for name, value in given.items() if value != getattr(EngineConfig(model="m"), name)}
    return FakeAsyncLLM(said, token_delay=token_delay, **changed)


if __name__ == "__main__":
    script, token_delay = sys.argv[1:3]
    if script.startswith("no-"):
        for name in [name for name in sys.modules if name.partition(".")[0] == script[3:]]:
            del sys.modules[name]  # the fake engine has imported it
        sys.modules[script[3:]] = None  # type: ignore[assignment]
    if script == "endless":
        Tokenizer.apply_chat_template = lambda *args, **options: time.sleep(1e6)  # type: ignore[method-assign]
    serve.AsyncLLM = partial(fake, script, float(token_delay))  # type: ignore[misc, assignment]
    raise SystemExit(main(["serve", "smollm2-135m", *sys.argv[3:]]))
