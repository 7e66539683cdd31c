"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..service import Service


async def list_models(service: Service, request: Request) -> Response:
    """List the names under which the model is served, and its adapters."""
    found = [_model(service, name) for name in service.model_names]
    found += [_model(service, name, service.model_name) for name in await service.adapters()]
    return JSONAnswer({"object": "list", "data": found})


async def show_model(service: Service, request: Request) -> Response:
    """Describe the model, or an adapter of it."""
    name = request.path_params["name"]
    if name not in service.model_names and name in await service.adapters():
        return JSONAnswer(_model(service, name, service.model_name))
    service.check_model(name)
    return JSONAnswer(_model(service, name))


def _model(service: Service, name: str, parent: str | None = None) -> dict[str, Any]:
    """Describe what is served under a name. ``parent``: the name of the model that it is an adapter of."""
    described = service.engine.describe()
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "aengine",
        "root": service.root_name,
        "parent": parent,
        "max_model_len": described["max_model_len"],
    }
