"""`Service`: what every route of an application shares."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..__version__ import __version__
from ..engine.threads.lanes import Lanes
from ..errors import EngineClosedError
from .admin.keys import shown_key
from .health import Health
from .http import FEW_VALUES, MANY_VALUES, HTTPError, Pace, json_in_pieces, read_json
from .openai.requests import ModelBody
from .openai.responses.store import ResponseStore
from .openai.retention import ANYBODY, Caller

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..async_llm import AsyncLLM

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


class Folders(NamedTuple):
    """Folders whose adapters, and whose checkpoints, requests may load. None: they may load none."""

    loras: str | None = None
    weights: str | None = None


class Service:
    """An engine as an application serves it.

    Args:
        model_names: under which requests may ask for the model; the first is that of answers. None: the name that the
            engine was made with; of a path its last part.
        folders: those that requests may load from.
        max_keep: seconds for which KV is kept at most, as requests ask for it.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        model_names: Sequence[str] | None,
        max_body_bytes: int,
        responses: ResponseStore,
        folders: Folders,
        pace: Pace,
        max_keep: float,
    ) -> None:
        self.engine = engine
        self.folders = folders
        self.model_names = tuple(model_names or (engine.config.model_name,))
        self.max_body_bytes = max_body_bytes
        self.created = int(time.time())
        self.health = Health(engine)
        self.pace = pace
        self.max_keep = max_keep
        self._lanes = Lanes("http")
        self.openapi: Callable[[], dict[str, Any]] = dict
        """Makes the application's description of itself, the first time in a tenth of a second."""
        self._fingerprint: str | None = None
        self.responses = responses
        self.others: Sequence[Service] = ()  # those of the other models of this application
        self.metrics_registry: CollectorRegistry | None = None  # what /metrics shows; None: there is no /metrics

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def root_name(self) -> str:
        """The name that the engine was made with; of a path its last part: where it lies is nobody's business."""
        return self.engine.config.model_name

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's name for what may change answers to equal requests: this version, the model, and how it computes."""
        if self._fingerprint is None:
            described = self.engine.describe()
            computing = [described.get(name) for name in ("device", "dtype", "weight_format", "attention")]
            said = repr((__version__, self.model_name, self.engine.config.model, computing))
            self._fingerprint = f"fp_{hashlib.sha256(said.encode('utf-8', 'backslashreplace')).hexdigest()[:12]}"
        return self._fingerprint

    async def body(self, request: Request, kind: type[B]) -> B:
        """Read and validate the body of a request. Raises HTTPError 400, 404, 413, 415 and ClientLeftError."""
        body = await read_json(request, self.max_body_bytes, self._lanes, partial(validated, kind))
        request.state.body = body  # errors are named by the fields of this body
        name: str | None = getattr(body, "model", None)
        is_other = name not in (None, *self.model_names)
        if is_other and isinstance(body, ModelBody) and await self.engine.has_lora(str(name)):
            body.take_as_adapter(str(name))
        else:
            self.check_model(name)
        if isinstance(body, ModelBody):
            body.take_caller(Caller(shown_key(request), self.max_keep, getattr(request.state, "asker", ANYBODY)))
        return body

    async def known_adapters(self) -> Collection[str]:
        """Return the names of the engine's adapters, those of its settings while it does not run."""
        try:
            return await self.engine.list_loras()
        except EngineClosedError:
            return self.engine.config.loras or ()

    async def knows_adapter(self, name: str) -> bool:
        """Whether an adapter has this name, as of `known_adapters`."""
        try:
            return await self.engine.has_lora(name)
        except EngineClosedError:
            return name in (self.engine.config.loras or ())

    def model_of(self, body: ModelBody) -> str:
        """Return the name of the model of the body's answer."""
        return body.adapter or self.model_name

    async def answer(
        self, content: Callable[[], Any], num_values: int, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Answer with JSON of about so many values; of many it is made in a thread."""
        work = lambda: json_in_pieces(content())  # noqa: E731
        is_long = num_values > MANY_VALUES
        body = work() if num_values < FEW_VALUES else await self._lanes.run(work, is_long=is_long)
        return Response(body, headers=headers, media_type="application/json")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work``, which takes long, in a thread, and return what it returns."""
        return await self._lanes.run(work, is_long=True)

    def check_model(self, name: str | None) -> None:
        """Raise HTTPError 404 unless the model is served under this name. None: whatever is served."""
        if name is not None and name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            message = f"the model {name[:200]!r} is not served here; served: {served}"
            raise HTTPError(404, message, code="model_not_found", param="model")


def validated(kind: type[B], value: object) -> B:
    """Return the body as its pydantic model. Raises HTTPError 400, which names the first field at fault."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _http_error_of(error, value) from None
    except (OverflowError, RecursionError) as error:  # pydantic raises these for too large numbers and too deep nesting
        raise HTTPError(400, f"the body is wrong: {error}", code="invalid_value") from None


def _http_error_of(error: ValidationError, body: object) -> HTTPError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    field = found[0]["loc"][:1]
    places = [(_place_of(one, body), one) for one in found if one["loc"][:1] == field]  # errors of one field alone
    param, first = places[0]
    if first["type"] in ("extra_forbidden", "unsupported"):
        return HTTPError(400, f"{param} is not supported", code="unsupported_parameter", param=param)
    if len({place for place, _ in places}) == 1:
        whats = " or ".join(dict.fromkeys(one["msg"] for _, one in places))
    else:  # the value matches none of several types
        whats = "; ".join(dict.fromkeys(f"{place}: {one['msg']}" for place, one in places[:4]))
        param = str(field[0]) if field else ""
    if not param and not isinstance(body, dict):
        whats = "it must be a JSON object"
    message = f"{param} is wrong: {whats}" if param else f"the body is wrong: {whats}"
    return HTTPError(400, message[:1000], code="invalid_value", param=param or None)


def _place_of(error: Mapping[str, Any], body: Any) -> str:
    """Return the path of a value in the body, as ``messages[0].role``. Pydantic's path also has names of what the value
    might have been, which are no part of the body, and may tell where a function lies in memory."""
    path = error["loc"]
    is_missing = error["type"] == "missing"
    place = ""
    value = body
    for number, part in enumerate(path):
        if isinstance(part, int):
            if isinstance(value, list) and part < len(value):
                place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (is_missing and number == len(path) - 1)):
            place, value = f"{place}.{part}", value.get(part)
    return place.lstrip(".")
