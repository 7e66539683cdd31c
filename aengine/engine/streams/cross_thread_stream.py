"""`CrossThreadStream`: a `TokenStream` whose reader is on another thread than the engine.

    engine's thread                                                 reader's
    ChoiceOutput --put()--> Mailbox --wake()--> CrossThreadBuffer   __anext__ takes from ``ready``;
                                                (filled when the    if there is nothing, waits
                                                loop's turn is over)   ^
                                                  | wake               |
                                                  +----- CallQueue ----+  one wake-up for all streams of a loop

The buffer is filled when a turn of the engine's loop is over, so a stream that has ended is out of the scheduler and
its usage is complete. No lock is needed, and no wake-up is lost: a reader that waits sets the buffer's ``wake``, then
checks again; the engine fills the buffer, then checks ``wake``. A reader that does not wait is not woken.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from ...errors import InvalidRequestError
from ...outputs import Completion, Token
from ..threads.call_queue import call_queue_of
from ..threads.futures import settle, wait_at_most
from ..threads.loop_ownership import running_loop
from ..threads.loop_thread import LoopEndedError, LoopThread
from .token_stream import Buffer, Mailbox, TokenStream, end_call

T = TypeVar("T")


class CrossThreadBuffer:
    """Buffer that the engine's thread fills and a reader on another thread empties."""

    __slots__ = ("_mailbox", "_thread", "end", "has_ended", "is_due", "loop", "on_end", "ready", "wake")

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._mailbox: Mailbox | None = None
        self.is_due = False  # the buffer will be filled at the end of this turn of the engine's loop
        self.ready: deque[Token] = deque()  # bounded by the request's own max_tokens, as the mailbox is
        self.has_ended = False  # set last, when all tokens are in ``ready``
        self.wake: Callable[[], object] | None = None
        self.on_end: Callable[[], object] | None = None  # wakes a reader that waits for nothing but the end
        self.loop: asyncio.AbstractEventLoop | None = None  # event loop of the reader that waits
        self.end: Callable[[], object] = _nothing  # aborts the request; to be called on the engine's thread

    def read_from(self, mailbox: Mailbox, end: Callable[[], object]) -> None:
        """Take over what ``mailbox``, made for this buffer, gets. ``end`` aborts its request; it is called on the
        engine's thread."""
        self._mailbox, self.end = mailbox, end

    def oldest_unread(self) -> Token | None:
        """See `Mailbox.oldest_unread`."""
        try:
            return self.ready[0] if self.wake is None else None
        except IndexError:  # the reader has just taken the last token
            return None

    def note_news(self) -> None:
        """Have the buffer filled when this turn of the engine's loop is over. Called on the engine's thread."""
        if not self.is_due:
            self.is_due = True
            self._thread.defer(self._fill)

    def _fill(self) -> None:
        self.is_due = False
        mailbox = self._mailbox
        if mailbox is None:
            return
        if mailbox.pending:
            self.ready.extend(mailbox.pending)
            mailbox.pending.clear()
        if mailbox.num_open:
            if self.loop is not None and self.loop.is_closed():  # the reader has gone with its loop
                self._thread.post(self.end)
        else:
            self._mailbox, self.end = None, _nothing
            self.has_ended = True
            if self.on_end is not None:
                self.on_end()
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()


class CrossThreadStream(TokenStream):
    """See `TokenStream`; read on any event loop, by one task at a time.

    It exists before the request is registered, so an error of that comes from the stream, too.
    ``owner``: the engine, which is not to be dropped while somebody reads.
    """

    __slots__ = ("_buffer", "_call_queue", "_is_waited_for", "_owner", "_place", "_remote")

    def __init__(self, remote: LoopThread, owner: object, request_id: str) -> None:
        self._remote = remote
        self._buffer = CrossThreadBuffer(remote)
        super().__init__(request_id, Mailbox(final_only=True, buffer=self._buffer), remote.loop, _nothing)
        self._place = [self._mailbox]
        self._owner = owner
        self._call_queue: object = None  # kept alive, so that the next wait finds it
        self._is_waited_for = False

    @property
    def place(self) -> list[Mailbox]:
        return self._place

    # -- on the engine's thread

    def begin(self, submit: Callable[[Buffer], Mailbox], abort: Callable[[str], object]) -> None:
        """Register the request by ``submit``, which makes its mailbox for a buffer; what that raises goes to the
        reader."""
        try:
            mailbox = submit(self._buffer)
        except Exception as error:
            self._buffer.read_from(self._mailbox, _nothing)
            self._mailbox.fail(error)
        else:
            self._mailbox = self._place[0] = mailbox
            self._buffer.read_from(mailbox, partial(end_call, mailbox, abort, self.request_id))

    # -- on the reader's

    async def __anext__(self) -> Token:
        buffer = self._buffer
        while True:
            has_ended = buffer.has_ended  # read before the tokens are: if it is set, all of them are there
            try:
                if buffer.ready:
                    return buffer.ready.popleft()
            except IndexError:  # another task reads too, which is not allowed
                continue
            if has_ended:
                if self._mailbox.error is not None:
                    raise self._failure()
                raise StopAsyncIteration
            await self._await_news(any_token=True)

    def _ready(self) -> deque[Token]:
        return self._buffer.ready

    async def rest(self, seconds: float) -> None:
        loop = running_loop()
        call_queue = self._call_queue = call_queue_of(loop)
        waiter = loop.create_future()
        self._begin_wait()
        self._buffer.on_end = partial(call_queue.post, settle, waiter)
        try:
            if not self._buffer.has_ended:
                await wait_at_most(seconds, waiter)
        except asyncio.CancelledError:
            self.end_soon()
            raise
        finally:
            self._buffer.on_end = None
            self._end_wait()

    async def wait(self) -> Completion:
        while not self._buffer.has_ended:
            await self._await_news(any_token=False)
        if self._mailbox.error is not None:
            raise self._failure()
        return self.completion

    @property
    def completion(self) -> Completion:
        mailbox = self._mailbox
        if not self._buffer.has_ended:
            raise InvalidRequestError(
                f"stream {self.request_id} has not ended yet: read it to its end, or close it, before its completion"
            )
        if mailbox.error is not None and not mailbox.choices:  # the request never began
            raise mailbox.error
        return mailbox.completion(self.request_id)

    async def aclose(self) -> None:
        """Abort the request if it still runs, and wait until the engine has. Idempotent."""
        if not self._buffer.has_ended and not self._remote.is_foreign:
            try:
                await self._remote.run(self._end_there)
            except LoopEndedError:
                pass
        self._buffer.ready.clear()

    async def _end_there(self) -> None:
        self._buffer.end()
        await asyncio.sleep(0)  # the buffer is filled at the end of this turn of the loop

    def end_soon(self) -> None:
        """Abort the request, from any thread, without waiting."""
        buffer = self._buffer
        self._remote.post(lambda: buffer.end())  # looked up on that thread: the request may not be in the engine yet

    async def _await_news(self, *, any_token: bool) -> None:
        """Wait for a token (if ``any_token``), or the end. Being cancelled here ends the request."""
        loop = running_loop()
        call_queue = self._call_queue = call_queue_of(loop)
        self._begin_wait()
        self._buffer.loop = loop
        waiter = loop.create_future()
        try:
            if not self._register_wake(partial(call_queue.post, settle, waiter), any_token):
                await waiter
        except asyncio.CancelledError:
            self.end_soon()
            raise
        finally:
            self._end_wait()

    def _begin_wait(self) -> None:
        self._remote.check_process()
        if self._is_waited_for:
            raise InvalidRequestError(f"stream {self.request_id} is already being read by another task")
        self._is_waited_for = True

    def _register_wake(self, wake: Callable[[], object], any_token: bool) -> bool:
        """Register ``wake``, called when something new comes. Returns whether something has come already."""
        buffer = self._buffer
        buffer.wake = wake
        return buffer.has_ended or (any_token and bool(buffer.ready))

    def _end_wait(self) -> None:
        self._buffer.wake = self._buffer.loop = None
        self._is_waited_for = False

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is not None and not buffer.has_ended and not self._remote.is_foreign:
            self._remote.post(buffer.end)


class BlockingStream(CrossThreadStream):
    """A stream whose coroutines block the reading thread instead of suspending. See `run_now`."""

    __slots__ = ()

    async def _await_news(self, *, any_token: bool) -> None:
        self._begin_wait()
        lock = threading.Lock()
        lock.acquire()
        try:
            if not self._register_wake(lock.release, any_token):
                lock.acquire()
        except BaseException:  # a KeyboardInterrupt, for example
            self.end_soon()
            raise
        finally:
            self._end_wait()

    def when_ended(self, tell: Callable[[], object]) -> None:
        """Register ``tell``, called from any thread at the stream's end; perhaps twice. For streams without tokens."""
        if self._register_wake(tell, any_token=False):
            tell()

    async def aclose(self) -> None:
        if not self._buffer.has_ended and not self._remote.is_foreign:
            try:
                self._remote.wait(self._end_there)
            except LoopEndedError:
                pass
        self._buffer.ready.clear()


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, as those of `BlockingStream` and of what reads from one."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise AssertionError("a coroutine that must not suspend did")


def _nothing(*_: object) -> None:
    """Do nothing: stands for the end of a request that is not in the engine yet. A call that ends it is queued behind
    its beginning."""
