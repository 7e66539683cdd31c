"""aengine: the LLM inference engine that you import.

    from aengine import AsyncLLM, SamplingParams

    async with AsyncLLM("smollm2-135m") as engine:
        async for tok in engine.stream("The capital of France is", SamplingParams(max_tokens=32)):
            print(tok.text, end="", flush=True)

Importing this package takes milliseconds: names are imported when they are first used, and torch only ever by the
worker processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .config import EngineConfig, StartupProgress
    from .errors import (
        AEngineError,
        ContextLengthError,
        DeadlineExceededError,
        EngineClosedError,
        EngineError,
        EngineOverloadedError,
        GrammarError,
        InternalError,
        InvalidRequestError,
        ModelLoadError,
        RequestError,
        WorkerDiedError,
    )
    from .llm import LLM
    from .outputs import Choice, Completion, FinishReason, Logprob, RequestEnd, Timings, Token, Usage
    from .params import SamplingParams, StructuredOutput
    from .streams.token_stream import TokenStream
    from .telemetry.metrics import Statistics

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "async_llm",
    "EngineConfig": "config",
    "StartupProgress": "config",
    "Statistics": "telemetry.metrics",
    "TokenStream": "streams.token_stream",
    "AEngineError": "errors",
    "ContextLengthError": "errors",
    "DeadlineExceededError": "errors",
    "EngineClosedError": "errors",
    "EngineError": "errors",
    "EngineOverloadedError": "errors",
    "GrammarError": "errors",
    "InternalError": "errors",
    "InvalidRequestError": "errors",
    "ModelLoadError": "errors",
    "RequestError": "errors",
    "WorkerDiedError": "errors",
    "LLM": "llm",
    "Choice": "outputs",
    "Completion": "outputs",
    "FinishReason": "outputs",
    "Logprob": "outputs",
    "RequestEnd": "outputs",
    "Timings": "outputs",
    "Token": "outputs",
    "Usage": "outputs",
    "SamplingParams": "params",
    "StructuredOutput": "params",
}

__all__ = [  # noqa: RUF022  # plainly sorted, as a test asks
    "AEngineError",
    "AsyncLLM",
    "Choice",
    "Completion",
    "ContextLengthError",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineOverloadedError",
    "FinishReason",
    "GrammarError",
    "InternalError",
    "InvalidRequestError",
    "LLM",
    "Logprob",
    "ModelLoadError",
    "RequestEnd",
    "RequestError",
    "SamplingParams",
    "StartupProgress",
    "Statistics",
    "StructuredOutput",
    "Timings",
    "Token",
    "TokenStream",
    "Usage",
    "WorkerDiedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
