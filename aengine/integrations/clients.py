"""OpenAI's client over an engine, as frameworks' own models of OpenAI take it, and the engine's errors out of it.

Answers are validated by pydantic's core instead of openai's own Python, which takes half of the time of an event; no
call is tried again, which is the framework's to decide; and all streams together have a bounded number of events, as
each costs the loop as much as the text of many tokens; a stream alone sends each token at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..async_llm import AsyncLLM
from ..errors import AEngineError, InvalidRequestError, RequestError
from ..llm import LLM
from ..server.in_process import ERRORS, openai_client
from .openai_style import async_side, blocking_side

_OPTIONS: dict[str, Any] = {"max_retries": 0, "timeout": None, "_strict_response_validation": True}


def async_client(engine: AsyncLLM | LLM, model_name: str) -> Any:
    """Return an `openai.AsyncOpenAI`, of an engine in another process, too. ``model_name``: what it asks for."""
    return openai_client(async_side(engine), app_options=_app_options(model_name), **_OPTIONS)


def blocking_client(engine: AsyncLLM | LLM, model_name: str) -> Any:
    """Return an `openai.OpenAI`. Raises InvalidRequestError unless the engine has a thread of its own."""
    return blocking_side(engine).openai_client(app_options=_app_options(model_name), **_OPTIONS)


def _app_options(model_name: str) -> dict[str, Any]:
    return {"model_names": model_name, "unpaced_streams": 1}


def engine_error(error: Any) -> AEngineError:
    """Return what the engine raised, of an `openai.APIError`; a RequestError of what it ended or never saw."""
    raised: list[AEngineError] = error.request.extensions.get(ERRORS, [])
    if raised:
        return raised[-1]
    status, body = getattr(error, "status_code", 500), error.body
    if error.code == "request_aborted" or status == 200:  # a chunk with a finish reason that OpenAI does not have
        return RequestError("the request was aborted")
    message = body["message"] if isinstance(body, dict) and "message" in body else error.message
    return InvalidRequestError(message, param=error.param) if status < 500 else RequestError(message)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise the engine's errors in place of `openai`'s."""
    import openai

    try:
        yield
    except openai.APIError as error:
        raise engine_error(error) from error
