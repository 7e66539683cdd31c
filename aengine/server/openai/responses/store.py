"""`ResponseStore`: responses of the last time, for ``previous_response_id`` and for `retrieve`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

from ....engine.threads.yield_gil import yield_gil
from ...http import HTTPError, as_utf8
from ..answers import dumps

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to it, as JSON: the same as Python's objects takes many times the memory."""

    response_json: bytes
    messages_json: tuple[bytes, ...]
    """Lists of messages, those of each response before and its own; a response shares those before it."""
    items_json: tuple[bytes, ...]
    """Lists of items, likewise."""
    output_json: bytes
    """The response's own items, without their log-probabilities."""
    item_ids: tuple[str, ...]
    """The ids that these have."""
    chain: str
    """The id of the first response of those that it goes on with, or its own."""

    @property
    def output(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.output_json)
        return found

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the answer included, but for the instructions, which are of one request only."""
        return _joined(self.messages_json)

    @property
    def items(self) -> list[dict[str, Any]]:
        """Items of the input, with all that came before: earlier inputs and answers."""
        return _joined(self.items_json)

    @property
    def num_bytes(self) -> int:
        return sum(map(getsizeof, (self.response_json, self.output_json, *self.messages_json, *self.items_json)))


def _joined(lists: Sequence[bytes]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for part in lists:
        joined += json.loads(part)
        yield_gil()
    return joined


class ResponseStore:
    """Keeps what has been answered last, in this process' memory.

    Args:
        max_responses: at most so many; 0: none.
        max_bytes: of memory at most so much; each response counts with its whole conversation.
    """

    def __init__(self, max_responses: int, max_bytes: int = 256 << 20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._places: dict[str, str] = {}  # the response of each item, by ids that nobody can guess
        self.num_bytes = 0  # bytes of all kept responses

    @property
    def is_kept(self) -> bool:
        """Whether any response is stored."""
        return self._max_responses > 0

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response. Raises HTTPError 404, of an id in a body (``param``) 400."""
        found = self._responses.get(response_id)
        if found is None:
            shown = response_id[:80]
            why = (
                "it was not stored, or the server has restarted, or newer ones have taken its place"
                if self.is_kept
                else "this server stores none: send the whole conversation as input"
            )
            code = "previous_response_not_found" if param else "not_found"
            status = 400 if param else 404
            raise HTTPError(status, f"there is no response {shown!r}: {why}", code=code, param=param)
        self._responses.move_to_end(response_id)
        return found

    def put(
        self,
        response_id: str,
        response_json: bytes,
        output: Sequence[dict[str, Any]],
        before: StoredResponse | None,
        messages: Messages,
        items: Sequence[dict[str, Any]],
    ) -> None:
        """Keep a response and its ``output``, with the messages and the items of its input that it adds to those
        ``before``."""
        if not self.is_kept:
            return
        messages_json = () if before is None else before.messages_json
        items_json = () if before is None else (*before.items_json, before.output_json)
        stored = StoredResponse(
            response_json,
            (*messages_json, as_utf8(dumps(messages))),
            (*items_json, as_utf8(dumps(items))),
            as_utf8(dumps(output)),
            tuple(item["id"] for item in output),
            response_id if before is None else before.chain,
        )
        self._responses[response_id] = stored
        self._places.update(dict.fromkeys(stored.item_ids, response_id))
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            _, oldest = self._responses.popitem(last=False)
            self._forget(oldest)

    def delete(self, response_id: str) -> None:
        """Delete a response. Raises HTTPError 404."""
        self._forget(self.get(response_id))
        del self._responses[response_id]

    def with_items(self, given: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
        """Return an input with the items themselves in place of references to items of stored answers.

        Raises HTTPError 400 for a reference to an item that is not stored, or that was referred to before: so what the
        input grows to is bounded by what is stored.
        """
        if isinstance(given, str):
            return given
        items: list[Mapping[str, Any]] = []
        outputs: dict[str, dict[str, Any]] = {}  # items of referred responses that are not yet in the input, by id
        for i, item in enumerate(given):
            if item.get("type") == "item_reference" or ("id" in item and not item.get("type") and "role" not in item):
                item = self._item(item.get("id"), outputs, f"input[{i}].id")
            items.append(item)
        return items

    def _item(self, item_id: object, outputs: dict[str, dict[str, Any]], where: str) -> Mapping[str, Any]:
        place = self._places.get(item_id) if isinstance(item_id, str) else None
        if place is None:
            message = f"{where} is wrong: there is no such item in a stored answer; send the item itself"
            raise HTTPError(400, message, code="invalid_value", param=where)
        if place not in outputs:
            outputs[place] = {item["id"]: item for item in self._responses[place].output}
        found: Mapping[str, Any] | None = outputs[place].pop(str(item_id), None)
        if found is None:
            message = f"{where} is wrong: the item is in the input already"
            raise HTTPError(400, message, code="invalid_value", param=where)
        return found

    def _forget(self, stored: StoredResponse) -> None:
        self.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            del self._places[item_id]
