"""`engine_lifespan`: starts an engine with an application, and closes it with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..outputs import ALIVE_STATES

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from .several.awake import AwakeModels


def engine_lifespan(
    engine: AsyncLLM | AwakeModels, *, drain: float = 0.0
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return a lifespan for Starlette and FastAPI: ``FastAPI(lifespan=engine_lifespan(engine))``.

    Args:
        engine: is started with the application and closed with it; one that runs already is left running.
        drain: as of `AsyncLLM.aclose`: seconds that running requests get to end. A server such as uvicorn ends the
            lifespan when every response has ended, so there is nothing to wait for as a rule.
    """

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if engine.state in ALIVE_STATES:
            yield
            return
        await engine.start()
        try:
            yield
        finally:
            await engine.aclose(drain=drain)

    return lifespan
