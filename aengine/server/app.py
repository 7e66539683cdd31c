"""`create_app`: the ASGI application over an engine."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import InvalidRequestError
from ..params import checked_keep
from ..telemetry.trace_context import trace_of
from .admin.key_file import KeyFile
from .admin.keys import AdminKey, ApiKeys, Lock
from .admin.loras import LoadLoraBody, UnloadLoraBody, load_lora, unload_lora
from .admin.pauses import NoBody, PauseBody, is_paused, pause, reset_prefix_cache, resume
from .admin.sleep import SleepBody, WakeUpBody, is_sleeping, sleep, wake_up
from .admin.weights import UpdateWeightsBody, update_weights
from .anthropic.errors import answer_error, is_for_anthropic
from .anthropic.messages import count_tokens, create_message
from .anthropic.requests import CountBody, MessagesBody
from .errors import http_error
from .guard import Guard, checked_hosts, checked_origins
from .health import health, livez, version
from .http import ClientLeftError, CloseAfterTwoLengths, HTTPError, JSONAnswer, Pace
from .lifespan import engine_lifespan
from .metrics import metrics, new_registry
from .openai.answers import headers_of_id
from .openai.chat import chat_completions
from .openai.completions import completions
from .openai.embeddings import EmbeddingBody, RerankBody, ScoreBody, embeddings, rerank, score
from .openai.errors import error_body
from .openai.models import list_models, show_model
from .openai.requests import ChatBody, CompletionBody
from .openai.responses.body import ResponseBody
from .openai.responses.endpoint import count_input_tokens, create_response, delete_response, show_response
from .openai.responses.input_items import cancel_response, list_input_items
from .openai.responses.store import ResponseStore
from .openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize, tokenizer_info
from .openapi import Entry, openapi_document, show_openapi
from .page.files import show_file, show_page
from .page.stats import show_stats
from .service import Folders, Service
from .several.app import (
    ForwardedEndpoint,
    NamedBy,
    SeveralServices,
    all_live,
    all_ready,
    any_stats,
    list_all_models,
    show_any_model,
)
from .several.awake import AwakeModels

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..async_llm import AsyncLLM

_ENDPOINTS: list[Entry] = [
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", show_model),
    ("POST", "/v1/chat/completions", chat_completions, ChatBody),
    ("POST", "/v1/completions", completions, CompletionBody),
    ("POST", "/v1/responses", create_response, ResponseBody),
    ("POST", "/v1/responses/input_tokens", count_input_tokens, ResponseBody),
    ("GET", "/v1/responses/{id}", show_response),
    ("DELETE", "/v1/responses/{id}", delete_response),
    ("GET", "/v1/responses/{id}/input_items", list_input_items),
    ("POST", "/v1/responses/{id}/cancel", cancel_response),
    ("POST", "/v1/messages", create_message, MessagesBody),
    ("POST", "/v1/messages/count_tokens", count_tokens, CountBody),
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
    ("GET", "/tokenizer_info", tokenizer_info),
    ("POST", "/v1/embeddings", embeddings, EmbeddingBody),
    *[("POST", path, rerank, RerankBody) for path in ("/v1/rerank", "/v2/rerank", "/rerank")],
    *[("POST", path, score, ScoreBody) for path in ("/v1/score", "/score")],
    ("GET", "/health", health),
    ("GET", "/livez", livez),
    ("GET", "/readyz", health),
    ("GET", "/metrics", metrics),
    ("GET", "/version", version),
    ("GET", "/openapi.json", show_openapi),
]
_OF_SEVERAL: list[Any] = [
    ("GET", "/v1/models", list_all_models),
    ("GET", "/v1/models/{name:path}", show_any_model),
    ("GET", "/health", all_ready),
    ("GET", "/livez", all_live),
    ("GET", "/readyz", all_ready),
    ("GET", "/metrics", metrics),
    ("GET", "/version", version),
    ("GET", "/openapi.json", show_openapi),
]
"""What an application over several engines answers by itself."""
_PAGE: list[Entry] = [
    ("GET", "/", show_page),
    ("GET", "/page/{name}", show_file),
    ("GET", "/stats", show_stats),
]
_PAGE_OF_SEVERAL: list[Any] = [*_PAGE[:2], ("GET", "/stats", any_stats)]
_ADMIN: list[Entry] = [
    ("POST", "/v1/load_lora_adapter", load_lora, LoadLoraBody),
    ("POST", "/v1/unload_lora_adapter", unload_lora, UnloadLoraBody),
    ("POST", "/update_weights", update_weights, UpdateWeightsBody),
    ("POST", "/pause", pause, PauseBody),
    ("GET", "/is_paused", is_paused),
    ("POST", "/resume", resume, NoBody),
    ("POST", "/reset_prefix_cache", reset_prefix_cache, NoBody),
    ("POST", "/sleep", sleep, SleepBody),
    ("POST", "/wake_up", wake_up, WakeUpBody),
    ("GET", "/is_sleeping", is_sleeping),
]
"""What changes the engine: each needs the admin key, and none other, and is answered with 403 where there is none."""
_PROBES = {"/health", "/livez", "/readyz"}
"""Paths of health checks: answered without a key, and whatever host and origin a request names."""
_OPEN_PATHS = {*_PROBES, "/", "/page/{name}"}
"""Paths that need no key."""
_OPEN = ApiKeys(())


def create_app(
    engine: AsyncLLM | Mapping[str, AsyncLLM] | AwakeModels,
    *,
    model_names: str | Sequence[str] | None = None,
    api_keys: str | Sequence[str] | None = None,
    api_keys_file: str | os.PathLike[str] | None = None,
    admin_key: str | None = None,
    lora_dir: str | os.PathLike[str] | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
    max_body_bytes: int = 32 << 20,
    max_stored_responses: int = 1000,
    metrics_registry: CollectorRegistry | None = None,
    page: bool = True,
    allow_origins: str | Sequence[str] = (),
    allow_hosts: str | Sequence[str] | None = None,
    pieces_per_second: float = 2500,
    unpaced_streams: int = 4,
    max_keep: float = 3600.0,
) -> Starlette:
    """Make the ASGI application that serves an engine under OpenAI's and Anthropic's interfaces.

    Run by itself it starts the engine and closes it; an engine that runs already is left running. Mounted inside
    another application (``app.mount("/llm", create_app(engine))``) it does neither: give that one `engine_lifespan`.

    Args:
        engine: on the event loop that serves the application, or with ``own_thread=True``; or another process', to be
            started first, unless ``model_names`` are given; or several by names of their models (`AwakeModels`).
        model_names: under which requests may ask for the one model. None: the name the engine was made with.
        api_keys: one of which a request must show (``Authorization: Bearer KEY``, or ``x-api-key``). None: nobody is
            asked. /health, /livez and /readyz are open, and so is the page itself; what it calls is not.
        api_keys_file: more keys, each of a tenant (docs/tenants.md#over-http), read anew when it has changed.
        admin_key: what a request that changes the engine must show, as above. None: all such requests are refused.
        lora_dir: the folder whose adapters such requests may load. None: they may load none.
        weights_dir: the folder whose checkpoints such requests may put in place of the weights. None: none.
        max_body_bytes: larger bodies are refused with 413.
        max_stored_responses: of /v1/responses, for ``previous_response_id``: in this process' memory, the latest,
            256 MiB at most. 0: none; with several processes, a client may reach one that does not know its response.
        metrics_registry: of prometheus_client, with a `PrometheusCollector`: what /metrics shows. None: the engine's.
        page: at ``/`` a page to chat with the model and to look at the engine's numbers, which are at ``/stats``.
        allow_origins: of browser pages elsewhere that may call it (CORS), as "https://chat.example"; "*": all. Pages
            that the application itself shows need none.
        allow_hosts: for an application that only its address protects: a request must ask for localhost, an IP
            address or one of these names (``Host``), and come from no page but the application's own and those of
            ``allow_origins``. None: that is not looked at.
        pieces_per_second: that all event streams together send at most. Many streams at once get fewer, larger ones.
        unpaced_streams: while there are no more event streams than these, each sends all at once.
        max_keep: seconds for which KV is kept at most, whatever ``prompt_cache_retention`` and ``cache_control`` ask.
    """
    names = [model_names] if isinstance(model_names, str) else model_names
    origins = checked_origins([allow_origins] if isinstance(allow_origins, str) else allow_origins)
    doors = _Doors.of(api_keys, api_keys_file, admin_key, origins, allow_hosts)
    shared: dict[str, Any] = {
        "max_body_bytes": max_body_bytes,
        "responses": ResponseStore(max_stored_responses),
        "folders": Folders(*(None if one is None else os.fspath(one) for one in (lora_dir, weights_dir))),
        "pace": Pace(pieces_per_second, unpaced_streams),
        "max_keep": checked_keep("max_keep", max_keep),
    }
    service: Service | SeveralServices
    if isinstance(engine, Mapping | AwakeModels):
        if names is not None:
            raise InvalidRequestError("several models have the names that they are given by", param="model_names")
        models = engine if isinstance(engine, AwakeModels) else AwakeModels(engine)
        services = {name: Service(one, model_names=[name], **shared) for name, one in models.engines.items()}
        service, endpoints, engines = SeveralServices(models, services, max_body_bytes), _ENDPOINTS, models.engines
        routes, lifespan = _routes_of_several(service, doors, page), engine_lifespan(models)
    else:
        service = Service(engine, model_names=names, **shared)
        endpoints, engines = [*_ENDPOINTS, *(_PAGE if page else ())], {service.model_name: engine}
        routes, lifespan = _routes(service, [*endpoints, *_ADMIN], doors), engine_lifespan(engine)
    service.metrics_registry = metrics_registry or new_registry(engines)
    service.openapi = cache(lambda: openapi_document(endpoints, _ADMIN, has_keys=doors.api.has_keys))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(CloseAfterTwoLengths), *_for_other_origins(origins)],
        lifespan=lifespan,
        exception_handlers={HTTPException: _answer_http_exception},
    )
    app.router.redirect_slashes = False
    return app


class _Doors(NamedTuple):
    """Who may ask for what."""

    api: ApiKeys
    admin: Lock
    guard: Guard | None

    @classmethod
    def of(
        cls,
        api_keys: str | Sequence[str] | None,
        api_keys_file: str | os.PathLike[str] | None,
        admin_key: str | None,
        origins: Sequence[str],
        allow_hosts: str | Sequence[str] | None,
    ) -> _Doors:
        """Make them of the arguments of `create_app`."""
        keys = [api_keys] if isinstance(api_keys, str) else api_keys or ()
        api = ApiKeys(keys) if api_keys_file is None else KeyFile(api_keys_file, keys)
        hosts = [allow_hosts] if isinstance(allow_hosts, str) else allow_hosts
        guard = None if hosts is None else Guard(checked_hosts(hosts), origins)
        return cls(api, AdminKey(admin_key, api), guard)

    def check(self, path: str, is_admin: bool, request: Request) -> None:
        """Raise HTTPError unless the request may ask for the path of an endpoint."""
        if self.guard is not None and path not in _PROBES:
            self.guard.check(request.headers)
        lock = self.admin if is_admin else _OPEN if path in _OPEN_PATHS else self.api
        lock.check(request)

    def check_of(self, entry: Any) -> Callable[[Request], None]:
        """Return what raises HTTPError unless a request may ask for an endpoint."""
        return partial(self.check, entry[1], entry in _ADMIN)


_NO_DOORS = _Doors(_OPEN, _OPEN, None)


def _routes(service: Any, endpoints: Sequence[Any], doors: _Doors) -> list[Route]:
    """Return the routes of endpoints, which get ``service``."""
    return [
        route for entry in endpoints for route in _routes_to(entry, _endpoint(service, entry[2], doors.check_of(entry)))
    ]


def _routes_to(entry: Any, answer: Any) -> list[Route]:
    method, path = entry[:2]
    paths = [path]
    if path != "/" and not path.endswith("}"):
        # A redirect would have the scheme and the host that a proxy uses, and clients drop keys on the way there.
        paths.append(f"{path}/")
    return [Route(path, answer, methods=[method]) for path in paths]


def _routes_of_several(several: SeveralServices, doors: _Doors, page: bool) -> list[Route]:
    """Return the routes of an application over several engines: its own, and those that lead to one of them."""
    entries = [*_OF_SEVERAL, *(_PAGE_OF_SEVERAL if page else ())]
    own = {(method, path) for method, path, *_ in entries}
    endpoints = [*_ENDPOINTS, *_ADMIN]
    inner = {name: Starlette(routes=_routes(one, endpoints, _NO_DOORS)) for name, one in several.services.items()}
    routes = _routes(several, entries, doors)
    for entry in endpoints:
        if entry[:2] not in own:
            is_admin = entry in _ADMIN
            named_by: NamedBy = "body" if len(entry) > 3 else "nothing"
            if is_admin or entry[1] == "/tokenizer_info":
                named_by = "query"
            forwarded = ForwardedEndpoint(
                several,
                inner,
                named_by=named_by,
                wakes=not is_admin and named_by != "nothing",
                check=doors.check_of(entry),
                answer=_answered,
            )
            routes += _routes_to(entry, forwarded)
    return routes


def _for_other_origins(origins: Sequence[str]) -> list[Middleware]:
    """Return what tells browsers that pages of these origins may call the application."""
    if not origins:
        return []
    shown = ["x-request-id", "request-id", "retry-after"]
    return [
        Middleware(CORSMiddleware, allow_origins=origins, allow_methods="*", allow_headers="*", expose_headers=shown)
    ]


def _endpoint(
    service: Any, endpoint: Any, check: Callable[[Request], None]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            check(request)
            with trace_of(request.headers):
                return await endpoint(service, request)
        except ClientLeftError:
            return Response(status_code=499)  # the client has left and reads nothing
        except Exception as error:
            return _answered(request, error)

    return answer


def _answered(request: Request, error: Exception) -> Response:
    return _answer(request, http_error(error, getattr(request.state, "body", None)))


def _answer(request: Request, error: HTTPError) -> Response:
    """Return the response for an error, in the shape of the interface that the path belongs to."""
    if is_for_anthropic(_path_of(request)):
        return answer_error(request, error)
    return JSONAnswer(error_body(error), error.status, headers={**headers_of_id(request), **error.headers})


def _path_of(request: Request) -> str:
    """Return the path without that under which the application is mounted."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _answer(request, HTTPError(error.status_code, text, code=code, headers=error.headers))
