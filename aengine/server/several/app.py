"""Endpoints of an application over several engines, each of which has an application of its own.

    request ──> whose model is it? ──`AwakeModels.use`──> the application of that engine ──> answer

What concerns no model, or all of them, is answered here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...engine.threads.lanes import Lanes
from ...errors import EngineOverloadedError
from ...outputs import ALIVE_STATES
from ..http import ClientLeftError, HTTPError, JSONAnswer, read_body, read_json, while_connected
from ..openai.models import entries, show_model
from ..page.stats import NO_STORE, show_stats
from .awake import AwakeModels
from .early_answer import EarlyAnswer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..service import Service

T = TypeVar("T")

NamedBy: TypeAlias = Literal["body", "query", "nothing"]
"""What of a request names the model that it is for."""


class SeveralServices:
    """What the routes of an application over several engines share. ``services``: by name of their model, in order."""

    def __init__(self, models: AwakeModels, services: Mapping[str, Service], max_body_bytes: int) -> None:
        self.models = models
        self.services = dict(services)
        for service in services.values():
            service.others = [other for other in services.values() if other is not service]
        self.max_body_bytes = max_body_bytes
        self.lanes = Lanes("http")
        self.openapi: Callable[[], dict[str, Any]] = dict
        self.metrics_registry: CollectorRegistry | None = None

    async def name_of(self, asked: object) -> str:
        """Return the model that is asked for, by its name or that of an adapter of it. Raises HTTPError 400, 404."""
        if not isinstance(asked, str):
            text = f"model must be one of those that are served: {self._served()}"
            raise HTTPError(400, text, code="invalid_value", param="model")
        if asked in self.services:
            return asked
        for name, service in self.services.items():
            if await service.knows_adapter(asked):
                return name
        message = f"the model {asked[:200]!r} is not served here; served: {self._served()}"
        raise HTTPError(404, message, code="model_not_found", param="model")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """See `Service.in_thread`."""
        return await self.lanes.run(work, is_long=True)

    def _served(self) -> str:
        return ", ".join(map(repr, self.services))

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Hold a model awake, as `AwakeModels.use`; that it has no room is HTTPError 503."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.models.use(name))
            except EngineOverloadedError as error:
                headers = {"retry-after": str(round(error.retry_after))}
                raise HTTPError(503, str(error), kind="server_error", code="model_waits", headers=headers) from None
            yield


class ForwardedEndpoint:
    """Hands a request to the application of the engine whose model it asks for; an ASGI application."""

    def __init__(
        self,
        several: SeveralServices,
        apps: Mapping[str, ASGIApp],
        *,
        named_by: NamedBy,
        wakes: bool,
        check: Callable[[Request], None],
        answer: Callable[[Request, Exception], Response],
    ) -> None:
        """
        Args:
            apps: by name of the model.
            named_by: what names the model, the request's body or ``?model=`` of its URL, which goes before that. Where
                nothing needs to, the first one's application answers.
            wakes: the model is to be awake while it is answered.
            check: raises HTTPError for a request that may not ask for anything.
            answer: makes the answer of an error.
        """
        self._several = several
        self._apps = apps
        self._named_by = named_by
        self._wakes = wakes
        self._check = check
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer = EarlyAnswer(scope, send)
        async with AsyncExitStack() as stack:
            try:
                self._check(request)
                asked: object = request.query_params.get("model")
                streams: object = False
                rest = receive  # what comes after the body: that the client has left
                if self._named_by == "body":
                    body, _ = await read_body(request, self._several.max_body_bytes)
                    receive = _again(body, rest)
                    model, streams = await self._fields_in(Request(scope, _again(body, rest)))
                    asked = model if asked is None else asked
                is_needed = asked is not None or self._named_by != "nothing"
                name = await self._several.name_of(asked) if is_needed else next(iter(self._apps))
                if self._wakes:
                    entering = while_connected(Request(scope, rest), stack.enter_async_context(self._several.use(name)))
                    await (answer.pinging(entering) if streams is True else entering)
            except ClientLeftError:
                await Response(status_code=499)(scope, receive, answer.send)
                return
            except Exception as error:
                await self._answer(request, error)(scope, receive, answer.send)
                return
            await self._apps[name](scope, receive, answer.send)

    async def _fields_in(self, request: Request) -> tuple[object, object]:
        """Return the body's fields ``model`` and ``stream``. Raises HTTPError 400, 415."""

        def fields_of(value: Any) -> tuple[object, object]:
            return (value.get("model"), value.get("stream")) if isinstance(value, dict) else (None, None)

        return await read_json(request, self._several.max_body_bytes, self._several.lanes, fields_of)


def _again(body: bytes, rest: Receive) -> Receive:
    """Return what receives a body that was read, and then what ``rest`` does."""
    is_given = False

    async def receive() -> Message:
        nonlocal is_given
        if is_given:
            return await rest()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def list_all_models(several: SeveralServices, request: Request) -> Response:
    """List the models that are served, in which state they are, and their adapters."""
    known = [(service, await service.known_adapters()) for service in several.services.values()]

    def answer() -> dict[str, Any]:
        return {"object": "list", "data": [one for service, adapters in known for one in entries(service, adapters)]}

    first = next(iter(several.services.values()))
    return await first.answer(answer, 8 * sum(len(adapters) for _, adapters in known))


async def show_any_model(several: SeveralServices, request: Request) -> Response:
    """Describe a model that is served, or an adapter of it."""
    name = await several.name_of(request.path_params["name"])
    return await show_model(several.services[name], request)


async def any_stats(several: SeveralServices, request: Request) -> Response:
    """Answer with the numbers of the model that ``?model=`` names; without it, with the models and their states."""
    if (asked := request.query_params.get("model")) is None:
        models = [{"id": name, "state": service.engine.state} for name, service in several.services.items()]
        return JSONAnswer({"models": models}, headers=NO_STORE)
    name = await several.name_of(asked)
    state = several.services[name].engine.state
    if state not in ALIVE_STATES:
        return JSONAnswer({"model": name, "state": state}, headers=NO_STORE)
    return await show_stats(several.services[name], request)


async def all_ready(several: SeveralServices, request: Request) -> Response:
    """Answer 200 while requests are taken, else 503: a model that sleeps is woken by one that asks for it."""
    if several.models.state in ("new", "running"):
        return JSONAnswer({"status": "ok"})
    reason = f"the server is {several.models.state}"
    return JSONAnswer({"status": "unavailable", "reason": reason}, 503, headers={"retry-after": "1"})


async def all_live(several: SeveralServices, request: Request) -> Response:
    """Answer 200 until the server stops: an engine that has failed is started again when it is asked for."""
    state = several.models.state
    return JSONAnswer({"status": state}, 503 if state == "closed" else 200)
