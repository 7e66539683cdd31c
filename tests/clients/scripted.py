"""Serves a scripted engine: python scripted.py CLIENT PORT. What it answers to each client is in its ``reply_to``;
``ENGINE`` has further settings."""

from __future__ import annotations

import asyncio
import importlib
import sys

import uvicorn

from aengine.server import create_app
from aengine.testing import FakeAsyncLLM


async def serve(client: str, port: int) -> None:
    script = importlib.import_module(client)
    settings = {"max_model_len": 400_000, "token_delay": 0.0005} | getattr(script, "ENGINE", {})
    async with FakeAsyncLLM(script.reply_to, **settings) as engine:
        config = uvicorn.Config(create_app(engine), port=port, log_level="info")
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
