"""The engine behind HTTP: an ASGI application over a given `AsyncLLM`. Needs starlette and pydantic.

    body ──requests (a pydantic model)──> stream_chat, stream ──> deltas ──> one JSON answer, or server-sent events
                                               │ typed errors
                                               └──errors──> a status and a body as the interface's clients expect

`http` reads bodies, notices clients that leave, and writes answers, whatever the interface. Each interface (`openai/`,
`anthropic/`) is a room that turns its bodies into calls of the engine and back. `app` puts the routes together.
"""

from __future__ import annotations

try:
    from .app import create_app
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in ("starlette", "pydantic"):
        raise
    cure = f"aengine.server needs the package {package}: pip install 'aengine-llm[server]'"
    raise ImportError(cure, name=package) from error
from .lifespan import engine_lifespan
from .several.awake import AwakeModels

__all__ = ["AwakeModels", "create_app", "engine_lifespan"]
