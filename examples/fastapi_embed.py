"""A model inside a FastAPI application. Run: python examples/fastapi_embed.py, then

    curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Once upon a time"}'
    curl localhost:8000/chat -H 'content-type: application/json' -d '{"prompt": "What is the capital of France?"}'

When a client leaves, its request is aborted and its KV memory is free at the next step: watch /statistics. On SIGTERM
running requests have GRACE_SECONDS to end, then they end where they are, and so does the process.
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from aengine import AsyncLLM, EngineError, EngineOverloadedError, RequestError, SamplingParams

T = TypeVar("T")
GRACE_SECONDS = 3.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    model = os.environ.get("MODEL", "smollm2-135m")
    async with AsyncLLM(model, max_num_queued_requests=256) as engine:
        app.state.engine = engine
        with on_stop_signal(lambda: wind_down(engine)):
            yield


async def wind_down(engine: AsyncLLM) -> None:
    """No new requests; those that run may end by themselves for a while."""
    if not await engine.drain(GRACE_SECONDS):
        engine.abort_all()


@contextmanager
def on_stop_signal(function: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Within: when SIGTERM or SIGINT comes, ``function()`` runs on this loop, and the server's own handler as before.

    The lifespan's end would be too late: uvicorn, alone or under gunicorn, ends it when every response has ended.
    """
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    in_main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
    numbers = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}

    def begin() -> None:
        if not tasks:
            tasks.add(loop.create_task(function()))

    def handle(number: int, frame: Any) -> None:
        loop.call_soon_threadsafe(begin)
        handlers[signal.Signals(number)](number, frame)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)
        for task in tasks:
            task.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. It is cancelled when the client leaves, which Starlette does for streamed responses only."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


app = FastAPI(lifespan=lifespan)


class Body(BaseModel):
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.7

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)


def engine_of(request: Request) -> AsyncLLM:
    engine: AsyncLLM = request.app.state.engine
    return engine


@app.post("/generate")
async def generate(body: Body, request: Request) -> StreamingResponse:
    stream = engine_of(request).stream(body.prompt, body.params())

    async def first_text() -> str:
        async for token in stream:
            return token.text
        return ""  # it was aborted before

    first = await while_connected(request, first_text())  # what is wrong with the request can still be a 400

    async def text() -> AsyncIterator[str]:
        async with aclosing(stream):
            yield first
            async for token in stream:
                if token.text:
                    yield token.text

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


@app.post("/chat")
async def chat(body: Body, request: Request) -> dict[str, Any]:
    messages = [{"role": "user", "content": body.prompt}]
    answer = await while_connected(request, engine_of(request).chat(messages, body.params()))
    return {"text": answer.text, "finish_reason": answer.finish_reason, "usage": asdict(answer.usage)}


@app.get("/statistics")
async def statistics(request: Request) -> dict[str, Any]:
    return asdict(engine_of(request).statistics())


@app.get("/livez")
async def is_alive(request: Request) -> JSONResponse:
    """Whether the process is of use: a worker that is being replaced is no reason to kill it."""
    state = engine_of(request).state
    return JSONResponse({"state": state}, 503 if state in ("failed", "closed") else 200)


@app.get("/readyz")
async def is_ready(request: Request) -> dict[str, Any]:
    """Whether it should get new requests; an EngineError is a 503."""
    engine = engine_of(request)
    seconds = await engine.check_health(timeout=2)
    if engine.state != "running":
        raise HTTPException(503, engine.state)
    return {"state": engine.state, "seconds": seconds}


@app.exception_handler(RequestError)
async def refuse(request: Request, error: RequestError) -> JSONResponse:
    if isinstance(error, EngineOverloadedError):
        return JSONResponse({"error": str(error)}, 429, headers={"retry-after": f"{error.retry_after:.0f}"})
    return JSONResponse({"error": str(error)}, 400)


@app.exception_handler(EngineError)
async def fail(request: Request, error: EngineError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 503)


if __name__ == "__main__":
    # A client that reads nothing would hold up its response for ever: the server's timeout ends it.
    uvicorn.run(app, host="127.0.0.1", port=8000, timeout_graceful_shutdown=int(GRACE_SECONDS) + 2)
