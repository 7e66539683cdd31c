"""What HTTP costs: the same chats by three doors, in one run. JSON to stdout, a line a result.

    python benchmarks/serving.py                                          SmolLM2 on this machine
    python benchmarks/serving.py --scripted                               an engine that says its tokens at once
    python benchmarks/serving.py --shape qwen3-0.6b --tokenizer DIR       random weights of engine_bench.py's shape

    engine    engine.stream_chat, in this process
    client    engine.openai_client(), in this process; where the package openai is installed
    http      a server on a port of this machine (uvicorn, in this process), read by another process

The doors take turns, with the same chats: ``--streams`` at once, ``--tokens`` each. ``first_ms`` is the time from the
call to the first piece of text. The ratios within one round are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine_bench import SHAPES
from structured import random_weights

from aengine import AsyncLLM, SamplingParams, TextDelta
from aengine.testing import FakeAsyncLLM

MODEL = "bench"
Result = tuple[int, float]  # tokens of a chat, and seconds to its first piece
Ask = Callable[[str], Awaitable[Result]]


class Chats:
    """The chats of one round: prompts that share no prefix but the template's."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._rng = random.Random(3)

    def prompt(self) -> str:
        return " ".join(str(self._rng.randrange(10_000)) for _ in range(24))

    def body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.tokens,
            "temperature": 0.8,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def rate(ask: Ask, prompts: list[str]) -> dict[str, float]:
    begun = time.perf_counter()
    results = await asyncio.gather(*map(ask, prompts))
    seconds = time.perf_counter() - begun
    firsts = sorted(1e3 * first for _, first in results)
    return {
        "tok_s": sum(tokens for tokens, _ in results) / seconds,
        "first_ms_p50": statistics.median(firsts),
        "first_ms_p99": firsts[int(0.99 * (len(firsts) - 1))],
    }


def by_engine(engine: AsyncLLM, chats: Chats) -> Ask:
    async def ask(prompt: str) -> Result:
        begun, first = time.perf_counter(), 0.0
        params = SamplingParams(max_tokens=chats.tokens, temperature=0.8, ignore_eos=True)
        stream = engine.stream_chat([{"role": "user", "content": prompt}], params)
        async for delta in stream:
            if not first and isinstance(delta, TextDelta):
                first = time.perf_counter() - begun
        return stream.completion.usage.completion_tokens, first

    return ask


def by_client(engine: AsyncLLM, chats: Chats) -> Ask:
    client = engine.openai_client()
    name = engine.config.model.rpartition("/")[2]

    async def ask(prompt: str) -> Result:
        begun, first, tokens = time.perf_counter(), 0.0, 0
        body = chats.body(prompt) | {"model": name}
        async for chunk in await client.chat.completions.create(**body, extra_body={"ignore_eos": True}):
            if not first and chunk.choices and chunk.choices[0].delta.content:
                first = time.perf_counter() - begun
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        return tokens, first

    return ask


def by_port(port: int, chats: Chats) -> Ask:
    """Speaks just enough of HTTP, so that the client is not what is measured."""

    async def ask(prompt: str) -> Result:
        begun, first = time.perf_counter(), 0.0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(chats.body(prompt) | {"ignore_eos": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        received = bytearray()
        while piece := await reader.read(1 << 16):
            received += piece
            if not first and b'"content"' in received:
                first = time.perf_counter() - begun
        writer.close()
        _, _, rest = bytes(received).rpartition(b'"completion_tokens":')
        assert rest, received[:500]
        return int(rest[: rest.index(b",")]), first

    return ask


async def serve_rounds(port: int, tokens: int) -> None:
    """The other process: a line of prompts on stdin is a round, whose result is a line on stdout."""
    ask = by_port(port, Chats(tokens))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await rate(ask, json.loads(line))), flush=True)


async def measure(engine: AsyncLLM, args: argparse.Namespace) -> None:
    import uvicorn

    from aengine.server import create_app

    chats = Chats(args.tokens)
    config = uvicorn.Config(create_app(engine, model_names=MODEL), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    arguments = [__file__, "--client", str(port), "--tokens", str(args.tokens)]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    other = await asyncio.create_subprocess_exec(sys.executable, *arguments, **pipes)
    assert other.stdin is not None and other.stdout is not None

    async def http_round(prompts: list[str]) -> dict[str, float]:
        other.stdin.write(json.dumps(prompts).encode() + b"\n")
        result: dict[str, float] = json.loads(await other.stdout.readline())
        return result

    doors: dict[str, Callable[[list[str]], Awaitable[dict[str, float]]]] = {
        "engine": lambda prompts: rate(by_engine(engine, chats), prompts),
        "http": http_round,
    }
    try:
        ask = by_client(engine, chats)
        doors["client"] = lambda prompts: rate(ask, prompts)
    except ImportError:
        pass
    for streams in args.streams:
        results: dict[str, list[dict[str, float]]] = {door: [] for door in doors}
        for i in range(args.rounds + 1):
            for door, run in doors.items():
                found = await run([chats.prompt() for _ in range(streams)])
                if i:  # the first round warms up
                    results[door].append(found)
        for door, found in results.items():
            line: dict[str, Any] = {"streams": streams, "door": door}
            line |= {key: round(statistics.median(r[key] for r in found), 2) for key in found[0]}
            pairs = zip(found, results["engine"], strict=True)
            ratios = [mine["tok_s"] / plain["tok_s"] for mine, plain in pairs]
            line["to_engine"] = round(statistics.median(ratios), 3)
            line["to_engine_all"] = [round(ratio, 3) for ratio in ratios]
            print(json.dumps(line), flush=True)
    other.stdin.close()
    await other.wait()
    server.should_exit = True
    await serving


def make_engine(args: argparse.Namespace) -> AsyncLLM:
    if args.scripted:
        return FakeAsyncLLM(lambda request: "x" * args.tokens)
    if args.shape:
        folder = random_weights(args.shape)
        return AsyncLLM(folder, load_format="dummy", dtype="bfloat16", tokenizer=args.tokenizer)
    return AsyncLLM(args.model)


async def main(args: argparse.Namespace) -> None:
    if args.client:
        await serve_rounds(args.client, args.tokens)
        return
    async with make_engine(args) as engine:
        await measure(engine, args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--tokenizer", type=lambda path: str(Path(path).resolve()), help="for --shape: its folder")
    parser.add_argument("--scripted", action="store_true", help="no model: the most that the doors can carry")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        import uvloop

        uvloop.run(main(arguments))
    except ImportError:
        asyncio.run(main(arguments))
