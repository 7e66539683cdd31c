"""`RemoteStream`: what a request brings, in another process than the engine's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..chat import TextDelta
from ..engine.structured.partial_json import partial_json
from ..engine.threads.futures import settle, wait_at_most
from ..errors import AEngineError, InvalidRequestError
from ..outputs import Completion, FinishReason, Token, Usage
from .types import with_values
from .wire import from_wire

if TYPE_CHECKING:
    from typing import Self

    from ..engine.structured.output_type import OutputType

__all__ = ["WINDOW", "RemoteStream"]

T = TypeVar("T")
C = TypeVar("C", bound=Completion)

_REASONS: Any = tuple[FinishReason | None, ...]

WINDOW = 64
"""Reads of the engine's stream that may be under way or unread here. More lie in the engine, where its unread_timeout
counts."""


class RemoteStream(Generic[T, C]):
    """The tokens of one request or the deltas of a chat as they come, as `TokenStream` and `ChatStream`.

    Closing, dropping or cancelling it ends the request.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        n: int,
        decode: Callable[[Any], T],
        kind: type[C],
        send: Callable[..., None],
        loop: asyncio.AbstractEventLoop,
        output_type: OutputType | None = None,
        *,
        is_json: bool = False,
    ) -> None:
        self.request_id = request_id
        self.usage = Usage(0, 0)
        """The tokens so far."""
        self.finish_reasons: tuple[FinishReason | None, ...] = (None,) * n
        """Why each of the n completions has ended."""
        self.stop_reasons: tuple[str | int | None, ...] = (None,) * n
        """The `Choice.stop_reason` of each of the n completions, known with its finish reason."""
        self._number = number
        self._decode = decode
        self._kind = kind
        self._send = send
        self._loop = loop
        self._output_type = output_type
        self._texts: list[str] | None = [] if is_json else None  # texts of the first completion that have been read
        self._items: deque[T] = deque()
        self._num_reads = 0  # reads since the engine was last told of them
        self._is_asked = False  # the engine was asked for items
        self._waiter: asyncio.Future[None] | None = None
        self._end_waiter: asyncio.Future[None] | None = None
        self._error: AEngineError | None = None
        self._completion: C | None = None
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._is_closed or self._error is not None or self._completion is not None

    # -- what the connection brings

    def put(self, items: list[Any], usage: tuple[int, int, int], ends: tuple[list[Any], list[Any]] | None) -> None:
        """``ends``: finish reasons and stop reasons; None: no completion has ended."""
        if self._is_closed:
            return
        self._items.extend(map(self._decode, items))
        self.usage = Usage(*usage)
        if ends is not None:
            self.finish_reasons = from_wire(_REASONS, ends[0])
            self.stop_reasons = tuple(ends[1])
        self._num_reads += 1
        if self._end_waiter is not None:  # the reader takes all of it when it has rested
            self._ask()
        settle(self._waiter)

    def finish(self, completion: Any) -> None:
        """``completion``: as it came."""
        whole = from_wire(self._kind, completion)
        self._completion = whole if self._output_type is None else with_values(whole, self._output_type)
        self.usage = self._completion.usage
        self.finish_reasons = tuple(choice.finish_reason for choice in self._completion.choices)
        self.stop_reasons = tuple(choice.stop_reason for choice in self._completion.choices)
        settle(self._waiter)
        settle(self._end_waiter)

    def fail(self, error: AEngineError) -> None:
        if not self.has_ended:
            self._error = error
            settle(self._waiter)
            settle(self._end_waiter)

    # -- the reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        items = await self.read(at_most=1)
        if not items:
            raise StopAsyncIteration
        return items[0]

    async def read(self, at_most: int | None = None) -> list[T]:
        """Wait for an item, and return all that have come, ``at_most`` so many; [] at the end.

        Raises the request's error, once all items before it have been read.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                return []
            self._ask()
            await self._wait()
        items = [self._items.popleft() for _ in range(min(at_most or len(self._items), len(self._items)))]
        if self._texts is not None:
            self._texts += [text for item in items if (text := _text_of_first(item))]
        if not self._items:
            self._ask()
        return items

    def _ask(self) -> None:
        """Allow the engine to send more."""
        if not self._is_asked:
            self._is_asked = True
            self._send("more", self._number, WINDOW)
        elif self._num_reads >= WINDOW // 2 and not self.has_ended:
            self._send("more", self._number, self._num_reads)
            self._num_reads = 0

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise InvalidRequestError(f"stream {self.request_id} is already being read by another task")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self._end()
            raise
        finally:
            self._waiter = None

    async def rest(self, seconds: float) -> None:
        """Wait as `TokenStream.rest`. Being cancelled here ends the request."""
        if self.has_ended:
            return
        self._end_waiter = waiter = self._loop.create_future()
        try:
            await wait_at_most(seconds, waiter)
        except asyncio.CancelledError:
            self._end()
            raise
        finally:
            self._end_waiter = None

    async def wait(self) -> C:
        """Wait for the end without reading. Raises the request's error."""
        if not self.has_ended:
            self._send("wait", self._number)
        while not self.has_ended:
            await self._wait()
        self._items.clear()
        if self._error is not None:
            raise self._error
        return self.completion

    @property
    def completion(self) -> C:
        """The whole answer, once the stream has been read to its end. Raises InvalidRequestError before."""
        if self._completion is None:
            raise InvalidRequestError(f"stream {self.request_id} has not been read to its end")
        return self._completion

    @property
    def partial(self) -> Any:
        """What the first completion, a JSON text, says as far as it has been read; see `TokenStream.partial`."""
        if self._texts is None:
            return None
        has_ended = self._completion is not None and not self._items
        is_whole = has_ended and self.finish_reasons[0] is FinishReason.STOP
        return partial_json("".join(self._texts), has_ended=is_whole)

    async def aclose(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        self._end()
        self._items.clear()

    def _end(self) -> None:
        if not self.has_ended:
            self._is_closed = True
            self._send("end", self._number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_is_closed", True) or self.has_ended or self._loop.is_closed():
            return
        try:  # the garbage collector may run this in any thread
            self._loop.call_soon_threadsafe(self._send, "end", self._number)
        except RuntimeError:
            pass


def _text_of_first(item: Any) -> str:
    """Return what a token or a delta adds to the text of the first completion."""
    if isinstance(item, Token):
        return item.text if item.index == 0 else ""
    return item.text if isinstance(item, TextDelta) and item.choice == 0 else ""
