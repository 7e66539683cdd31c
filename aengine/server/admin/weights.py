"""``/update_weights``: the weights of a folder, in place of those that the engine has."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...errors import InvalidRequestError
from ..http import JSONAnswer
from ..openai.requests import Body, Text
from ..service import Service
from .folders import FolderPath, folder_within


class UpdateWeightsBody(Body):
    """A checkpoint in a folder of ``weights_dir``; see `AsyncLLM.finish_weight_update`."""

    path: FolderPath
    weight_version: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    mode: Literal["abort", "wait", "keep"] = "keep"
    clear_cache: bool = True

    def field_names(self) -> dict[str, str]:
        return {"source": "path", "version": "weight_version"}


async def update_weights(service: Service, request: Request) -> Response:
    """Replace the weights by those of a folder, which is one whole update"""
    body = await service.body(request, UpdateWeightsBody)
    engine = service.engine
    path = await service.in_thread(lambda: folder_within(service.folders.weights, body.path, "--weights-dir", "path"))
    await engine.start_weight_update(body.mode)
    try:
        await engine.update_weights(path)
        version = await engine.finish_weight_update(body.weight_version, clear_cache=body.clear_cache)
    except BaseException:
        with suppress(InvalidRequestError):  # a worker's death has ended it
            await engine.abort_weight_update()
        raise
    return JSONAnswer({"weight_version": version})
