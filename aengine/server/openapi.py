"""The OpenAPI document of an application, made of its endpoints and of the pydantic models of their bodies."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from ..__version__ import __version__
from .http import JSONAnswer
from .service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]
Entry = tuple[str, str, Endpoint] | tuple[str, str, Endpoint, type[BaseModel]]
"""Method, path, endpoint, and the model of the body if there is one."""

_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(endpoints: Sequence[Entry], admin: Sequence[Entry], *, has_keys: bool) -> dict[str, Any]:
    """Return the document, of OpenAPI 3.1. Endpoints without a docstring are left out. ``admin``: those that need a key
    of their own."""
    bodies = {entry[3] for entry in (*endpoints, *admin) if len(entry) == 4}
    ordered = sorted(bodies, key=lambda body: body.__name__)
    _, found = models_json_schema([(body, "validation") for body in ordered], ref_template=_SCHEMAS + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for entry in (*endpoints, *admin):
        method, path, endpoint, *body = entry
        if endpoint.__doc__:
            plain = re.sub(r":\w+}", "}", path)  # Starlette's {name:path}
            key: dict[str, Any] = {"security": [{"admin_key": []}]} if entry in admin else {}
            paths.setdefault(plain, {})[method.lower()] = _operation(method, plain, endpoint, body) | key
    bearer = {"type": "http", "scheme": "bearer"}
    schemes = {"admin_key": bearer} | ({"key": bearer} if has_keys else {})
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "aengine", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**found.get("$defs", {}), "Error": _ERROR}, "securitySchemes": schemes},
    }
    if has_keys:
        document["security"] = [{"key": []}]
    return document


def _operation(method: str, path: str, endpoint: Endpoint, body: Sequence[type[BaseModel]]) -> dict[str, Any]:
    summary = (endpoint.__doc__ or "").strip().splitlines()[0].rstrip(".")
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path == "/metrics":
        answer = {"text/plain": {"schema": {"type": "string"}}}
    if body and "stream" in body[0].model_fields:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "An error", "content": {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": answer}, "default": error},
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body:
        schema = {"$ref": _SCHEMAS + body[0].__name__}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


async def show_openapi(service: Service, request: Request) -> Response:
    """Answer with this document. Of a mounted application it says where."""
    root: str = request.scope.get("root_path", "")
    document = await service.in_thread(service.openapi)
    return JSONAnswer(document | ({"servers": [{"url": root}]} if root else {}))
