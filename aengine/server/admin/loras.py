"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...errors import InvalidRequestError
from ...limits.loras import MOST_CHARACTERS
from ..http import HTTPError
from ..openai.requests import Body, Ignored, Text
from ..service import Service
from .folders import FolderPath, folder_within

Name = Annotated[Text, Field(min_length=1, max_length=MOST_CHARACTERS)]


class LoadLoraBody(Body):
    """An adapter in a folder of ``lora_dir``."""

    lora_name: Name
    lora_path: FolderPath
    load_inplace: bool = False
    base_model_name: Ignored = None
    is_3d_lora_weight: Ignored = None

    def field_names(self) -> dict[str, str]:
        return {"name": "lora_name", "source": "lora_path"}


class UnloadLoraBody(Body):
    lora_name: Name
    lora_int_id: Ignored = None

    def field_names(self) -> dict[str, str]:
        return {"name": "lora_name"}


async def load_lora(service: Service, request: Request) -> Response:
    """Let requests ask for an adapter as their model"""
    body = await service.body(request, LoadLoraBody)
    if body.lora_name in service.model_names:
        raise HTTPError(400, f"{body.lora_name!r:.80} is the model: take another name", param="lora_name")
    for other in service.others:
        if body.lora_name in other.model_names or await other.knows_adapter(body.lora_name):
            raise HTTPError(400, f"{body.lora_name!r:.80} is another model's: take another name", param="lora_name")
    path = await service.in_thread(
        lambda: folder_within(service.folders.loras, body.lora_path, "--lora-dir", "lora_path")
    )
    await service.engine.add_lora(body.lora_name, path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora(service: Service, request: Request) -> Response:
    """Refuse requests that ask for an adapter from now on"""
    body = await service.body(request, UnloadLoraBody)
    try:
        await service.engine.remove_lora(body.lora_name)
    except InvalidRequestError as error:
        raise HTTPError(404, str(error), code="model_not_found", param="lora_name") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
