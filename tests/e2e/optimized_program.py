"""An engine and its worker with ``python -O``: right and wrong requests, by `test_optimized`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aengine import AsyncLLM, ContextLengthError, GrammarError, InvalidRequestError, SamplingParams, StructuredOutput

FRANCE = "The capital of France is"
GREEDY = SamplingParams(max_tokens=8, temperature=0)
UNKNOWN = SamplingParams(logit_bias={10**6: 1})
REGEX = SamplingParams(structured_output=StructuredOutput(regex="("))
USER = {"role": "user", "content": "x"}
WRONG: list[tuple[type[Exception], Callable[[Any], Awaitable[Any]]]] = [
    (InvalidRequestError, lambda engine: engine.generate("")),
    (InvalidRequestError, lambda engine: engine.generate([10**9])),
    (InvalidRequestError, lambda engine: engine.generate([-1])),
    (InvalidRequestError, lambda engine: engine.generate("x", UNKNOWN)),
    (InvalidRequestError, lambda engine: engine.chat([{**USER, "content": object()}])),
    (InvalidRequestError, lambda engine: engine.chat([USER], tools=[{"name": 3}])),
    (ContextLengthError, lambda engine: engine.generate([1] * 600)),
    (GrammarError, lambda engine: engine.generate("x", REGEX)),
]


class Worker:
    """The extension of the worker, which says how it runs."""

    def __init__(self, context: object) -> None:
        pass

    def has_asserts(self) -> bool:
        return __debug__


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(what)


async def main() -> None:
    check(not __debug__, "the host has asserts")
    async with AsyncLLM(sys.argv[1], max_model_len=512, worker_extension="optimized_program:Worker") as engine:
        check(await engine.collective_rpc("has_asserts") == [False], "the worker has asserts")
        before = await engine.generate(FRANCE, GREEDY)
        for kind, call in WRONG:
            try:
                await call(engine)
            except kind:
                continue
            raise SystemExit(f"{kind.__name__} was to be raised")
        check((await engine.generate(FRANCE, GREEDY)).text == before.text, "another answer")
        check(engine.statistics().num_restarts == 0, "the worker was started anew")


if __name__ == "__main__":
    asyncio.run(main())
    print("fine")
