"""`Service`: what every route of an application shares."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .http import HTTPError, read_json

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM

__all__ = ["Service", "validated"]

B = TypeVar("B", bound=BaseModel)


class Service:
    """An engine as an application serves it.

    Args:
        model_names: under which requests may ask for the model; the first is that of answers. None: the name that the
            engine was made with; of a path its last part.
    """

    def __init__(self, engine: AsyncLLM, *, model_names: Sequence[str] | None, max_body_bytes: int) -> None:
        self.engine = engine
        self.model_names = tuple(model_names or (PurePath(engine.config.model).name or engine.config.model,))
        self.max_body_bytes = max_body_bytes
        self.created = int(time.time())

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    async def body(self, request: Request, kind: type[B]) -> B:
        """Read and validate the body of a request. Raises HTTPError 400, 404, 413, 415 and ClientLeftError."""
        body = validated(kind, await read_json(request, self.max_body_bytes))
        self.check_model(getattr(body, "model", None))
        return body

    def check_model(self, name: str | None) -> None:
        """Raise HTTPError 404 unless the model is served under this name. None: whatever is served."""
        if name is not None and name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            message = f"the model {name[:200]!r} is not served here; served: {served}"
            raise HTTPError(404, message, code="model_not_found", param="model")


def validated(kind: type[B], value: object) -> B:
    """Return the body as its pydantic model. Raises HTTPError 400, which names the first field at fault."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # The name of a union's member is part of pydantic's path, and no part of the body.
        place = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        what = "is not supported" if first["type"] == "extra_forbidden" else f"is wrong: {first['msg']}"
        message = f"{param} {what}" if param else f"the body {what}"
        code = "unsupported_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
        raise HTTPError(400, message, code=code, param=param or None) from None
