"""``/v1/models``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...errors import EngineClosedError
from ..http import JSONAnswer
from ..service import Service


async def list_models(service: Service, request: Request) -> Response:
    """List the names under which the model is served, and its adapters."""
    adapters = await service.known_adapters()
    return await service.answer(lambda: {"object": "list", "data": entries(service, adapters)}, 8 * len(adapters))


async def show_model(service: Service, request: Request) -> Response:
    """Describe the model, or an adapter of it."""
    name = request.path_params["name"]
    is_adapter = name not in service.model_names and await service.knows_adapter(name)
    if not is_adapter:
        service.check_model(name)
    return JSONAnswer(_shown(service) | {"id": name, "parent": service.model_name if is_adapter else None})


def entries(service: Service, adapters: Iterable[str]) -> list[dict[str, Any]]:
    """Return what is shown of the model, under each of its names, and of its adapters."""
    shown = _shown(service)
    models = [shown | {"id": name} for name in service.model_names]
    return models + [shown | {"id": name, "parent": service.model_name} for name in adapters]


def _shown(service: Service) -> dict[str, Any]:
    """Return what is shown of whatever is served, but for its name."""
    try:
        max_model_len = service.engine.describe()["max_model_len"]
    except EngineClosedError:  # one of several models may not have been loaded yet
        max_model_len = None
    return {
        "id": "",
        "object": "model",
        "created": service.created,
        "owned_by": "aengine",
        "root": service.root_name,
        "parent": None,
        "max_model_len": max_model_len,
        "state": service.engine.state,
    }
