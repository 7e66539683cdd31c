"""What HTTP costs: the same chats by every door to one engine, in one run. JSON to stdout, a line a result.

    python benchmarks/http_cost.py                                        SmolLM2 on this machine
    python benchmarks/http_cost.py --fake                                 a scripted engine: nothing but the host's work
    python benchmarks/http_cost.py --step-us 2500                         a worker whose steps take so long, as a GPU's
    python benchmarks/http_cost.py --shape qwen3-0.6b --tokenizer DIR     random weights of engine_bench.py's shape

Doors, in turn within each round: ``stream_chat`` (the engine's own call), ``asgi`` (the application, called on the same
loop), ``openai`` (openai_client(), if openai is installed), ``http`` (uvicorn in this process on a loopback port, the
client in another), ``workers N`` (N app processes over the engine). The ratio of tokens/s to ``stream_chat`` within one
round is what counts; ``cpu_us_a_token`` is what this process computes, whatever else runs on the machine. First bytes
of the answer are timed from the call on. As `aengine serve`, the process freezes the garbage collector's objects once
all is warm: a full collection among those of OpenAI's client takes as long as a hundred calls.

Without a chat template in the tokenizer they are completions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path, PurePath
from typing import Any

from engine_bench import SHAPES
from structured import random_weights

from aengine import AsyncLLM, EngineConfig, SamplingParams
from aengine.engine.executor import ProcessExecutor

Times = tuple[float, list[float]]  # seconds from the start to the last end; of each answer to its first bytes
Bodies = list[list[bytes]]  # of each stream, one after the other
Door = Callable[[Bodies], Awaitable[Times]]

MODEL = "bench"
TEXT = "the capital of this country is a city on a river where many people live and work and read " * 4


class Bench:
    def __init__(self, engine: AsyncLLM, args: argparse.Namespace) -> None:
        self.engine = engine
        self.streams: int = args.streams
        self.requests: int = args.requests
        self.tokens: int = args.tokens
        self.is_chat = engine.tokenizer.has_chat_template
        self.path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        self._number = 0

    def bodies(self) -> Bodies:
        """Bodies for each stream; no two prompts are alike. Streams of several requests have answers of half to one and
        a half times the length, or all would begin at once for ever."""
        lengths = random.Random(self._number)
        least, most = (self.tokens // 2, self.tokens * 3 // 2) if self.requests > 1 else (self.tokens, self.tokens)
        return [[self._body(lengths.randint(least, most)) for _ in range(self.requests)] for _ in range(self.streams)]

    def _body(self, tokens: int) -> bytes:
        self._number += 1
        text = f"{self._number} {TEXT}"
        asked: dict[str, Any] = {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        prompt = {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        return json.dumps(asked | prompt).encode()

    async def gather(self, one: Callable[[bytes], Awaitable[float]], bodies: Bodies) -> Times:
        """``one``: answers a body, and returns the seconds to its first bytes."""

        async def stream(bodies: list[bytes]) -> list[float]:
            return [await one(body) for body in bodies]

        begun = time.perf_counter()
        firsts = await asyncio.gather(*map(stream, bodies))
        return time.perf_counter() - begun, [first for stream in firsts for first in stream]

    # -- doors in this process

    async def stream_chat(self, bodies: Bodies) -> Times:
        async def one(body: bytes) -> float:
            begun, first = time.perf_counter(), 0.0
            asked = json.loads(body)
            params = SamplingParams(max_tokens=asked["max_tokens"], temperature=0, ignore_eos=True)
            if self.is_chat:
                stream: Any = self.engine.stream_chat(asked["messages"], params)
            else:
                stream = self.engine.stream(asked["prompt"], params)
            while await stream.read():
                first = first or time.perf_counter() - begun
            assert stream.completion.usage.completion_tokens == asked["max_tokens"]
            return first

        return await self.gather(one, bodies)

    def asgi(self, app: Any) -> Door:
        async def one(body: bytes) -> float:
            begun, first, tail = time.perf_counter(), 0.0, b""
            received = iter([{"type": "http.request", "body": body, "more_body": False}])
            never = asyncio.Event()

            async def receive() -> Any:
                for message in received:
                    return message
                return await never.wait()

            async def send(message: Any) -> None:
                nonlocal first, tail
                if chunk := message.get("body"):
                    first = first or time.perf_counter() - begun
                    tail = chunk

            scope = {"type": "http", "method": "POST", "path": self.path, "query_string": b"", "headers": []}
            await app(scope | {"http_version": "1.1", "root_path": ""}, receive, send)
            check(tail, body)
            return first

        return lambda bodies: self.gather(one, bodies)

    def openai(self, client: Any) -> Door:
        async def one(body: bytes) -> float:
            begun, first, usage = time.perf_counter(), 0.0, None
            asked = json.loads(body)
            asked["model"] = PurePath(self.engine.config.model).name
            asked["extra_body"] = {"ignore_eos": asked.pop("ignore_eos")}
            create = client.chat.completions.create if self.is_chat else client.completions.create
            async for chunk in await create(**asked):
                first = first or time.perf_counter() - begun
                usage = chunk.usage or usage
            assert usage is not None and usage.completion_tokens == asked["max_tokens"]
            return first

        return lambda bodies: self.gather(one, bodies)


def check(tail: bytes, body: str | bytes) -> None:
    """Assert that an answer's end says that it has all tokens."""
    found = re.findall(rb'"completion_tokens":(\d+)', tail)
    assert found and int(found[-1]) == json.loads(body)["max_tokens"], tail[-2000:]


# -- the client in another process: a line of JSON in for each round, and one out


class Exchange(asyncio.Protocol):
    """One connection, as cheap as Python can be: the answer's body is looked at only at its end."""

    def __init__(self) -> None:
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, path: str, body: bytes) -> asyncio.Future[bytes]:
        self.begun, self.first, self.tail = time.perf_counter(), 0.0, b""
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = time.perf_counter() - self.begun
        self.tail = self.tail[-1500:] + data
        if self.tail.endswith(b"0\r\n\r\n") and b"[DONE]" in self.tail[-40:]:
            self.done.set_result(self.tail)
        elif not self.first and not self.tail.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(repr(self.tail[:500])))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError())


async def client() -> None:
    loop = asyncio.get_running_loop()
    connections: dict[int, list[Exchange]] = {}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        here = [one for one in connections.get(asked["port"], []) if not one.transport.is_closing()]
        connections[asked["port"]] = here
        while len(here) < len(asked["bodies"]):
            here.append((await loop.create_connection(Exchange, "127.0.0.1", asked["port"]))[1])

        async def stream(one: Exchange, bodies: list[str], path: str = asked["path"]) -> list[tuple[bytes, float]]:
            return [(await one.ask(path, body.encode()), one.first) for body in bodies]

        begun = time.perf_counter()
        answers = await asyncio.gather(*map(stream, here, asked["bodies"]))
        seconds = time.perf_counter() - begun
        for bodies, found in zip(asked["bodies"], answers):
            for body, (tail, _) in zip(bodies, found):
                check(tail, body)
        print(json.dumps([seconds, [first for found in answers for _, first in found]]), flush=True)


class Client:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Client:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", stdin=-1, stdout=-1, limit=1 << 24
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    def door(self, port: int) -> Door:
        async def ask(bodies: Bodies) -> Times:
            assert self._process is not None and self._process.stdin is not None
            assert self._process.stdout is not None
            asked: dict[str, Any] = {"port": port, "path": self._bench.path}
            asked["bodies"] = [[body.decode() for body in stream] for stream in bodies]
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            seconds, firsts = json.loads(await self._process.stdout.readline())
            return seconds, firsts

        return ask


# -- rounds


async def measure(bench: Bench, doors: dict[str, Door], rounds: int) -> None:
    """The first round warms up, and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in doors}
    firsts: dict[str, list[float]] = {name: [] for name in doors}
    costs: dict[str, list[float]] = {name: [] for name in doors}
    names = list(doors)
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            bodies = bench.bodies()
            num_tokens = sum(json.loads(body)["max_tokens"] for stream in bodies for body in stream)
            used = time.process_time()
            seconds, first = await doors[name](bodies)
            used = time.process_time() - used
            if number == 0:
                gc.collect()
                gc.freeze()
            else:
                costs[name].append(1e6 * used / num_tokens)
                rates[name].append(num_tokens / seconds)
                firsts[name] += first
    for name in names:
        ratios = [one / base for one, base in zip(rates[name], rates["stream_chat"])]
        cuts = statistics.quantiles(firsts[name], n=100, method="inclusive")
        line = {
            "door": name,
            "streams": bench.streams,
            "tok_s": round(statistics.median(rates[name]), 1),
            "to_stream_chat": round(statistics.median(ratios), 3),
            "all": [round(ratio, 3) for ratio in ratios],
            "cpu_us_a_token": round(statistics.median(costs[name]), 1),
            "first_bytes_ms_p50": round(1e3 * cuts[49], 2),
            "first_bytes_ms_p99": round(1e3 * cuts[98], 2),
        }
        print(json.dumps(line), flush=True)


class PacedWorkerLLM(AsyncLLM):
    """An engine whose worker process computes nothing: its steps take FAKE_STEP_US microseconds."""

    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="fake_worker:load_model"))


def make_engine(args: argparse.Namespace) -> AsyncLLM:
    if args.step_us:
        os.environ["FAKE_STEP_US"] = str(args.step_us)
        os.environ["PYTHONPATH"] = os.pathsep.join(  # the worker finds fake_worker.py
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return PacedWorkerLLM(args.model, max_num_seqs=args.streams)
    if args.fake:
        from aengine.testing import FakeAsyncLLM

        return FakeAsyncLLM("It lives on a river, as many of them do. " * 1000, token_delay=args.token_delay)
    if args.shape:
        settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "tokenizer": args.tokenizer}
        return AsyncLLM(random_weights(args.shape), **settings)
    return AsyncLLM(args.model, num_threads=args.num_threads)


async def main(args: argparse.Namespace) -> None:
    from aengine.cli.listening import bind_tcp
    from aengine.server import create_app
    from aengine.server.processes import serve_processes
    from aengine.server.serve import serve_app

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(make_engine(args))
        await asyncio.sleep(args.idle)
        bench = Bench(engine, args)
        app = create_app(engine, model_names=MODEL)
        doors: dict[str, Door] = {"stream_chat": bench.stream_chat, "asgi": bench.asgi(app)}
        try:
            from aengine.server.in_process import openai_client

            client = openai_client(engine)
            doors["openai"] = bench.openai(await stack.enter_async_context(client))
        except ImportError as error:
            print(json.dumps({"without": "openai", "reason": str(error)}), flush=True)
        ends = asyncio.Event()
        remote = await stack.enter_async_context(Client(bench))

        def listen(count: int) -> list[socket.socket]:
            listeners = bind_tcp("127.0.0.1", 0, count)
            for listener in listeners:
                listener.listen(1024)
            return listeners

        serving = []
        (listener,) = listen(1)
        doors["http"] = remote.door(listener.getsockname()[1])
        serving.append(serve_app(app, engine, listener, stop=ends, grace=0.1, access_log=False))
        if args.workers:
            listeners = listen(args.workers)
            doors[f"workers {args.workers}"] = remote.door(listeners[0].getsockname()[1])
            settings = {"log": {"level": "warning"}, "app": {"model_names": MODEL}, "server": {"access_log": False}}
            serving.append(serve_processes(engine, listeners, settings, stop=ends, grace=0.1))
        tasks = [asyncio.create_task(one) for one in serving]
        print(json.dumps({"cpus": os.cpu_count(), "tokens": args.tokens, "engine": engine.describe()["device"]}))
        try:
            await measure(bench, {name: doors[name] for name in doors if name in (args.doors or doors)}, args.rounds)
        finally:
            ends.set()
            await asyncio.wait(tasks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-threads", type=int, help="of the worker on a CPU")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--tokenizer", help="for --shape: a folder with its tokenizer.json")
    parser.add_argument("--fake", action="store_true", help="a scripted engine")
    parser.add_argument("--token-delay", type=float, default=0.0, help="of the scripted engine, seconds a step")
    parser.add_argument("--step-us", type=int, default=0, help="of a worker without a model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1, help="of each stream, one after the other")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2, help="0: without")
    parser.add_argument("--doors", nargs="*", help="only these, and stream_chat")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds, in which graphs are captured")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.doors:
        arguments.doors.append("stream_chat")
    running = client() if arguments.client else main(arguments)
    try:
        import uvloop

        uvloop.run(running)
    except ImportError:
        asyncio.run(running)
