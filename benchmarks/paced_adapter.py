"""aengine over paced_worker.py, for traffic.py on machines without a GPU: how many steps a request waits behind.

Settings besides the engine's: step_us and token_us, microseconds that a step takes, and a token of it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aengine_adapter
from paced_worker import TAG_TOKENS

from aengine import AsyncLLM, EngineConfig
from aengine.engine.executor import ProcessExecutor

HERE = str(Path(__file__).resolve().parent)


class PacedLLM(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="paced_worker:load_model"))


class Adapter(aengine_adapter.Adapter):
    OWN_THREAD = None  # there a request is not known to the engine when `stream` returns

    async def start(self, model_dir: str, args: Any) -> None:
        pace = {"step_us": "2000", "token_us": "20"}
        given = [item.split("=", 1) for item in args.set]
        pace |= {name: value for name, value in given if name in pace}
        self._log = Path(tempfile.mkdtemp(prefix="paced-")) / "steps.jsonl"
        paths = [HERE, os.environ.get("PYTHONPATH", "")]
        os.environ |= {  # this is our own process: the worker finds paced_worker.py, and what it needs
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PACED_STEP_US": pace["step_us"],
            "PACED_TOKEN_US": pace["token_us"],
            "PACED_LOG": str(self._log),
        }
        self._known: dict[tuple[int, ...], float] = {}
        # Whoever waits is in the next step, unless a step's time is to be measured here, too: that is what is counted.
        settings = ["max_step_seconds=null", *(f"{name}={value}" for name, value in given if name not in pace)]
        await super().start(model_dir, SimpleNamespace(tokenizer="", set=settings))
        self._limit = self._engine.config.max_in_flight_steps + 1

    def _make(self, model_dir: str, settings: dict[str, Any]) -> AsyncLLM:
        return PacedLLM(model_dir, **settings)

    async def stream(self, prompt: list[int], p: dict[str, Any], request_id: str) -> AsyncIterator[int]:
        stream = self._engine.stream(prompt, self._sampling(p), request_id=request_id)
        self._known[tuple(prompt[:TAG_TOKENS])] = time.perf_counter()  # whatever was given to the worker was before
        async for _ in stream:
            yield 1

    def steps_waited(self) -> dict[str, Any]:
        """Of the requests since the last call: steps that began after the engine knew the request, and before the one
        that computes its first tokens. All were given to the worker before it was known: the next one has it."""
        begins: list[float] = []
        found: dict[tuple[int, ...], int] = {}  # which step a prompt began in
        for line in self._log.read_text().splitlines():
            begin, tags = json.loads(line)
            for tag in tags:
                found.setdefault(tuple(tag), len(begins))
            begins.append(begin)
        waited = sorted(
            sum(begin > known for begin in begins[: found[tag]]) for tag, known in self._known.items() if tag in found
        )
        self._known.clear()
        if not waited:
            return {"requests": 0, "p50": None, "max": None, "limit": self._limit, "over": 0}
        return {
            "requests": len(waited),
            "p50": waited[len(waited) // 2],
            "max": waited[-1],
            "limit": self._limit,
            "over": sum(count > self._limit for count in waited),
        }
