"""`serve_engine`: an engine for other processes of this user, on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ..__version__ import __version__
from ..async_llm import AsyncLLM
from ..engine.adapters.memory import LoraMemory
from ..engine.streams.chat_stream import ChatStream
from ..engine.streams.token_stream import TokenStream
from ..engine.threads.pools import run_in_thread
from ..engine.tokenizer_view import CALLS, TokenizerView
from ..errors import AEngineError, EngineClosedError, InternalError, InvalidRequestError
from ..outputs import ALIVE_STATES, Choice, Completion
from ..telemetry.trace_context import trace_of
from .message_stream import MessageStream
from .unix_socket import bind_unix, socket_path
from .wire import delta_to_wire, error_to_wire, params_from_wire, pooled_to_wire, pooling_from_wire, to_wire

logger = logging.getLogger("aengine.remote")

_NEWS_SECONDS = 0.5
_CALLS = {"check_health", "reset_prefix_cache", "list_loras", "has_lora", "keep_session"}
_ADMIN = {"collective_rpc", "start_profile", "stop_profile", "add_lora", "remove_lora", "pin_lora"}
_ADMIN |= {"pause", "end_pause", "start_weight_update", "update_weights", "finish_weight_update"}
_ADMIN |= {"abort_weight_update", "weights_checksum"}
_ADMIN |= {"sleep", "wake_up"}
"""Calls that the engine's process may refuse; see `serve_engine`."""


@asynccontextmanager
async def serve_engine(engine: AsyncLLM, path: str | os.PathLike[str], *, admin: bool = False) -> AsyncIterator[None]:
    """Within: processes of this user reach the engine by ``connect(path)``. At the end their requests fail with
    EngineClosedError.

    Args:
        engine: on this loop, started.
        path: of the Unix socket, which is made, with access for this user only, and removed at the end. What a dead
            process left there is replaced.
        admin: other processes may also call what concerns the engine as a whole: `AsyncLLM.collective_rpc`,
            `AsyncLLM.start_profile` and `AsyncLLM.stop_profile`. Without it these are an InvalidRequestError there.

    Raises:
        EngineError: another program listens at ``path``, or it can't be made.
        InvalidRequestError: an argument is no engine, or no path.
    """
    if not isinstance(engine, AsyncLLM):
        raise InvalidRequestError(f"engine must be an AsyncLLM, not {engine!r:.80}", param="engine")
    place = socket_path(path)
    served = _ServedEngine(engine, admin=admin)
    listener = bind_unix(place, 0o600)
    server = await asyncio.start_unix_server(served.connected, sock=listener)
    news = asyncio.create_task(served.tell_news())
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        news.cancel()
        await served.aclose()
        await asyncio.wait([news])


class _ServedEngine:
    """An engine, with the state that all connections to it share."""

    def __init__(self, engine: AsyncLLM, *, admin: bool) -> None:
        self.engine = engine
        self.admin = admin
        self.sessions: dict[_Session, asyncio.Task[Any] | None] = {}
        self._told: tuple[Any, ...] = ()
        self._table: asyncio.Task[dict[str, Any] | None] | None = None

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = _Session(self, MessageStream(reader, writer))
        self.sessions[session] = asyncio.current_task()
        try:
            await session.run()
        finally:
            del self.sessions[session]

    async def aclose(self) -> None:
        for session in self.sessions:
            session.link.abort()
        if tasks := [task for task in self.sessions.values() if task is not None]:
            await asyncio.wait(tasks)

    async def hello(self) -> dict[str, Any]:
        """Return the first message to a client: what it must know of the engine."""
        if self._table is None:
            self._table = asyncio.create_task(self._tokenizer_table())
        table = await asyncio.shield(self._table)
        return {
            "version": __version__,
            "config": self.engine.config.to_wire(),
            "tokenizer": table,
            "news": self.news(),
        }

    async def _tokenizer_table(self) -> dict[str, Any] | None:
        """Return what `RemoteTokenizer` knows from the start. None: there is no tokenizer."""
        try:
            view = self.engine.tokenizer
        except InvalidRequestError:
            return None
        num_ids = max(view.vocab_size, self.engine.describe()["vocab_size"])
        return await run_in_thread("table", _tokenizer_table, view, num_ids)

    def news(self) -> tuple[Any, ...]:
        """Return the engine's state, statistics and description."""
        state = self.engine.state
        if state not in ALIVE_STATES:
            return (state, None, None)
        return (state, to_wire(self.engine.statistics()), self.engine.describe())

    async def tell_news(self) -> None:
        """Tell the clients, from time to time, what they ask without waiting."""
        while True:
            await asyncio.sleep(_NEWS_SECONDS)
            self.tell()

    def tell(self) -> None:
        """Tell the clients now, if there is something new."""
        told = [session for session in self.sessions if session.wants_news]
        if told and (news := self.news()) != self._told:
            self._told = news
            for session in told:
                session.link.send("news", 0, news)


def _tokenizer_table(view: TokenizerView, num_ids: int) -> dict[str, Any]:
    texts = [view.token_bytes(i) for i in range(num_ids)]
    return {
        "vocab_size": view.vocab_size,
        "bos_token_id": view.bos_token_id,
        "eos_token_ids": list(view.eos_token_ids),
        "special_tokens": view.special_tokens,
        "has_chat_template": view.has_chat_template,
        "bytes": b"".join(texts),
        "lengths": array("I", map(len, texts)).tobytes(),
    }


class _Request:
    """A client's request on the engine's side."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.has_begun = False  # the engine has it: until its task ends, its id is no other's
        self.has_failed = False  # the engine has refused or ended it with an error
        self.is_aborted = False
        self.num_reads = 0  # reads that the client allows now
        self.only_wait = False
        self.news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def may_read(self) -> bool:
        """Wait until the client wants more. Returns whether it wants what comes, not only the end."""
        while not self.num_reads and not self.only_wait:
            self.news.clear()
            await self.news.wait()
        self.num_reads -= 1
        return not self.only_wait


class _Session:
    """One connection: its requests end with it."""

    def __init__(self, served: _ServedEngine, link: MessageStream) -> None:
        self.link = link
        self.wants_news = False
        self._served = served
        self._engine = served.engine
        self._requests: dict[int, _Request] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._updates = False  # it has begun an update of the weights
        self._holds: list[contextlib.AsyncExitStack] = []  # for which the engine stays awake
        self._takes: dict[str, Callable[..., None]] = {
            "begin": self._begin,
            "more": self._more,
            "end": self._end,
            "abort": self._abort,
            "call": self._call,
        }

    async def run(self) -> None:
        try:
            async for kind, *rest in self.link.messages():
                self._takes[kind](*rest)
        except Exception as error:
            told = "a connection brought what no client of this version sends, and is closed: %s: %s"
            logger.warning(told, type(error).__name__, error, exc_info=logger.isEnabledFor(logging.DEBUG))
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            while self._holds:
                await self._hold_awake(-1)
            if self._updates:
                logger.warning("a client that had begun a weight update has gone: it is aborted")
                with contextlib.suppress(AEngineError):
                    await self._engine.abort_weight_update()
            self.link.abort()

    async def _hold_awake(self, change: int) -> None:
        """See `AsyncLLM.stays_awake`: 1 for one more, -1 for one fewer."""
        if change < 0:
            await self._holds.pop().aclose()
            return
        hold = contextlib.AsyncExitStack()
        await hold.enter_async_context(self._engine.stays_awake())
        self._holds.append(hold)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- requests

    def _begin(
        self,
        number: int,
        method: str,
        prompt: Any,
        params: dict[str, Any],
        options: dict[str, Any],
        trace: dict[str, str],
    ) -> None:
        self._requests[number] = request = _Request(options["request_id"])
        with trace_of(trace):  # the task has it then
            request.task = self._spawn(self._answer(number, request, method, prompt, params, options))
        request.task.add_done_callback(lambda task: self._requests.pop(number))

    def _more(self, number: int, num_reads: int | None) -> None:
        """Let ``num_reads`` further reads be sent. None: the client wants the end alone."""
        if (request := self._requests.get(number)) is not None:
            request.num_reads += num_reads or 0
            request.only_wait |= num_reads is None
            request.news.set()

    def _end(self, number: int) -> None:
        request = self._requests.get(number)
        if request is not None and request.task is not None:
            request.task.cancel()
        elif number in self._calls:
            self._calls[number].cancel()

    def _abort(self, number: int) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        request.is_aborted = True  # the request has not begun, and its id may be that of another process' request
        if request.has_begun:
            self._engine.abort(request.request_id)

    def _begun(self, request: _Request) -> None:
        """Note that the engine has it, unless it was refused, and end it if that was asked for meanwhile."""
        if request.has_failed:
            return
        request.has_begun = True
        if request.is_aborted:
            self._engine.abort(request.request_id)

    async def _answer(
        self, number: int, request: _Request, method: str, prompt: Any, params: dict[str, Any], options: dict[str, Any]
    ) -> None:
        try:
            given = params_from_wire(params)
            if method == "generate":
                asyncio.get_running_loop().call_soon(self._begun, request)  # the next line hands it over at once
                whole = await self._engine.generate(prompt, given, **options)
                self._send_end(number, whole, whole.choices)
                return
            begin: Any = self._engine.stream_chat if method == "chat" else self._engine.stream
            stream = begin(prompt, given, **options)
            self._begun(request)
            await self._send_all(number, request, stream)
        except Exception as error:
            request.has_failed = True
            self._fail(number, error)

    async def _send_all(self, number: int, request: _Request, stream: ChatStream | TokenStream) -> None:
        is_all_sent = False
        async with stream:
            while await request.may_read():
                items: list[Any] = await stream.read()
                if not items:
                    is_all_sent = True
                    break
                usage = stream.usage
                counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
                reasons = stream.finish_reasons
                ends = (reasons, stream.stop_reasons) if any(reasons) else None
                is_chat = not isinstance(items[0], tuple)  # a Token is one as it is
                self.link.send("read", number, [*map(delta_to_wire, items)] if is_chat else items, counts, ends)
            whole = await stream.wait()
        # The client has made its choices of the tokens; of deltas it can't.
        is_known = is_all_sent and type(whole) is Completion
        self._send_end(number, replace(whole, choices=()) if is_known else whole, whole.choices)

    def _send_end(self, number: int, whole: Completion, choices: Sequence[Choice]) -> None:
        ends = [choice.finish_reason for choice in choices], [choice.stop_reason for choice in choices]
        if not self._engine.statistics().num_running:  # who looks after the last answer sees that nothing runs
            self._served.tell()
        self.link.send("done", number, to_wire(whole), ends)

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, AEngineError):
            logger.error("a request of another process failed", exc_info=error)
            error = InternalError(f"{type(error).__name__}: {error}")
        self.link.send("failed", number, error_to_wire(error))

    # -- calls

    def _call(self, number: int, method: str, args: list[Any]) -> None:
        self._calls[number] = task = self._spawn(self._answer_call(number, method, args))
        task.add_done_callback(lambda task: self._calls.pop(number))

    async def _answer_call(self, number: int, method: str, args: list[Any]) -> None:
        try:
            if method == "hello":
                value: Any = await self._served.hello()
                self.wants_news = True
            elif method in _ADMIN and not self._served.admin:
                raise InvalidRequestError(
                    f"{method}() is refused: the engine's process serves requests only. serve_engine(..., admin=True) "
                    f"there allows it, as what changes the engine for all its processes"
                )
            elif method == "collective_rpc":
                name, given, timeout = args
                value = await self._engine.collective_rpc(name, *given, timeout=timeout)
            elif method == "add_lora":
                name, source, replaces, is_memory = args
                await self._engine.add_lora(name, LoraMemory.open(source) if is_memory else source, replace=replaces)
                value = None
            elif method == "end_pause":  # this process' own drain is not another's to end
                if self._engine.state == "paused":
                    await self._engine.resume()
                value = None
            elif method in _ADMIN or method in _CALLS:
                value = await getattr(self._engine, method)(*args)
                if method.endswith("_weight_update"):
                    self._updates = method == "start_weight_update"
            elif method == "hold_awake":
                await self._hold_awake(*args)
                value = None
            elif method == "pool":
                value = pooled_to_wire(await self._engine.pool(pooling_from_wire(args[0])))
            elif method == "ask_tokenizer" and args[0] in CALLS:
                name, given, options = args
                value = await getattr(self._engine.async_tokenizer, name)(*given, **options)
            else:
                raise EngineClosedError(f"the engine's process has no {method}")
            if method in _ADMIN:
                self._served.tell()  # the state that the call has left, before its result
            self.link.send("result", number, value)
        except Exception as error:
            self._fail(number, error)
