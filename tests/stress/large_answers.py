"""Answers of many log-probabilities, whole and streamed, and many choices: the longest stall of the loop in each.

    python tests/stress/large_answers.py [--cases generate stream ...] [--n 256] [--logprobs 64] [--tokens 32]

The engine's worker is a script (`FakeAsyncLLM`), so that all that is measured is the host's. HTTP is uvicorn's, whose
client is another process that reads bytes. Of a stall "cpu" is what the loop's own thread computed in it: the rest is
that it waited for the GIL or for a core. A line of JSON a case. The exit code is 1 if a stall's own CPU is longer than
``--stall`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aengine import SamplingParams
from aengine.remote import connect, serve_engine
from aengine.server import create_app
from aengine.server.serve import keep_loaded_objects, serve_app
from aengine.testing import FakeAsyncLLM

HELLO = [{"role": "user", "content": "hello"}]

CLIENT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(sys.stdin.buffer.read())
size = 0
while data := connection.recv(1 << 20):
    size += len(data)
print(size)
"""


class Ticker:
    """How late a ticker of 1 ms was at worst, and what the loop's thread computed in the worst of its turns."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    async def watch(self) -> None:
        while True:
            begun, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.wall = max(self.wall, time.perf_counter() - begun - 0.001)
            self.cpu = max(self.cpu, time.thread_time() - used)


async def post(port: int, path: str, body: dict[str, Any]) -> int:
    """Send a request from another process, and return how many bytes its answer had."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, str(port)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await client.communicate(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return int(said)


async def read_all(stream: Any) -> int:
    return len([item async for item in stream])


def cases(args: argparse.Namespace, engine: Any, remote: Any, port: int) -> dict[str, Callable[[], Awaitable[Any]]]:
    """What is awaited, by name."""
    params = SamplingParams(max_tokens=args.tokens, n=args.n, logprobs=args.logprobs, ignore_eos=True)
    many = SamplingParams(max_tokens=4, n=args.many)
    ids = [97] * args.prompt
    text = {"prompt": "x", "max_tokens": args.tokens, "n": args.n, "logprobs": args.logprobs, "ignore_eos": True}
    chat = text | {"messages": HELLO, "logprobs": True, "top_logprobs": args.logprobs}
    del chat["prompt"]
    response = {"input": "x", "top_logprobs": args.logprobs, "max_output_tokens": args.tokens * args.n}
    tools = [
        {"name": f"tool_{i}", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
        for i in range(args.tools)
    ]
    return {
        "generate": lambda: engine.generate("x", params),
        "stream": lambda: read_all(engine.stream("x", params)),
        "chat": lambda: engine.chat(HELLO, params),
        "stream_chat": lambda: read_all(engine.stream_chat(HELLO, params)),
        "remote": lambda: remote.generate("x", params),
        "remote_stream": lambda: read_all(remote.stream("x", params)),
        "remote_stream_chat": lambda: read_all(remote.stream_chat(HELLO, params)),
        "http": lambda: post(port, "/v1/completions", text),
        "http_stream": lambda: post(port, "/v1/completions", text | {"stream": True}),
        "http_chat": lambda: post(port, "/v1/chat/completions", chat),
        "http_stream_chat": lambda: post(port, "/v1/chat/completions", chat | {"stream": True}),
        "http_response": lambda: post(port, "/v1/responses", response),
        "http_stream_response": lambda: post(port, "/v1/responses", response | {"stream": True}),
        "many": lambda: engine.generate("x", many),
        "many_tools": lambda: engine.chat(HELLO, many, tools=tools),
        "many_long": lambda: engine.generate(ids, many),
    }


@contextlib.asynccontextmanager
async def served(engine: Any) -> AsyncIterator[int]:
    listener, stop = socket.create_server(("127.0.0.1", 0)), asyncio.Event()
    app = create_app(engine)
    task = asyncio.create_task(serve_app(app, engine, listener, stop=stop, access_log=False, tells=False))
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await task


async def measure(args: argparse.Namespace, words: int, is_mine: Callable[[str], bool]) -> int:
    """``words``: of the script's text, which is encoded anew for each choice."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        async with FakeAsyncLLM("word " * words, max_model_len=200_000, max_num_seqs=args.seqs) as engine:
            async with serve_engine(engine, f"{folder}/engine"), connect(f"{folder}/engine") as remote:
                async with served(engine) as port:
                    known = cases(args, engine, remote, port)
                    await engine.chat(HELLO, SamplingParams(max_tokens=4, logprobs=3), tools=[])
                    await post(port, "/v1/completions", {"prompt": "x", "max_tokens": 4, "logprobs": 3, "n": 2})
                    keep_loaded_objects()
                    for name in filter(is_mine, args.cases or known):
                        ticker, begun = Ticker(), time.perf_counter()
                        watching = asyncio.create_task(ticker.watch())
                        await asyncio.sleep(0.01)
                        result = await known[name]()
                        seconds = time.perf_counter() - begun
                        await asyncio.sleep(0.01)
                        watching.cancel()
                        engine.requests.clear()
                        line = {"case": name, "stall_ms": ticker.wall * 1e3, "cpu_ms": ticker.cpu * 1e3, "s": seconds}
                        size = result if isinstance(result, int) else len(result.choices)
                        print(
                            json.dumps({k: v if k == "case" else round(v, 2) for k, v in line.items()} | {"size": size})
                        )
                        failed += ticker.cpu > args.stall
                        del result
    return failed


async def measure_all(args: argparse.Namespace) -> int:
    failed = await measure(args, args.tokens, lambda name: "response" not in name)
    failed += await measure(args, args.tokens * args.n, lambda name: "response" in name)
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help="those of these names; default all")
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--logprobs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--many", type=int, default=1024, help="choices of the cases without log-probabilities")
    parser.add_argument("--tools", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=100_000, help="tokens of the long prompt")
    parser.add_argument("--seqs", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--stall", type=float, default=0.02, help="seconds")
    sys.exit(asyncio.run(measure_all(parser.parse_args())))


if __name__ == "__main__":
    main()
