"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...errors import InvalidRequestError
from ...limits.loras import MOST_CHARACTERS
from ..http import HTTPError
from ..openai.requests import Body, Ignored, Text
from ..service import Service

Name = Annotated[Text, Field(min_length=1, max_length=MOST_CHARACTERS)]
_MOST_PATH = 4096
_MOST_FILES = 1000  # that an adapter's folder may have


class LoadLoraBody(Body):
    """An adapter in a folder of ``lora_dir``."""

    lora_name: Name
    lora_path: Annotated[Text, Field(min_length=1, max_length=_MOST_PATH)]
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
    if service.lora_dir is None:
        message = "adapters come from one folder alone: start the server with --lora-dir DIR (create_app(lora_dir=...))"
        raise HTTPError(403, message, kind="permission_error", code="lora_dir_not_set")
    if body.lora_name in service.model_names:
        raise HTTPError(400, f"{body.lora_name!r:.80} is the model: take another name", param="lora_name")
    for other in service.others:
        if body.lora_name in other.model_names or await other.knows_adapter(body.lora_name):
            raise HTTPError(400, f"{body.lora_name!r:.80} is another model's: take another name", param="lora_name")
    folder = service.lora_dir
    path = await service.in_thread(lambda: folder_within(folder, body.lora_path))
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


def folder_within(root: str, path: str) -> str:
    """Return the absolute path of a folder inside ``root``, of which it may be a relative path. Blocking.

    Raises HTTPError 403: it, or a file in it, is or leads out of there; 404: there is none.
    """
    try:
        base = Path(root).resolve(strict=True)
        folder = (base / path).resolve()
        is_within = folder.is_relative_to(base)
        if is_within and not folder.is_dir():
            message = f"there is no folder {path[:200]!r} in the server's --lora-dir"
            raise HTTPError(404, message, code="not_found", param="lora_path")
        files = [] if not is_within else [one for _, one in zip(range(_MOST_FILES), folder.iterdir(), strict=False)]
        is_within = is_within and all(file.resolve().is_relative_to(base) for file in files)
    except (OSError, ValueError, RuntimeError) as error:  # no such root; a null character; links in a circle
        raise HTTPError(404, f"{path[:200]!r} can't be looked up", code="not_found", param="lora_path") from error
    if not is_within or len(files) >= _MOST_FILES:
        message = f"{path[:200]!r} is not inside the server's --lora-dir, or has links out of it"
        raise HTTPError(403, message, kind="permission_error", code="outside_lora_dir", param="lora_path")
    return str(folder)
