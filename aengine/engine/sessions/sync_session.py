"""`SyncChatSession`: a conversation with an engine, for code that blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ...errors import AEngineError
from ...params import ChatOptions, SamplingParams
from ..chat.messages import ChatCompletion
from ..streams.blocking import ChatIterator
from .conversation import Said
from .session import SessionBase
from .tool_results import results_here

if TYPE_CHECKING:
    from typing import Self, Unpack

    from ...outputs import T


class SyncChatSession(SessionBase[ChatIterator]):
    """`ChatSession` with calls that block; see `SyncLLM.session`, which makes one."""

    @overload
    def chat(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: type[T] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[T]: ...

    @overload
    def chat(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: Any,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]: ...

    def chat(
        self,
        message: Said = None,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion[Any]:
        """Say something, and return the whole answer. Arguments and errors as of `ChatSession.chat`."""
        stream = self.stream(message, params, output_type=output_type, **options)
        completion = None
        try:
            with stream:
                completion = stream.wait()
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
    ) -> ChatIterator:
        """Say something, and return the answer as it comes. Arguments and errors as of `ChatSession.chat`."""
        return self._begin(message, params, output_type, options)

    def call_tools(self) -> int:
        """Run the functions that the last answer calls, in this thread, one after the other; else as
        `ChatSession.call_tools`. Raises InvalidRequestError also for a function that is async."""
        self._check_open()
        calls = self._conversation.open_calls
        return self._add(calls, results_here(self._options.get("tools"), calls))

    def keep(self, seconds: float) -> None:
        """See `ChatSession.keep`."""
        self._check_open()
        self._engine.keep_session(self.session_id, seconds, self._options.get("cache_salt"))

    def close(self) -> None:
        """See `ChatSession.aclose`."""
        if not self.is_closed:
            self._close()
            try:
                self._engine.keep_session(self.session_id, 0, self._options.get("cache_salt"))
            except AEngineError:  # what was kept has gone with the engine, or its worker
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
