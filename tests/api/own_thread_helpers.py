"""What the tests of engines with a thread of their own share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop
from conftest_api import handle_of
from conftest_api import settled as settled_here

from aengine import AsyncLLM, SamplingParams

Make = Callable[..., AsyncLLM]
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
LOOPS = [asyncio.SelectorEventLoop, uvloop.new_event_loop]


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aengine"]


def run(coroutine: Coroutine[Any, Any, Any], new_loop: Callable[[], Any] = asyncio.SelectorEventLoop) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


def in_threads(number: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of ``work(i)``, each in a thread of its own, all at once; its error, if it raised."""
    results: list[Any] = [None] * number
    barrier = threading.Barrier(number)

    def body(i: int) -> None:
        barrier.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=body, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    return results


async def settled(engine: AsyncLLM) -> None:
    """Looked at in the engine's thread, between two turns."""
    await handle_of(engine).thread.run(lambda: settled_here(engine))
