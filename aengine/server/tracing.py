"""The trace that a client's request belongs to, as its headers say: W3C's ``traceparent``, as a rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.requests import Request

context: Any
try:
    from opentelemetry import context, propagate
    from opentelemetry.trace import get_current_span
except ImportError:
    context = None

__all__ = ["client_trace"]


@contextmanager
def client_trace(request: Request) -> Iterator[None]:
    """Make the client's span the current one. Without effect if OpenTelemetry is not installed, and where a span of
    this request is current already, as under an instrumentation of FastAPI."""
    if context is None or get_current_span().get_span_context().is_valid:
        yield
        return
    token = context.attach(propagate.extract(request.headers))
    try:
        yield
    finally:
        context.detach(token)
