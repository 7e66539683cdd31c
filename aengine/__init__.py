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

from .__version__ import __version__
from .engine.handles.clients import CLIENTS

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .config import EngineConfig
    from .engine.chat.messages import (
        ChatChoice,
        ChatCompletion,
        ChatMessage,
        Delta,
        ReasoningDelta,
        TextDelta,
        ToolCall,
        ToolCallDelta,
        ToolCallEnd,
        ToolCallStart,
    )
    from .engine.chat.tools import Tool, ToolChoice
    from .engine.handles.sync_llm import SyncLLM
    from .engine.pooling.requests import PoolingOptions, PoolingRequest, PoolingResult, RankedDocument, ScoredCompletion
    from .engine.sessions.session import ChatSession
    from .engine.sessions.sync_session import SyncChatSession
    from .engine.stores.store import KVStore
    from .engine.streams.blocking import ChatIterator, TokenIterator
    from .engine.streams.chat_stream import ChatStream
    from .engine.streams.token_stream import TokenStream
    from .engine.tokenizer_view import TokenizerView
    from .engine.updates.sources import IpcTensors, TrainerGroup
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
        NotEnoughMemoryError,
        QuotaExceededError,
        RequestError,
        WeightsLostError,
        WorkerCallError,
        WorkerDiedError,
    )
    from .limits.kv_tiers import DiskTier, HostTier, StoreTier
    from .limits.tenants import Tenant
    from .llm import LLM
    from .outputs import Choice, Completion, FinishReason, Logprob, RequestEnd, StartupProgress, Timings, Token, Usage
    from .params import ChatOptions, GenerateOptions, RequestOptions, SamplingParams, StructuredOutput
    from .settings import Settings
    from .telemetry.listeners import RequestListener, RequestStart
    from .telemetry.metrics import Histogram, Histograms, ReplicaStatistics, Statistics, TenantStatistics, WorkerRestart
    from .workers.host.spares import SpareWorkers

_NAMES = {
    "async_llm": "AsyncLLM",
    "config": "EngineConfig",
    "engine.chat.messages": (
        "ChatChoice ChatCompletion ChatMessage Delta ReasoningDelta TextDelta ToolCall ToolCallDelta ToolCallEnd "
        "ToolCallStart"
    ),
    "engine.chat.tools": "Tool ToolChoice",
    "engine.handles.sync_llm": "SyncLLM",
    "engine.pooling.requests": "PoolingOptions PoolingRequest PoolingResult RankedDocument ScoredCompletion",
    "engine.sessions.session": "ChatSession",
    "engine.sessions.sync_session": "SyncChatSession",
    "engine.stores.store": "KVStore",
    "engine.streams.blocking": "ChatIterator TokenIterator",
    "engine.streams.chat_stream": "ChatStream",
    "engine.streams.token_stream": "TokenStream",
    "engine.tokenizer_view": "TokenizerView",
    "engine.updates.sources": "IpcTensors TrainerGroup",
    "errors": (
        "AEngineError ContextLengthError DeadlineExceededError EngineClosedError EngineError EngineOverloadedError "
        "GrammarError InternalError InvalidRequestError ModelLoadError NotEnoughMemoryError "
        "QuotaExceededError RequestError WeightsLostError WorkerCallError WorkerDiedError"
    ),
    "limits.kv_tiers": "DiskTier HostTier StoreTier",
    "limits.tenants": "Tenant",
    "llm": "LLM",
    "outputs": "Choice Completion FinishReason Logprob RequestEnd StartupProgress Timings Token Usage",
    "params": "ChatOptions GenerateOptions RequestOptions SamplingParams StructuredOutput",
    "settings": "Settings",
    "telemetry.listeners": "RequestListener RequestStart",
    "telemetry.metrics": "Histogram Histograms ReplicaStatistics Statistics TenantStatistics WorkerRestart",
    "workers.host.spares": "SpareWorkers",
}
"""What each module has of the names below, which are imported when they are first used."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [  # noqa: RUF022  # plainly sorted, as a test asks
    "AEngineError",
    "AsyncLLM",
    "ChatChoice",
    "ChatCompletion",
    "ChatIterator",
    "ChatMessage",
    "ChatOptions",
    "ChatSession",
    "ChatStream",
    "Choice",
    "Completion",
    "ContextLengthError",
    "DeadlineExceededError",
    "Delta",
    "DiskTier",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EngineOverloadedError",
    "FinishReason",
    "GenerateOptions",
    "GrammarError",
    "Histogram",
    "Histograms",
    "HostTier",
    "InternalError",
    "InvalidRequestError",
    "IpcTensors",
    "KVStore",
    "LLM",
    "Logprob",
    "ModelLoadError",
    "NotEnoughMemoryError",
    "PoolingOptions",
    "PoolingRequest",
    "PoolingResult",
    "QuotaExceededError",
    "RankedDocument",
    "ReasoningDelta",
    "ReplicaStatistics",
    "RequestEnd",
    "RequestError",
    "RequestListener",
    "RequestOptions",
    "RequestStart",
    "SamplingParams",
    "ScoredCompletion",
    "Settings",
    "SpareWorkers",
    "StartupProgress",
    "Statistics",
    "StoreTier",
    "StructuredOutput",
    "SyncChatSession",
    "SyncLLM",
    "Tenant",
    "TenantStatistics",
    "TextDelta",
    "Timings",
    "Token",
    "TokenIterator",
    "TokenStream",
    "TokenizerView",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolChoice",
    "TrainerGroup",
    "Usage",
    "WeightsLostError",
    "WorkerCallError",
    "WorkerDiedError",
    "WorkerRestart",
    "__version__",
]


def _openai_client(engine: AsyncLLM, **options: Any) -> Any:
    from .server.in_process import openai_client

    return openai_client(engine, **options)


def _blocking_openai_client(engine: AsyncLLM, run: Any, **options: Any) -> Any:
    from .server.in_process import blocking_openai_client

    return blocking_openai_client(engine, run, **options)


CLIENTS |= {"openai": _openai_client, "blocking openai": _blocking_openai_client}

__path__.append(f"{__path__[0]}/engine/moved")  # the old places of modules that users import, for one version


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
