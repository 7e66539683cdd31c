"""Input of a response that is stored, item by item: what ``GET /v1/responses/{id}/input_items`` shows."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....limits.bounds import MAX_NAME_CHARACTERS
from ...http import HTTPError, JSONAnswer
from ...service import Service

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fc", "reasoning": "rs"}
_MOST_ITEMS = 100
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""What is kept of an item: what its message is made of, which the context bounds."""
_STATES = ("in_progress", "completed", "incomplete")


def items_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a response's input, each with its type and an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item_of(one) for one in given]


def _item_of(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type") or "message"
    known = given.get("id")
    is_named = isinstance(known, str) and 0 < len(known) <= MAX_NAME_CHARACTERS
    item = {"type": kind, "id": known if is_named else f"{_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"}
    is_answer = given.get("role") == "assistant"
    if kind == "reasoning":  # encrypted content can be read by its author alone
        read = "content" if given.get("content") else "summary"
        return item | {"summary": []} | {read: _kept(given.get(read) or [])}
    for name in _FIELDS[kind]:
        if isinstance(given.get(name), str | list):
            item[name] = _kept(given[name])
    if kind == "message" and isinstance(item["content"], str):
        item["content"] = [_kept_part({"type": "output_text" if is_answer else "input_text", "text": item["content"]})]
    status = given.get("status")
    return item | {"status": status if status in _STATES else "completed"}


def _kept(value: Any) -> Any:
    """Return a text, or parts of one, without what was not read of them."""
    return [_kept_part(part) for part in value] if isinstance(value, list) else value


def _kept_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind == "refusal":
        return {"type": kind, "refusal": part["refusal"]}
    return {"type": kind, "text": part["text"]} | ({"annotations": []} if kind == "output_text" else {})


async def list_input_items(service: Service, request: Request) -> Response:
    """Answer with the items that a response was given, those of the responses before it included."""
    stored = service.responses.get(request.path_params["id"])
    items = await service.in_thread(lambda: stored.items)  # the items of a long conversation may be many MB
    asked = request.query_params
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_ITEMS):
        raise HTTPError(400, f"limit must be 1 to {_MOST_ITEMS}", code="invalid_value", param="limit")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise HTTPError(400, "order must be asc or desc", code="invalid_value", param="order")
    ordered = items if order == "asc" else items[::-1]
    if (after := asked.get("after")) is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise HTTPError(400, f"there is no item {after[:80]!r}", code="invalid_value", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: int(limit)]
    return JSONAnswer(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(shown) < len(ordered),
        }
    )


async def cancel_response(service: Service, request: Request) -> Response:
    """Refuse: a response that is stored has ended."""
    service.responses.get(request.path_params["id"])
    raise HTTPError(
        400,
        "only a response with background=true can be cancelled, and there are none: close the connection of a response "
        "that is being made, and it ends",
        code="background_not_supported",
    )
