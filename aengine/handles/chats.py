"""A chat on its way into the engine: a request whose prompt is a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..chat.plan import ChatRequest
from ..params import SamplingParams
from ..streams.chat_stream import ChatStream

if TYPE_CHECKING:
    from ..engine.core import EngineCore
    from ..streams.token_stream import TokenStream

__all__ = ["begin_chat"]


def begin_chat(
    core: EngineCore,
    submit: Callable[..., TokenStream],
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams | None,
    chat: dict[str, Any],
    options: dict[str, Any],
) -> ChatStream:
    """See `AsyncLLM.stream_chat`; ``chat`` and ``options`` are those of the chat and of the request. ``submit``: of the
    handle that has this core."""
    core.check_accepts()
    params = SamplingParams() if params is None else params
    asked = ChatRequest.of(params, messages=messages, **chat)
    tokenizer = core.tokenizer
    stream = submit(asked, params, final_only=False, **options)
    assert tokenizer is not None  # without one the request was refused
    return ChatStream(stream, tokenizer, params)
