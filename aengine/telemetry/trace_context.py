"""The span that is current, as headers and back: W3C's ``traceparent``, or what OpenTelemetry's propagators are set to.

Without OpenTelemetry's API there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

context: Any
try:
    from opentelemetry import context, propagate
    from opentelemetry.trace import get_current_span
except ImportError:
    context = None


def current_trace() -> dict[str, str]:
    """Return the current span as headers; empty if there is none."""
    headers: dict[str, str] = {}
    if context is not None and get_current_span().get_span_context().is_valid:
        propagate.inject(headers)
    return headers


@contextmanager
def trace_of(headers: Mapping[str, str]) -> Iterator[None]:
    """Make the span that the headers name the current one. Without effect where a span is current already, as under an
    instrumentation of FastAPI: that is the nearer one."""
    if context is None or get_current_span().get_span_context().is_valid:
        yield
        return
    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)
