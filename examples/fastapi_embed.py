"""A model inside a FastAPI application. Run: python examples/fastapi_embed.py, then

    curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Once upon a time"}'

When the client disconnects, Starlette cancels the response, the stream is closed, and the request's KV memory is
free at the next step: watch /statistics.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from aengine import AsyncLLM, EngineError, EngineOverloadedError, RequestError, SamplingParams


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncLLM("smollm2-135m", max_num_queued_requests=256) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


class Body(BaseModel):
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.7


@app.post("/generate")
async def generate(body: Body, request: Request) -> StreamingResponse:
    params = SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature)
    stream = request.app.state.engine.stream(body.prompt, params)
    first = await anext(stream)  # whatever is wrong with the request is known by now, and can still be a 400

    async def text() -> AsyncIterator[str]:
        async with aclosing(stream):
            yield first.text
            async for token in stream:
                if token.text:
                    yield token.text

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


@app.get("/statistics")
async def statistics(request: Request) -> dict[str, Any]:
    return asdict(request.app.state.engine.statistics())


@app.exception_handler(RequestError)
async def refuse(request: Request, error: RequestError) -> JSONResponse:
    if isinstance(error, EngineOverloadedError):
        return JSONResponse({"error": str(error)}, 429, headers={"retry-after": f"{error.retry_after:.0f}"})
    return JSONResponse({"error": str(error)}, 400)


@app.exception_handler(EngineError)
async def fail(request: Request, error: EngineError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 503)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8000)
