"""What an error of the engine is in HTTP: a status, and for programs a type and a code."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..errors import (
    AEngineError,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    GrammarError,
    InternalError,
    InvalidRequestError,
    QuotaExceededError,
    WorkerDiedError,
)
from ..outputs import FinishReason
from .http import HTTPError

if TYPE_CHECKING:
    from ..chat import ChatChoice
    from ..outputs import Choice
    from .openai.requests import Body

_NO_RETRY = {"x-should-retry": "false"}
"""Heeded by OpenAI's and Anthropic's clients, which try again otherwise, as for any 5xx."""

_PUBLIC: dict[type[EngineError], str] = {
    InternalError: "the engine failed on this request; the server's log says why",
    WorkerDiedError: "the worker process that computes the model has died; the server's log says why",
    EngineClosedError: "the engine is not running: it starts, drains, has failed or is closed",
    EngineError: "the engine failed; the server's log says why",
}
"""What clients read of the engine's own failures, whose texts have paths of this machine and other requests' data."""

_KILLS = "the worker process that computes the model has died of this request each time; the server's log says why"

_NOT_STRICT = 'a request without "strict": true leaves out'
"""What HTTP has for the engine's on_unsupported."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}", re.IGNORECASE)
"""The address in an object's repr, which is cut out: it tells a client where the process' memory lies."""

raised_errors: ContextVar[list[AEngineError] | None] = ContextVar("raised_errors", default=None)
"""Takes the engine's errors as they are, for a client in the same process."""

logger = logging.getLogger("aengine.server")


def http_error(error: BaseException, body: Body | None = None) -> HTTPError:
    """Return what ``error`` is in HTTP, with the fields of the ``body`` that was sent."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, AEngineError) and (raised := raised_errors.get()) is not None:
        raised.append(error)
    text = _ADDRESS.sub("", str(error))
    names = {} if body is None else body.field_names()
    match error:
        case ContextLengthError():
            return HTTPError(400, _renamed(text, names), code="context_length_exceeded")
        case GrammarError():
            place = "tools" if error.tool is not None else ("response_format" if body is None else body.place_of_shape)
            cure = "response_format leaves out" if place.startswith("structured_outputs") else _NOT_STRICT
            text = text.replace('on_unsupported="relax" leaves out', cure)
            return HTTPError(400, text, code=f"schema_{error.kind}", param=place + error.path.removeprefix("$"))
        case InvalidRequestError():
            param = names.get(error.param or "", error.param)
            return HTTPError(400, _renamed(text, names), code="invalid_value", param=param)
        case EngineOverloadedError():
            seconds = {"retry-after": str(math.ceil(error.retry_after))}
            code = "quota_exceeded" if isinstance(error, QuotaExceededError) else "engine_overloaded"
            return HTTPError(429, text, kind="rate_limit_error", code=code, headers=seconds)
        case DeadlineExceededError():
            return HTTPError(504, text, kind="timeout_error", code="deadline_exceeded", headers=_NO_RETRY)
        case InternalError():
            logger.error("a request failed in the engine: %s", text)
            public = _PUBLIC[InternalError]
            return HTTPError(500, public, kind="server_error", code="internal_error", headers=_NO_RETRY)
        case WorkerDiedError(is_of_request=True):
            logger.error("a request has killed workers: %s", text)
            return HTTPError(500, _KILLS, kind="server_error", code="internal_error", headers=_NO_RETRY)
        case EngineError():
            public = next(shown for kind, shown in _PUBLIC.items() if isinstance(error, kind))
            headers = {"retry-after": "1"}
            if not isinstance(error, EngineClosedError):
                logger.warning("a request failed: %s", text)
            elif error.public is not None:
                public, headers = error.public, _NO_RETRY
            return HTTPError(503, public, kind="server_error", code="engine_unavailable", headers=headers)
        case AEngineError():
            return HTTPError(400, text)
    if isinstance(error, RecursionError):
        return HTTPError(400, "the body is nested too deeply", code="invalid_value")
    logger.error("a request failed in the server", exc_info=error)
    return HTTPError(500, "the server failed; its log says why", kind="server_error", code="internal_error")


def aborted() -> HTTPError:
    """Return the error of a request that the server has ended before its answer was whole."""
    message = "the server has ended this request before its answer was whole, as it does when it stops: send it again"
    return HTTPError(503, message, kind="server_error", code="request_aborted", headers={"retry-after": "1"})


def check_not_aborted(choices: Iterable[Choice[Any] | ChatChoice]) -> None:
    """Raise HTTPError 503 if the server has ended one: half an answer must not pass for a whole one."""
    if any(choice.finish_reason is FinishReason.ABORT for choice in choices):
        raise aborted()


def _renamed(text: str, names: dict[str, str]) -> str:
    """Put the names of fields into the engine's text, which begins with a parameter or names others in what it wants of
    a value. The value stays as it is, and so do words that are plain English."""
    for param, field in names.items():
        text = re.sub(rf"^{re.escape(param)}(?=[=. ]|$)", field, text)
        value, separator, wanted = text.rpartition(" is not valid: ")
        if "_" in param:
            text = value + separator + re.sub(rf"\b{re.escape(param)}\b", field, wanted)
    return text
