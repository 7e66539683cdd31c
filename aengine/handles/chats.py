"""A chat on its way into the engine: it is planned in a thread, then submitted as a request is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..chat.plan import ChatRequest, plan_within
from ..errors import InvalidRequestError
from ..params import SamplingParams
from ..streams.chat_stream import ChatStream
from ..streams.token_stream import TokenStream

if TYPE_CHECKING:
    from ..engine.core import EngineCore
    from ..engine.user_request import Call

__all__ = ["begin_chat"]


async def begin_chat(
    still_running: Callable[[], object],
    core: EngineCore,
    stream_of: Callable[[EngineCore, Call], TokenStream],
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams | None,
    chat: dict[str, Any],
    request: dict[str, Any],
) -> ChatStream:
    """See `AsyncLLM.stream_chat`; ``chat`` and ``request`` are the options of either. On the engine's loop.

    ``still_running`` raises EngineClosedError if the engine was closed meanwhile.
    """
    core.check_accepts()
    params = SamplingParams() if params is None else params
    asked = ChatRequest.of(params, messages=messages, **chat)
    tokenizer, grammars = core.tokenizer, core.grammars
    if tokenizer is None or grammars is None:
        raise InvalidRequestError("a chat needs a tokenizer: start without skip_tokenizer=True", param="messages")
    core.admission.check_options(params, **request)
    begun = core.loop.time()
    with core.admission.reserved(request["request_id"]) as reservation:
        plan = await plan_within(request["deadline"], request["first_token_deadline"], grammars, tokenizer, asked)
    still_running()
    params = params.replace(structured_output=None)  # the plan has it
    call = core.admission.submit(
        plan.prompt,
        params,
        final_only=False,
        constraint=plan.spec,
        since=begun,
        markers=plan.marker_ids,
        chat=asked,
        **request,
    )
    if reservation.is_aborted:
        core.admission.abort(call.request_id)
    return ChatStream(stream_of(core, call), plan, tokenizer, params)
