"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..service import Service


async def list_models(service: Service, request: Request) -> Response:
    """List the names under which the model is served."""
    return JSONAnswer({"object": "list", "data": [_model(service, name) for name in service.model_names]})


async def show_model(service: Service, request: Request) -> Response:
    """Describe the model."""
    name = request.path_params["name"]
    service.check_model(name)
    return JSONAnswer(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    described = service.engine.describe()
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "aengine",
        "root": service.root_name,
        "parent": None,
        "max_model_len": described["max_model_len"],
    }
