"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..service import Service


async def list_models(service: Service, request: Request) -> Response:
    """List the names under which the model is served, and its adapters."""
    adapters, shown = await service.engine.list_loras(), _shown(service)

    def answer() -> dict[str, Any]:
        models = [shown | {"id": name} for name in service.model_names]
        models += [shown | {"id": name, "parent": service.model_name} for name in adapters]
        return {"object": "list", "data": models}

    return await service.answer(answer, 8 * len(adapters))


async def show_model(service: Service, request: Request) -> Response:
    """Describe the model, or an adapter of it."""
    name, shown = request.path_params["name"], _shown(service)
    if name not in service.model_names and await service.engine.has_lora(name):
        return JSONAnswer(shown | {"id": name, "parent": service.model_name})
    service.check_model(name)
    return JSONAnswer(shown | {"id": name})


def _shown(service: Service) -> dict[str, Any]:
    """Return what is shown of whatever is served, but for its name."""
    return {
        "id": "",
        "object": "model",
        "created": service.created,
        "owned_by": "aengine",
        "root": service.root_name,
        "parent": None,
        "max_model_len": service.engine.describe()["max_model_len"],
    }
