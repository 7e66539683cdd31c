"""What an agent framework costs the loop of an in-process engine. JSON to stdout, a line a framework.

    python benchmarks/frameworks.py                         all that are installed
    python benchmarks/frameworks.py --beside /other/tree    and those of another checkout, in turn in the same run
    python benchmarks/frameworks.py --only langchain --streams 1 16

The engine is scripted (aengine.testing), so that nothing but the host's work is measured. Each round asks in turn
``bare``, the engine's own `stream_chat`, and the framework's model: for whole answers, and for streams whose tokens
come ``--delay`` apart. CPU is that of the loop's thread (for smolagents, whose agents block, of the engine's), in
microseconds: ``us_a_token`` of streamed answers, ``us_a_call`` of a whole answer of one token; ``first_ms`` is wall
time from the call to the first piece. All are medians over the rounds, of which each tree has a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
os.environ.setdefault("DSPY_CACHEDIR", os.path.join(tempfile.gettempdir(), "aengine-dspy"))
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it fetches one as it is imported

from aengine.testing import FakeAsyncLLM

ROOT = Path(__file__).resolve().parent.parent
TEXT = "the capital of this country is a city on a river "
MESSAGES = [{"role": "user", "content": "How warm is it in Paris?"}]

Ask = Callable[[], Awaitable[object]]
Read = Callable[[], AsyncIterator[object]]


# -- a framework: its model over an engine, as a call for a whole answer and one for a stream


def bare(_: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    async def read() -> AsyncIterator[object]:
        async with engine.stream_chat(MESSAGES) as stream:
            async for delta in stream:
                yield delta

    return lambda: engine.chat(MESSAGES), read


def pydantic_ai(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    from pydantic_ai.messages import ModelRequest
    from pydantic_ai.models import ModelRequestParameters

    model = module.AEngineModel(engine)  # type: ignore[union-attr]
    messages = [ModelRequest.user_text_prompt(MESSAGES[0]["content"])]

    async def read() -> AsyncIterator[object]:
        async with model.request_stream(messages, None, ModelRequestParameters()) as stream:
            async for event in stream:
                yield event

    return lambda: model.request(messages, None, ModelRequestParameters()), read


def openai_agents(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    from agents import ModelSettings, ModelTracing, set_tracing_disabled

    set_tracing_disabled(True)
    model = module.AEngineModel(engine)  # type: ignore[union-attr]
    asked: Any = (None, "How warm is it in Paris?", ModelSettings(), [], None, [], ModelTracing.DISABLED)
    kept = {"previous_response_id": None, "conversation_id": None, "prompt": None}
    return lambda: model.get_response(*asked, **kept), lambda: model.stream_response(*asked, **kept)


def langchain(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    model = module.ChatAEngine(engine=engine)  # type: ignore[union-attr]
    return lambda: model.ainvoke(MESSAGES), lambda: model.astream(MESSAGES)


def llama_index(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    from llama_index.core.base.llms.types import ChatMessage

    llm = module.AEngine(engine)  # type: ignore[union-attr]
    messages = [ChatMessage(role="user", content=MESSAGES[0]["content"])]

    async def read() -> AsyncIterator[object]:
        async for response in await llm.astream_chat(messages):
            yield response

    return lambda: llm.achat(messages), read


def litellm(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    import litellm as library

    name = f"{module.__name__}-{id(engine)}"  # type: ignore[union-attr]
    module.register(engine, name)  # type: ignore[union-attr]
    call: Any = {"model": f"{name}/fake", "messages": MESSAGES}

    async def read() -> AsyncIterator[object]:
        async for chunk in await library.acompletion(**call, stream=True):
            yield chunk

    return lambda: library.acompletion(**call), read


def dspy(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    from dspy import lm15

    calls = module.AsyncAEngine(engine)  # type: ignore[union-attr]
    request = lm15.Request("aengine/fake", messages=(lm15.Message.user(MESSAGES[0]["content"]),))
    return lambda: calls.complete(request), lambda: calls.stream(request)


def smolagents(module: ModuleType | None, engine: FakeAsyncLLM) -> tuple[Ask, Read]:
    model = module.AEngineModel(engine, max_tokens=1000)  # type: ignore[union-attr]
    messages: Any = [{"role": "user", "content": MESSAGES[0]["content"]}]

    async def ask() -> object:
        return model.generate(messages)

    async def read() -> AsyncIterator[object]:  # blocks this loop, which has nothing else to do
        for piece in model.generate_stream(messages):
            yield piece

    return ask, read


FRAMEWORKS: dict[str, Callable[[ModuleType | None, FakeAsyncLLM], tuple[Ask, Read]]] = {
    "pydantic_ai": pydantic_ai,
    "openai_agents": openai_agents,
    "langchain": langchain,
    "llama_index": llama_index,
    "litellm": litellm,
    "dspy": dspy,
    "smolagents": smolagents,
}


# -- measuring


async def streamed(read: Read, streams: int, cpu: Callable[[], float]) -> tuple[float, float]:
    """CPU seconds of all the streams at once, and the median's seconds to the first piece."""
    firsts: list[float] = []

    async def one() -> None:
        begun, is_first = time.perf_counter(), True
        async for _ in read():
            if is_first:
                firsts.append(time.perf_counter() - begun)
                is_first = False

    before = cpu()
    await asyncio.gather(*(one() for _ in range(streams)))
    return cpu() - before, statistics.median(firsts)


async def whole(ask: Ask, calls: int, cpu: Callable[[], float]) -> float:
    before = cpu()
    for _ in range(calls):
        await ask()
    return (cpu() - before) / calls


def cpu_of_others() -> Callable[[], float]:
    """Return what reads the CPU time of all threads but this one: those of engines."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in others if thread.ident is not None]
    return lambda: sum(map(time.clock_gettime, clocks))


async def measure(name: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One round, after one that warms."""
    is_blocking = name == "smolagents"
    module = importlib.import_module(f"aengine.integrations.{name}")
    text = (TEXT * 100)[: args.tokens]
    results: dict[str, dict[str, float]] = {}
    async with (
        FakeAsyncLLM(lambda _: text, token_delay=args.delay, own_thread=is_blocking) as engine,
        FakeAsyncLLM(lambda _: "y", own_thread=is_blocking) as quick,
    ):
        cpu = cpu_of_others() if is_blocking else time.thread_time
        makers = {"bare": bare, "framework": FRAMEWORKS[name]}
        both = {variant: [make(module, e) for e in (engine, quick)] for variant, make in makers.items()}
        gc.freeze()
        for _ in range(2):
            for variant, ((_, read), (ask, _)) in both.items():
                found = {"us_a_call": await whole(ask, args.calls, cpu) * 1e6}
                for number in [1] if is_blocking else args.streams:
                    seconds, first = await streamed(read, number, cpu)
                    found[f"us_a_token_{number}"] = seconds / number / args.tokens * 1e6
                    found[f"first_ms_{number}"] = first * 1e3
                results[variant] = found
    return results


def in_tree(tree: Path, name: str) -> dict[str, dict[str, float]]:
    """`measure` in a process over the package of a tree."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", metavar="TREE", type=Path, help="another checkout, to compare with")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--delay", type=float, default=0.002, help="seconds between tokens")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=FRAMEWORKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(asyncio.run(measure(args.one, args))))
        return
    trees = {"here": ROOT} | ({} if args.beside is None else {"beside": args.beside.resolve()})
    for name in args.only:
        rounds = [{key: in_tree(tree, name) for key, tree in trees.items()} for _ in range(args.rounds)]
        line: dict[str, Any] = {"framework": name, "tokens": args.tokens, "delay": args.delay, "rounds": args.rounds}
        for key in trees:
            for variant, found in rounds[0][key].items():
                medians = {figure: statistics.median(one[key][variant][figure] for one in rounds) for figure in found}
                line[f"{key} {variant}"] = {figure: round(value, 2) for figure, value in medians.items()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
