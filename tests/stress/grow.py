"""Each field of each door grows tenfold at a time, beside one small client that must not notice.

    python tests/stress/grow.py [--doors process remote http bodies cases] [--fields messages prompt ...]
                                [--most-values 1000000] [--stall 0.1] [--delay 0.5] [--rounds 2]

The engine is a real one whose worker is a script (`FakeAsyncLLM`), so that all that is measured is the host's: doors,
bounds, threads, the loop. A door is the engine in this process, `connect()` over its socket, or HTTP without a port;
all of them are on one loop, so its longest stall is that of whichever side stood still. The door "bodies" is HTTP,
too: each field of each body that there is (`aengine.server.app`) is a long text, lists and mappings of what may be
wrong there, nested deeply, and numbers that are large, long or none, all at once. The door "cases" has what no single
field grows: products (choices x log-probabilities x prompts), chains of references, blocks of tools, JSON nested
deeply wherever a caller gives JSON. Values are made in threads before they are sent, and a body is written ahead. What
is loaded is kept from garbage collection as `aengine serve` does.

Of each value a line is printed: door, field, size, its seconds, the longest wait of the small client beside it, the
longest stall of the loop, and what came of it ("ok" or its error). Of a wait and a stall "own" is what this process
computed meanwhile, in all of its threads, at most the whole: the rest is other processes' on a machine that is not
quiet, or sleep. At the end comes a JSON line with the same for nothing large, the worst of all, and the memory of the
process before, and after each round.

The exit code is 1 if a wait's own part is longer than ``--delay`` seconds or a stall's than ``--stall``, if a wait is
longer than a minute, if the engine does not run any more, or if the last round has left more than 64 MB that was not
there before it. What only the first leaves is in caches of a bounded number: compiled grammars, described types,
pieces of texts, and the memory allocator's pages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from aengine import AEngineError, SamplingParams, StructuredOutput
from aengine.remote import connect, serve_engine
from aengine.server import create_app
from aengine.server.app import _ENDPOINTS as ENDPOINTS
from aengine.server.in_process import streaming_transport
from aengine.server.serve import keep_loaded_objects
from aengine.testing import FakeAsyncLLM
from aengine.testing.script import ScriptError

HELLO = {"role": "user", "content": "hello"}
SMALL = SamplingParams(max_tokens=4)
MOST_CONTEXT = 4096
ALLOWED_MEMORY = 64 << 20
HANGS = 60.0  # seconds
DOORS = ("process", "remote", "http", "bodies", "cases")


def tool(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}}


VALUES: dict[str, Callable[[int], Any]] = {
    "messages": lambda size: [HELLO] * size,
    "parts": lambda size: [{"role": "user", "content": [{"type": "text", "text": "x"}] * size}],
    "content": lambda size: [{"role": "user", "content": "x" * size}],
    "extra": lambda size: [HELLO | {"extra": ["x"] * size}],
    "calls": lambda size: [HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}] * size}],
    "tools": lambda size: [tool(i) for i in range(size)],
    "description": lambda size: [{"name": "f", "description": "x" * size, "parameters": {}}],
    "schema": lambda size: {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(size)}},
    "enum": lambda size: {"enum": [f"value {i}" for i in range(size)]},
    "regex": lambda size: "(a|b)" * size,
    "choice": lambda size: [f"choice {i}" for i in range(size)],
    "variables": lambda size: {"documents": ["x"] * size},
    "prompt": lambda size: "x" * size,
    "ids": lambda size: [97] * size,
    "stop": lambda size: ["zz"] * size,
    "stop_token_ids": lambda size: list(range(size)),
    "logit_bias": lambda size: dict.fromkeys(range(size), 1.0),
    "n": lambda size: size,
    "logprobs": lambda size: size,
    "request_id": lambda size: "x" * size,
    "cache_salt": lambda size: "x" * size,
    "session_id": lambda size: "x" * size,
}
"""By the name of what grows, a value of a size."""
SLOW = ("tools", "schema", "enum", "choice", "regex", "chain of $ref", "chain of anyOf", "chain of allOf in a tool")

CHATS = {
    "messages": lambda value: {"messages": value},
    "parts": lambda value: {"messages": value},
    "content": lambda value: {"messages": value},
    "extra": lambda value: {"messages": value},
    "calls": lambda value: {"messages": value},
    "tools": lambda value: {"tools": value},
    "description": lambda value: {"tools": value},
    "variables": lambda value: {"chat_template_kwargs": value},
}
"""Of these the request is a chat: its fields."""
SHAPES = {"schema": "json_schema", "enum": "json_schema", "regex": "regex", "choice": "choice"}


class Request(NamedTuple):
    """One large request of a door: what is awaited, and what an HTTP status means."""

    send: Callable[[], Awaitable[Any]]


def in_process(engine: Any, name: str, value: Any) -> list[Request]:
    """The calls of an engine, here or behind a socket, that take such a value."""
    if name in CHATS:
        given = {"messages": [HELLO], **CHATS[name](value)}
        messages, tools = given.pop("messages"), given.get("tools")
        variables = given.get("chat_template_kwargs")
        return [
            Request(lambda: engine.chat(messages, SMALL, **given)),
            Request(lambda: engine.async_tokenizer.count(messages, tools, chat_template_kwargs=variables)),
        ]
    if name in SHAPES:
        return [Request(lambda: engine.generate("x", shaped(name, value)))]
    if name == "prompt":
        return [Request(lambda: engine.generate(value, SMALL)), Request(lambda: engine.async_tokenizer.encode(value))]
    if name == "ids":
        return [Request(lambda: engine.generate(value, SMALL)), Request(lambda: engine.async_tokenizer.decode(value))]
    if name in ("request_id", "cache_salt", "session_id"):
        return [Request(lambda: engine.generate("x", SMALL, **{name: value}))]
    return [Request(lambda: engine.generate("x", SMALL.replace(**{name: value})))]


def shaped(name: str, value: Any) -> SamplingParams:
    shape: dict[str, Any] = {SHAPES[name]: value}
    return SMALL.replace(structured_output=StructuredOutput(**shape))


def over_http(client: httpx.AsyncClient, name: str, value: Any) -> list[Request]:
    """The routes that take such a value."""
    bodies: list[tuple[str, dict[str, Any]]] = []
    if name in CHATS:
        fields = {"messages": [HELLO], **CHATS[name](value)}
        bodies += [("/v1/chat/completions", {"max_tokens": 4, **fields}), ("/tokenize", fields)]
        if name in ("messages", "parts", "content"):
            bodies.append(("/v1/responses/input_tokens", {"input": fields["messages"]}))
            bodies.append(("/v1/messages/count_tokens", {"model": "fake", "messages": fields["messages"]}))
            bodies.append(("/v1/messages", {"model": "fake", "max_tokens": 4, "messages": fields["messages"]}))
    elif name in SHAPES:
        field = "json" if SHAPES[name] == "json_schema" else SHAPES[name]
        bodies.append(("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {field: value}}))
    elif name == "prompt":
        bodies += [("/v1/completions", {"prompt": value, "max_tokens": 4}), ("/tokenize", {"prompt": value})]
        bodies.append(("/v1/responses", {"input": value, "max_output_tokens": 4}))
    elif name == "ids":
        bodies += [("/v1/completions", {"prompt": value, "max_tokens": 4}), ("/detokenize", {"tokens": value})]
        bodies.append(("/v1/completions", {"prompt": ["x"] * len(value), "max_tokens": 1, "stream": True}))
    else:
        bodies.append(("/v1/completions", {"prompt": "x", "max_tokens": 4, name: value}))
    return [Request(posting(client, path, json.dumps(body).encode())) for path, body in bodies]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HELLO], "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"model": "fake", "messages": [HELLO], "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [HELLO]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [97]},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/v1/score": {"text_1": "x", "text_2": ["x"]},
}
"""By route, what it answers."""

KINDS: dict[str, Callable[[int], str]] = {
    "text": lambda size: json.dumps("x" * size),
    "number": str,
    "digits": lambda size: "9" * size,
    "exponent": lambda size: f"1e{size}",
    "not a number": lambda size: "NaN",
    "infinity": lambda size: "-Infinity",
    "numbers": lambda size: json.dumps([1] * size),
    "texts": lambda size: json.dumps(["x"] * size),
    "objects": lambda size: json.dumps([{"type": "x"}] * size),
    "mapping": lambda size: json.dumps({f"k{i}": "x" for i in range(size)}),
    "nested lists": lambda size: "[" * size + "]" * size,
    "nested mappings": lambda size: '{"a":' * size + "1" + "}" * size,
}
"""By name, JSON of a size, also what Python can't write."""

CHAT = "/v1/chat/completions"
MESSAGE = {"model": "fake", "max_tokens": 4}


def completions_of(side: int) -> tuple[str, Any]:
    body = {"prompt": ["x"] * side, "n": side, "logprobs": min(side, 64), "max_tokens": 32}
    return "/v1/completions", body


def called(size: int) -> tuple[str, Any]:
    uses = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {"x": "y"}} for i in range(size)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": "x"} for i in range(size)]
    messages = [HELLO, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    return "/v1/messages", MESSAGE | {"messages": messages}


def result_of_parts(size: int) -> tuple[str, Any]:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": ["y"] * size}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}] * size}
    messages = [HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return "/v1/messages", MESSAGE | {"messages": messages}


def chain(size: int, keyword: str | None = None) -> dict[str, Any]:
    """A schema of references that follow each other."""
    refs: list[Any] = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(size)]
    links = [{keyword: [ref, {"type": "null"}]} for ref in refs] if keyword else refs
    defs = {f"d{i}": link for i, link in enumerate(links)} | {f"d{size}": {"type": "string"}}
    return {"$defs": defs, "type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}}


def shaped_by(schema: Any) -> tuple[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"schema": schema}}
    return CHAT, {"messages": [HELLO], "max_tokens": 4, "response_format": shape}


def with_parameters(schema: Any) -> tuple[str, Any]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    return CHAT, {"messages": [HELLO], "max_tokens": 4, "tools": tools}


CASES: dict[str, Callable[[int], tuple[str, Any]]] = {
    "prompts x n x logprobs": lambda size: completions_of(round(size ** (1 / 3))),
    "choices x tools": lambda size: (
        CHAT,
        {"messages": [HELLO], "n": round(size**0.5), "tools": VALUES["tools"](round(size**0.5)), "max_tokens": 4},
    ),
    "messages x parts": lambda size: (
        CHAT,
        {"messages": VALUES["parts"](round(size**0.5)) * round(size**0.5), "max_tokens": 4},
    ),
    "tool_use and tool_result": called,
    "parts of a tool_result": result_of_parts,
    "chain of $ref": lambda size: shaped_by(chain(size)),
    "chain of anyOf": lambda size: shaped_by(chain(size, "anyOf")),
    "chain of allOf in a tool": lambda size: with_parameters(chain(size, "allOf")),
}
"""By name, the route and the body of a size."""

HOLE = "@"
HOLES: dict[str, tuple[str, Any]] = {
    "variables": (CHAT, {"messages": [HELLO], "chat_template_kwargs": {"a": HOLE}}),
    "message": (CHAT, {"messages": [HELLO | {"extra": HOLE}]}),
    "arguments": (CHAT, {"messages": [HELLO, {"role": "assistant", "tool_calls": HOLE}]}),
    "schema": shaped_by({"properties": {"a": HOLE}}),
    "enum": shaped_by({"enum": [HOLE]}),
    "tool": with_parameters({"type": "object", "properties": {"a": {"default": HOLE}}}),
    "tool_choice": (CHAT, with_parameters({})[1] | {"tool_choice": {"type": "function", "function": HOLE}}),
    "structured_outputs": ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"a": HOLE}}}),
    "item": ("/v1/responses", {"input": [HELLO | {"extra": HOLE}]}),
    "tool of a response": ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "a": HOLE}]}),
    "input of a tool_use": (
        "/v1/messages",
        MESSAGE
        | {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": HOLE}]}
            ]
        },
    ),
    "input_schema": ("/v1/messages", MESSAGE | {"messages": [HELLO], "tools": [{"name": "f", "input_schema": HOLE}]}),
}
"""By name, a route and a body in which JSON is nested: wherever it is a caller's own."""


def whole_bodies(client: httpx.AsyncClient, name: str, value: list[tuple[str, bytes]]) -> list[Request]:
    return [Request(posting(client, path, body)) for path, body in value]


def bodies_of(name: str, size: int) -> list[tuple[str, bytes]]:
    """What a case, or a place of JSON, is at a size: routes and bodies."""
    if name in CASES:
        path, body = CASES[name](size)
        return [(path, json.dumps(body).encode())]
    path, body = HOLES[name.removeprefix("nested ")]
    kinds = ("nested lists", "nested mappings", "digits", "exponent", "not a number")
    return [(path, json.dumps(body).replace(f'"{HOLE}"', KINDS[kind](size)).encode()) for kind in kinds]


def fields_of_bodies() -> list[str]:
    """Each field of each body, as "/v1/score text_1"."""
    bodies = {path: body.model_fields for method, path, _, body in (e for e in ENDPOINTS if len(e) == 4)}
    return [f"{path} {name}" for path in BODIES for name in bodies[path]]


def http_client(engine: Any) -> httpx.AsyncClient:
    transport = streaming_transport(create_app(engine))
    return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=600)


def wrong_bodies(client: httpx.AsyncClient, field: str, values: list[str]) -> list[Request]:
    path, name = field.split()
    head = json.dumps({key: one for key, one in BODIES[path].items() if key != name})[:-1]
    separator = ", " if len(head) > 1 else ""
    return [Request(posting(client, path, f'{head}{separator}"{name}": {one}}}'.encode())) for one in values]


def posting(client: httpx.AsyncClient, path: str, body: bytes) -> Callable[[], Awaitable[Any]]:
    async def post() -> None:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code != 200:
            raise Refused(str(answer.status_code))

    return post


class Refused(Exception):
    """A status of HTTP that is none of success."""


class Longest:
    """The longest of some spans of time, and the longest that this process computed in one, in all its threads."""

    def __init__(self) -> None:
        self.whole = self.own = 0.0

    @contextlib.contextmanager
    def span(self, asleep: float = 0.0) -> Iterator[None]:
        begun, used = time.perf_counter(), time.process_time()
        yield
        seconds = time.perf_counter() - begun - asleep
        self.whole = max(self.whole, seconds)
        self.own = max(self.own, min(seconds, time.process_time() - used))


class Watch:
    """The longest waits of a small client of a door, and the longest stalls of the loop."""

    def __init__(self, small: Callable[[], Awaitable[Any]]) -> None:
        self._small = small
        self.delay, self.stall = Longest(), Longest()
        self.num_asked = 0

    async def ask(self) -> None:
        while True:
            with self.delay.span():
                await self._small()
            self.num_asked += 1
            await asyncio.sleep(0.005)

    async def watch(self) -> None:
        while True:
            with self.stall.span(0.001):
                await asyncio.sleep(0.001)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.ask()), asyncio.create_task(self.watch())]
        try:
            await asyncio.sleep(0.05)  # the first delays are those of the start
            self.delay, self.stall = Longest(), Longest()
            yield
            asked = self.num_asked
            while self.num_asked < asked + 2:  # one that was begun meanwhile has come
                if tasks[0].done():
                    tasks[0].result()
                await asyncio.sleep(0.001)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class Found(NamedTuple):
    """What a value did."""

    door: str
    field: str
    size: int
    outcomes: str
    seconds: float
    delay: Longest
    stall: Longest


async def outcome(request: Request) -> str:
    try:
        await request.send()
    except ScriptError:  # of a shape, which the script's text does not have
        return "ok"
    except (AEngineError, Refused) as error:
        return str(error) if isinstance(error, Refused) else type(error).__name__
    return "ok"


async def try_value(door: str, field: str, size: int, requests: list[Request], watch: Watch) -> Found:
    async with watch.running():
        begun = time.perf_counter()
        outcomes = await asyncio.gather(*map(outcome, requests))
        seconds = time.perf_counter() - begun
    return Found(door, field, size, " ".join(outcomes), seconds, watch.delay, watch.stall)


def value_of(door: str, field: str, size: int) -> Any:
    if door == "bodies":
        return [make(size) for make in KINDS.values()]
    if door == "cases":
        return bodies_of(field, size)
    return VALUES[field](size)


def sizes(field: str, most: int) -> Iterator[int]:
    size = 10
    is_of_body = field.startswith("/")  # of each kind
    while size <= (min(most, 100_000) if is_of_body or field in SLOW else most):
        yield size
        size *= 10


def resident() -> int:
    """Bytes of this process, after what is free was given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_no_fault_of_the_script(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], ScriptError)


async def grow(args: argparse.Namespace) -> dict[str, Any]:
    logging.getLogger("aengine.server").addFilter(is_no_fault_of_the_script)
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        async with FakeAsyncLLM("word", max_model_len=MOST_CONTEXT) as engine:
            async with serve_engine(engine, f"{folder}/engine"), connect(f"{folder}/engine") as remote:
                async with http_client(engine) as client:
                    doors: dict[str, tuple[Any, Any, Any]] = {
                        "process": (in_process, engine, lambda: engine.chat([HELLO], SMALL)),
                        "remote": (in_process, remote, lambda: remote.chat([HELLO], SMALL)),
                        "http": (over_http, client, over_http(client, "messages", [HELLO])[0].send),
                        "bodies": (wrong_bodies, client, over_http(client, "messages", [HELLO])[0].send),
                        "cases": (whole_bodies, client, over_http(client, "messages", [HELLO])[0].send),
                    }
                    own = {"bodies": fields_of_bodies(), "cases": [*CASES, *(f"nested {name}" for name in HOLES)]}
                    fields = {door: own.get(door, args.fields) for door in args.doors}
                    for door in args.doors:  # what the first of each kind loads or keeps stays
                        make, end, _ = doors[door]
                        for field in fields[door]:
                            await asyncio.gather(*map(outcome, make(end, field, value_of(door, field, 10))))
                    keep_loaded_objects()
                    memory = [resident()]
                    for _ in range(args.rounds):
                        for door in args.doors:
                            make, end, small = doors[door]
                            for field in fields[door]:
                                for size in sizes(field, args.most_values):
                                    value = await asyncio.to_thread(value_of, door, field, size)
                                    requests = await asyncio.to_thread(make, end, field, value)
                                    found.append(await try_value(door, field, size, requests, Watch(small)))
                                    del value, requests
                                    engine.requests.clear()  # the scripted engine keeps them for tests to look at
                                    tell(found[-1])
                        memory.append(resident())
                    alone = [await try_value(door, "nothing", 0, [], Watch(doors[door][2])) for door in args.doors]
                    state = engine.state
    return summary(args, found, alone, memory, state)


def summary(
    args: argparse.Namespace, found: list[Found], alone: list[Found], memory: list[int], state: str
) -> dict[str, Any]:
    broken = [] if state == "running" else [f"the engine is {state}"]
    for one in found:
        what = f"{one.door} {one.field} {one.size}"
        if one.delay.own > args.delay or one.delay.whole > HANGS:
            broken.append(f"{what}: the small client waited {one.delay.whole:.2f} s, of its own {one.delay.own:.2f}")
        if one.stall.own > args.stall:
            broken.append(f"{what}: the loop stood still for {one.stall.whole:.2f} s, of its own {one.stall.own:.2f}")
    if memory[-1] - memory[-2] > ALLOWED_MEMORY:
        broken.append(f"{(memory[-1] - memory[-2]) >> 20} MB of memory have not returned after the last round")
    result: dict[str, Any] = {"benchmark": "grow", "values": len(found)}
    for name in ("delay", "stall"):
        worst = max(found, key=lambda one: getattr(one, name).own)
        result[f"alone_{name}_ms"] = round(1e3 * max(getattr(one, name).own for one in alone), 1)
        result[f"worst_{name}_ms"] = round(1e3 * getattr(worst, name).own, 1)
        result[f"worst_{name}"] = f"{worst.door} {worst.field} {worst.size}"
    return result | {"memory_mb": [size >> 20 for size in memory], "broken": broken}


def tell(one: Found) -> None:
    delay, stall = (f"{1e3 * span.whole:7.1f} ms, own {1e3 * span.own:6.1f}" for span in (one.delay, one.stall))
    print(
        f"{one.door:8} {one.field:30} {one.size:>9,}  {one.seconds:6.2f} s  small client {delay}  stall {stall}  "
        f"{one.outcomes}",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--fields", nargs="+", choices=tuple(VALUES), default=list(VALUES))
    parser.add_argument("--most-values", type=int, default=1_000_000, help="the largest size")
    parser.add_argument("--stall", type=float, default=0.1, help="own seconds that the loop may stand still")
    parser.add_argument("--delay", type=float, default=0.5, help="own seconds that the small client may wait")
    parser.add_argument("--rounds", type=int, default=2, help="of all values; the last is to leave no memory")
    result = asyncio.run(grow(parser.parse_args()))
    print(json.dumps(result))
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
