"""A chat on its way into the engine: a request whose prompt is a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...limits.checks import check_num_messages
from ...params import ChatOptions, SamplingParams, chat_options
from ..chat.plan import ChatRequest
from ..streams.chat_stream import ChatStream

if TYPE_CHECKING:
    from ..core import EngineCore
    from ..streams.token_stream import TokenStream

__all__ = ["begin_chat"]


def begin_chat(
    core: EngineCore,
    submit: Callable[..., TokenStream],
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams | None,
    output_type: Any,
    options: ChatOptions,
) -> ChatStream:
    """See `AsyncLLM.stream_chat`. ``submit``: of the handle that has this core."""
    chat, request = chat_options(options)
    core.check_accepts()
    check_num_messages(core.limits.max_model_len, messages, chat.get("tools"))
    params = SamplingParams() if params is None else params
    chat |= {"messages": messages, "params": params, "output_type": output_type}
    return ChatStream(submit(ChatRequest(**chat), params, request, final_only=False), params)
