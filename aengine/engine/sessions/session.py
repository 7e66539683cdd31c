"""`ChatSession`: a conversation with an engine, for code that awaits. `SessionBase`: what one that blocks has, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

from ...errors import AEngineError, EngineClosedError, InvalidRequestError
from ...limits.values import not_valid
from ...outputs import FinishReason
from ...params import ChatOptions, SamplingParams, chat_options, check_options, check_params
from ..chat.messages import ChatCompletion, ToolCall
from ..chat.tools import tools_of
from ..streams.chat_stream import ChatStream
from .conversation import Conversation, S, Said, SessionUsage, says_nothing
from .said_tokens import fork_of, new_id
from .tool_results import results_of, text_of

if TYPE_CHECKING:
    from typing import Self, Unpack

    from ...outputs import T

KEEP = 60.0
"""Seconds for which a session's KV is kept after a turn, unless it is begun with others."""


class Chats(Protocol):
    """Interface of the engine, as sessions use it: an `AsyncLLM` or a `SyncLLM`."""

    @property
    def stream_chat(self) -> Any: ...
    @property
    def keep_session(self) -> Any: ...
    def abort(self, request_id: str) -> bool: ...


class SessionBase(Generic[S]):
    """What a session has said, and how its turns are asked for."""

    def __init__(
        self,
        engine: Chats,
        system: str | None,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        options: ChatOptions,
    ) -> None:
        if system is not None and not isinstance(system, str):
            raise not_valid("system", system, "a text")
        if params is not None:
            check_params(params)
        check_options(chat_options(options)[1])
        if options.get("request_id") is not None:
            raise not_valid("request_id", options["request_id"], "left out: each turn has an id of its own")
        tools_of(options.get("tools"))
        given: dict[str, Any] = {"keep": KEEP, "session_id": new_id(), **options}
        self._engine = engine
        self._params = params
        self._options = given
        if not isinstance(messages, Sequence):
            raise not_valid("messages", messages, "a list of messages")
        first = [] if system is None else [{"role": "system", "content": system}]
        self._conversation: Conversation[S] = Conversation([*first, *messages], self._abort)
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} {len(self.messages)} messages>"

    @property
    def session_id(self) -> str:
        """The ``session_id`` of its requests."""
        return str(self._options["session_id"])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All that was said, as OpenAI writes it: a copy. While a turn is under way, with what it has said so far, its
        reader may not have read all of which."""
        return deepcopy(self._conversation.messages)

    @property
    def usage(self) -> SessionUsage:
        """The tokens of all turns together, also of those that were undone; ``usage.turns`` has each one's."""
        return self._conversation.usage

    def add_tool_result(self, call: ToolCall | str, result: Any) -> None:
        """Add what a call of the last answer has returned; then ``chat()`` goes on.

        Args:
            call: it, or its id.
            result: a text, or what becomes JSON.

        Raises InvalidRequestError: the last answer has no such call, or it has a result; or the value is no JSON.
        """
        self._check_open()
        self._conversation.add_result(call.id if isinstance(call, ToolCall) else call, text_of(result))

    def fork(self) -> Self:
        """Return another session, which has said and heard the same until now: an answer under way is in it as far as
        it has come, and ``chat(continue_final_message=True)`` goes on with that.

        What the two have in common they share as they do with any request, by the prefix cache: the fork's first turn
        computes what is new, and the block that was not full. Each keeps, and ends, its own.

        Raises InvalidRequestError: the session is closed.
        """
        self._check_open()
        own: Any = {**self._options, "session_id": fork_of(self.session_id)}
        return type(self)(self._engine, None, self.messages, self._params, own)

    def _begin(self, message: Said, params: SamplingParams | None, output_type: Any, options: ChatOptions) -> S:
        """Begin a turn. Returns its stream."""
        self._check_open()
        if "session_id" in options:
            raise InvalidRequestError("a turn has the session_id of its session", param="session_id")
        asked: Any = {**self._options, **options}
        params = self._params if params is None else params

        def begin(messages: Any) -> S:
            stream: S = self._engine.stream_chat(messages, params, output_type=output_type, **asked)
            return stream

        return self._conversation.begin(message, begin, continues=asked.get("continue_final_message") is True)

    def _end(self, stream: S, completion: ChatCompletion[Any] | None) -> None:
        """End the turn of a stream; None: it has raised."""
        if completion is None:
            self._conversation.end(stream.request_id, None)
            return
        is_cut = completion.finish_reason is FinishReason.ABORT and says_nothing(completion.message)
        self._conversation.end(stream.request_id, None if is_cut else completion.message, completion.usage)

    def _add(self, calls: Sequence[Mapping[str, Any]], results: Sequence[str | BaseException]) -> int:
        """Add the results of calls, and return how many. Raises the first that is an error."""
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, str):
                self._conversation.add_result(call["id"], result)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return len(results)

    def _close(self) -> None:
        """End the turn that is under way, and take no more."""
        self.is_closed = True
        self._conversation.settle(leaves=True)

    def _check_open(self) -> None:
        if self.is_closed:
            raise InvalidRequestError(
                f"{self.session_id} is closed: begin another with engine.session(messages=...)", param="session"
            )

    def _abort(self, request_id: str) -> None:
        try:
            self._engine.abort(request_id)
        except EngineClosedError:  # its requests have ended with it
            pass


class ChatSession(SessionBase[ChatStream]):
    """A conversation that an engine remembers; see `AsyncLLM.session`, which makes one.

        async with engine.session("You are brief.", tools=[get_weather], keep=60) as session:
            answer = await session.chat("What is the weather in Paris?")
            while await session.call_tools():
                answer = await session.chat()

    One turn is under way at a time. What it has asked and heard is history once it has ended, by itself or at its
    limit, and as far as it has come when its stream was left (``break``, `ChatStream.aclose`) or aborted. A turn that
    raises is undone: of a `chat` that is cancelled nothing is history, so that it can be asked again.
    """

    @overload
    async def chat(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[T]: ...

    @overload
    async def chat(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]: ...

    async def chat(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]:
        """Say something, and return the whole answer.

        Args:
            message: a user's text, a message, or several. None: nothing, as after `add_tool_result`.
            params: None: those of the session.
            output_type, options: as of `AsyncLLM.chat`; an option that is not given is the session's.

        Raises what `AsyncLLM.chat` does, and InvalidRequestError: the session is closed, or has a turn under way.
        """
        stream = self.stream(message, params, output_type=output_type, **options)
        completion = None
        try:
            async with stream:
                completion = await stream.wait()
        finally:
            self._end(stream, completion)
        return completion

    def stream(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatStream:
        """Say something, and return the answer as it comes. Returns at once. Arguments and errors as of `chat`."""
        return self._begin(message, params, output_type, options)

    async def call_tools(self) -> int:
        """Run the functions among the session's tools that the last answer calls, all at once, and add their results.
        Arguments that a function can't take are a result that says so to the model.

        Returns how many; 0: it calls none. Raises what the first function raises, once all have ended: the results of
        the others are added. InvalidRequestError: a tool without a function.
        """
        self._check_open()
        calls = self._conversation.open_calls
        return self._add(calls, await results_of(self._options.get("tools"), calls))

    async def keep(self, seconds: float) -> None:
        """Keep what is kept since the last turn for so long from now, as while a slow tool runs. After the next turn it
        is as the session says.

        Raises InvalidRequestError: no number of seconds from 0 to 86400. EngineClosedError.
        """
        self._check_open()
        await self._engine.keep_session(self.session_id, seconds, self._options.get("cache_salt"))

    async def aclose(self) -> None:
        """End: a turn that is under way is aborted, and nothing is kept any more. Idempotent."""
        if not self.is_closed:
            self._close()
            try:
                await self._engine.keep_session(self.session_id, 0, self._options.get("cache_salt"))
            except AEngineError:  # what was kept has gone with the engine, or its worker
                pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
