"""`AsyncLLM`: the engine as a user holds it.

    async with AsyncLLM("smollm2-135m") as engine:
        async for tok in engine.stream("The capital of France is"):
            print(tok.text, end="")

An `AsyncLLM` belongs to the event loop on which it was started, and to no other at the same time. It can be started
again, on any loop, after `aclose` or after its loop was closed. With ``own_thread=True`` it belongs to none: see
`own_thread.py`.
"""

# large on purpose: the docstrings of the public methods are here.

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .config import EngineConfig, StartupProgress
from .errors import EngineClosedError, InvalidRequestError
from .params import SamplingParams, unknown_name
from .settings import ENGINE_SETTINGS, described

if TYPE_CHECKING:
    from typing import Self, Unpack

    from .engine.core import EngineCore
    from .engine.executor import Executor
    from .engine.tokenizer_view import TokenizerView
    from .engine.user_request import Call
    from .outputs import Completion
    from .settings import Settings
    from .streams.chat_stream import ChatStream
    from .streams.token_stream import TokenStream
    from .structured.asked_type import OnUnsupported
    from .telemetry.metrics import Statistics
    from .tokenizer.prompt import Prompt

__all__ = ["AsyncLLM"]

logger = logging.getLogger("aengine")

_START_PROFILE_SECONDS = 60.0  # torch prepares CUDA's profiling interface the first time
_STOP_PROFILE_SECONDS = 600.0  # of a long recording some GB of JSON are written


class AsyncLLM:
    """An LLM engine inside an asyncio application.

    Args:
        model: an embedded default ("smollm2-135m"), a folder with a checkpoint, a .gguf file, or a hub id; or an
            `EngineConfig`.
        config: settings by name, as listed below; with an `EngineConfig`, in place of its own.

    Raises:
        InvalidRequestError: an unknown setting, or a wrong value; ``param`` names it.

    Nothing is loaded before `start`, which ``async with`` calls.
    """

    def __init__(self, model: str | EngineConfig, **config: Unpack[Settings]) -> None:
        self.config = EngineConfig.create(model, config)
        self._core: EngineCore | None = None
        self._starting: asyncio.Task[None] | None = None
        self._num_starters = 0  # callers that wait for it
        self._has_starter = False  # one of them was told that it runs
        self._pid: int | None = None  # of the process that has started it
        if self.config.own_thread:
            from .own_thread import give_own_thread

            give_own_thread(self)

    def __repr__(self) -> str:
        return f"<AsyncLLM {self.config.model} {self.state}>"

    @property
    def state(self) -> str:
        """ "new", "starting", "running", "draining", "failed" or "closed"; in a fork of its process "closed"."""
        if self._is_foreign:
            return "closed"
        if self._starting is not None and not self._starting.done():
            return "starting"
        if self._core is None:
            return "new"
        return self._core.state

    # -- life

    async def start(self) -> Self:
        """Find the model, start the worker, and wait until it can serve. Idempotent while running.

        Raises:
            ModelLoadError: the model can't be found, read or fitted; the message says what helps.
            WorkerDiedError: the worker died while it started.
            EngineClosedError: the engine runs on another event loop or in the process that forked this one, was closed
                meanwhile, drains (see `resume`), or is being closed: then it can be started again once `aclose` has
                returned.
            InvalidRequestError: no asyncio event loop runs here.
            EngineError: the machine lacks something that an engine needs, as /dev/shm; the message says what helps.
        """
        from .threads.loop_ownership import foreign_process, other_loop, running_loop

        loop = running_loop()
        if self._is_foreign:
            raise foreign_process(self._pid or 0)
        self._pid = os.getpid()
        core = self._core
        if core is not None and not core.loop.is_closed():
            if core.is_closing:
                raise EngineClosedError(f"{self!r} is being closed: it can be started again once aclose() has returned")
            if core.is_alive:
                if core.loop is not loop:
                    raise other_loop(self, is_closed=False)
                core.check_accepts()
                self._has_starter = True
                return self
        if core is not None:
            core.abandon()  # of a failed engine, or of a loop that was closed: nothing of it must live on
            self._core = None
        if self._starting is None or self._starting.done() or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self._begin(), name="aengine-start")
            self._num_starters, self._has_starter = 0, False
        await self._wait_started(self._starting)
        return self

    async def _begin(self) -> None:
        from .threads.pools import run_in_thread

        await run_in_thread("import", import_module, "aengine.engine.core")  # 0.1 s, of which the loop sees little
        self._core = await self._core_class().start(self.config, self._report, self._make_executor)

    def _core_class(self) -> type[EngineCore]:
        from .engine.core import EngineCore

        return EngineCore

    async def _wait_started(self, starting: asyncio.Task[None]) -> None:
        """One of perhaps several callers of `start`: only when the last one is cancelled, so is the start."""
        self._num_starters += 1
        try:
            await asyncio.shield(starting)
            self._has_starter = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if starting.cancelled() and not (task is not None and task.cancelling()):
                raise EngineClosedError(f"{self!r} was closed while it started") from None
            if self._num_starters == 1:
                await _cancel(starting)
                await self._undo_start()
            raise
        finally:
            self._num_starters -= 1

    async def _undo_start(self) -> None:
        """It came up in the same turn of the loop in which its last caller was cancelled: nobody will close it."""
        core = self._core
        if core is None or core.state != "running" or self._has_starter:
            return
        self._core = None
        try:
            await core.aclose(drain=0.0)
        finally:
            core.abandon()  # if that was cancelled, too

    async def aclose(self, *, drain: float = 0.0) -> None:
        """Close: free the worker, its memory, and everything else. Bounded and idempotent.

        Args:
            drain: seconds that running requests may take to end by themselves. Those that still run then end with
                EngineClosedError, whose ``completion`` is what had come. See `drain`; new ones are refused from the
                start of the call.

        Of several calls at once the first whose time is over closes. Cancelling one is `terminate`.
        """
        drain = _seconds("drain", drain)
        if self._is_foreign:
            return
        if self._starting is not None and not self._starting.done():
            await _cancel(self._starting)
        if self._core is not None:
            await self._core.aclose(drain=drain)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests, and wait for the running ones to end, a dead worker's replacement included.

        Args:
            timeout: seconds to wait at most; None: for as long as it takes.

        Returns whether all requests have ended. ``state`` is then "draining" until `aclose` or `resume`: new requests
        are refused with EngineClosedError, everything else works. After `abort_all` it returns at once.

        Raises:
            EngineClosedError: the engine is not running.
        """
        return await self._running_core().drain(None if timeout is None else _seconds("timeout", timeout))

    async def resume(self) -> None:
        """Take new requests again after `drain`; who waits there is told False if any still run.

        Raises:
            EngineClosedError: the engine is not running, or is being closed.
        """
        self._running_core().resume()

    def terminate(self) -> None:
        """Kill the worker at once. For when nothing can be awaited; `aclose` is the polite way."""
        if self._core is not None and not self._is_foreign:
            self._core.abandon()

    @property
    def _is_foreign(self) -> bool:
        """Whether this is a fork of the process in which it runs: nothing of it may be touched here."""
        if self._pid is None or self._pid == os.getpid():
            return False
        is_starting = self._starting is not None and not self._starting.done()
        return is_starting or (self._core is not None and self._core.is_alive)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and core.is_alive and not self._is_foreign:
            warnings.warn(f"{self!r} was dropped without aclose()", ResourceWarning, source=self, stacklevel=2)
            core.abandon()

    # -- requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        on_unsupported: OnUnsupported = "error",
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """Begin a request and return its tokens as they come.

        Args:
            prompt: a text, token ids, or chat messages (``[{"role": "user", "content": "..."}]``), which are put
                through the model's chat template.
            params: how to sample and when to stop.
            output_type: a pydantic model, or any type that pydantic can describe. The text will be its JSON;
                ``stream.partial`` is what it says so far, ``completion.parsed`` the value.
            on_unsupported: what becomes of a keyword of its schema that can't be enforced: a GrammarError, or with
                "relax" a warning on the completion. The value is validated in any case.
            deadline: seconds from now by which the whole completion must be there.
            first_token_deadline: seconds from now by which its first token must be there (of n completions: of any);
                it has no say after that.
            priority: lower is served earlier; equal ones in order of arrival.
            request_id: a name of yours for `abort` and for logs; must not be in use.
            cache_salt: prefix KV is shared only among requests of equal salt, so that tenants can't
                find out about each other's prompts by timing.

        Raises (here, or from the stream):
            InvalidRequestError: something about the prompt or a parameter is wrong.
            ContextLengthError: the prompt is longer than the context.
            GrammarError: structured_output or output_type can't be used; its kind and path say why and where.
            EngineOverloadedError: the queue is full (with admission="error").
            DeadlineExceededError: from the stream, when one of the deadlines has passed.
            EngineClosedError: the engine was not started, drains, or is closed.
            WorkerDiedError, InternalError: from the stream, when the engine failed.
        """
        return self._submit(
            prompt,
            params,
            output_type=output_type,
            on_unsupported=on_unsupported,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            priority=priority,
            request_id=request_id,
            cache_salt=cache_salt,
            final_only=False,
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        on_unsupported: OnUnsupported = "error",
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Completion:
        """The whole completion at once; cheaper than `stream` when nobody watches. Arguments and errors as there.

        Cancelling the task that awaits it aborts the request.
        """
        stream = self._submit(
            prompt,
            params,
            output_type=output_type,
            on_unsupported=on_unsupported,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            priority=priority,
            request_id=request_id,
            cache_salt=cache_salt,
            final_only=True,
        )
        return await stream.wait()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        output_type: Any = None,
        on_unsupported: OnUnsupported = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> Completion:
        """The answer to chat messages, whole. Arguments and errors as of `stream_chat`.

        ``completion.message`` has its content, reasoning and tool calls; ``completion.parsed`` the value of an
        ``output_type``, if the answer was one.
        """
        stream = await self.stream_chat(
            messages,
            params,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            output_type=output_type,
            on_unsupported=on_unsupported,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
        async with stream:
            return await stream.wait()

    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        output_type: Any = None,
        on_unsupported: OnUnsupported = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> ChatStream:
        """Begin to answer chat messages, with tools and a shape for the answer in one grammar, after reasoning.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, also with role "tool" and "tool_calls" as OpenAI's.
            tools: Python functions, OpenAI's dicts, or `aengine.chat.Tool`.
            tool_choice: "none", "auto" (the default), "required", a tool's name, a list of names (at least one call
                of these), or a dict as OpenAI's; see `aengine.chat.ToolChoice`.
            parallel_tool_calls: several calls in one answer. None: as the model's chat template allows.
            output_type: as of `stream`; the answer is JSON of it, unless tools are called. Or give another shape in
                ``params.structured_output``: a JSON schema, a regex, a choice.
            on_unsupported: of the tools' schemas and the answer's: "error", or "relax" as in `StructuredOutput`.
            chat_template_kwargs: variables of the model's chat template, such as ``{"enable_thinking": False}``.
            add_generation_prompt: end the prompt with the beginning of an answer. None: yes, unless the next is True.
            continue_final_message: the last message, an assistant's, is the beginning of the answer; the completion
                is what follows it.
            options: deadline, first_token_deadline, priority, request_id, cache_salt, as of `stream`. The deadlines
                count from this call, and what it takes to prepare the chat counts too.

        Raises (here, or from the stream):
            InvalidRequestError: as of `stream`; also for tools and tool_choice.
            GrammarError: a tool's parameters or the type can't be held; it names which.
            DeadlineExceededError: as of `stream`; also here.
        """
        from .chat.plan import ChatRequest, plan_within
        from .streams.chat_stream import ChatStream

        core = self._running_core()
        core.check_accepts()
        params = SamplingParams() if params is None else params
        asked = ChatRequest.of(
            params,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            output_type=output_type,
            on_unsupported=on_unsupported,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        tokenizer, grammars = core.tokenizer, core.grammars
        if tokenizer is None or grammars is None:
            raise InvalidRequestError("a chat needs a tokenizer: start without skip_tokenizer=True", param="messages")
        settings = _all(options)
        core.admission.check_options(params, **settings)
        begun = core.loop.time()
        with core.admission.reserved(settings["request_id"]) as reservation:
            plan = await plan_within(settings["deadline"], settings["first_token_deadline"], grammars, tokenizer, asked)
        core = self._running_core()
        params = params.replace(structured_output=None)  # the plan has it
        call = core.admission.submit(
            plan.prompt,
            params,
            final_only=False,
            constraint=plan.spec,
            since=begun,
            markers=plan.marker_ids,
            **settings,
        )
        if reservation.is_aborted:
            core.admission.abort(call.request_id)
        return ChatStream(self._stream_of(core, call), plan, tokenizer, params)

    def abort(self, request_id: str) -> bool:
        """End a request by its id; its stream ends with FinishReason.ABORT. Returns whether it was running."""
        return self._running_core().admission.abort(request_id)

    def abort_all(self) -> int:
        """End all requests; their streams end with FinishReason.ABORT. Returns how many there were."""
        return self._running_core().admission.abort_all()

    def statistics(self) -> Statistics:
        """The engine's counters at this moment."""
        return self._running_core().statistics()

    def describe(self) -> dict[str, Any]:
        """What runs: vocab_size, max_model_len, num_blocks, block_size, device, dtype, weight_format, pid, ...;
        ``sampling_defaults``: what the checkpoint's generation_config.json says for requests that don't."""
        core = self._running_core()
        return core.ready | {"sampling_defaults": dict(core.sampling.values)}

    async def check_health(self, timeout: float = 10.0) -> float:
        """Ask the worker, through everything that a request's steps go through; it answers once it has launched the
        steps before. Returns the seconds that it took.

        Raises:
            InvalidRequestError: ``timeout`` is no number of seconds above 0.
            EngineClosedError: the engine is not running, or it has failed.
            WorkerDiedError: the worker has died and is being started again; requests wait, and will go on.
            InternalError: no answer within ``timeout`` seconds. The engine acts on that by itself, if it has to.
        """
        if not _seconds("timeout", timeout):
            raise InvalidRequestError("timeout must be a number of seconds above 0", param="timeout")
        return await self._running_core().check_health(timeout)

    async def start_profile(self, folder: str | os.PathLike[str] | None = None) -> str:
        """Record what the worker and its GPU do, until `stop_profile`. For seconds, not minutes: all is kept in memory.

        Args:
            folder: where the trace will be; made if need be. None: a new temporary folder.

        Returns the folder's path.

        Raises:
            InvalidRequestError: a profile is being recorded already, or the folder can't be written to.
        """
        from .threads.pools import run_in_thread

        core = self._running_core()
        if folder is not None:
            if not isinstance(folder, str | os.PathLike) or not _is_text(os.fspath(folder)):
                raise InvalidRequestError(f"folder={folder!r} is not valid: it must be a path, or None", param="folder")
            folder = await run_in_thread("abspath", os.path.abspath, folder)  # the worker's own place may be another
        return _path_of(await core.long_call("start_profile", folder, timeout=_START_PROFILE_SECONDS))

    async def stop_profile(self) -> str:
        """End the recording and write it: a gzipped Chrome trace, for ui.perfetto.dev. Returns the file's path.

        The worker does nothing else meanwhile, for up to a minute after a long recording: requests wait.

        Raises:
            InvalidRequestError: no profile is being recorded.
        """
        return _path_of(await self._running_core().long_call("stop_profile", timeout=_STOP_PROFILE_SECONDS))

    @property
    def tokenizer(self) -> TokenizerView:
        """The model's tokenizer: encode, decode, count, render. Raises InvalidRequestError with skip_tokenizer=True."""
        from .engine.tokenizer_view import TokenizerView

        return TokenizerView(self._open_core().tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given as a prompt."""
        tokenizer = self._running_core().tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    # -- internals

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, *, final_only: bool, **options: Any
    ) -> TokenStream:
        from .structured.asked_type import with_output_type

        core = self._running_core()
        core.check_accepts()
        params, shape = with_output_type(params, options)
        call = core.admission.submit(prompt, params, final_only=final_only, **shape, **options)
        return self._stream_of(core, call)

    def _stream_of(self, core: EngineCore, call: Call) -> TokenStream:
        from .streams.token_stream import TokenStream

        return TokenStream(call.request_id, call.mailbox, core.loop, core.admission.abort)

    def _open_core(self) -> EngineCore:
        core = self._core
        if self._is_foreign:
            from .threads.loop_ownership import foreign_process

            raise foreign_process(self._pid or 0)
        if core is None:
            raise EngineClosedError(
                f"{self!r} was not started: use `async with AsyncLLM(...) as engine`, or `await engine.start()`"
            )
        if not core.is_alive:
            if core.failure is not None:
                raise EngineClosedError(f"{self!r} failed: {core.failure}") from core.failure
            raise EngineClosedError(f"{self!r} is closed: `await engine.start()` starts it again")
        return core

    def _running_core(self) -> EngineCore:
        """The core, for what may be done on its loop only."""
        core = self._open_core()
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not core.loop:
            from .threads.loop_ownership import other_loop

            if core.loop.is_closed():
                core.abandon()
            raise other_loop(self, is_closed=core.loop.is_closed())
        return core

    def _make_executor(self, config: EngineConfig) -> Executor:
        """The seam for tests and for executors of other kinds."""
        from .engine.executor import ProcessExecutor

        return ProcessExecutor(config)

    def _report(self, progress: StartupProgress) -> None:
        logger.debug("%s: %s", self.config.model, progress)
        if self.config.progress is not None:
            self.config.progress(progress)


AsyncLLM.__doc__ = described(AsyncLLM.__doc__, ENGINE_SETTINGS)


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel and wait for the end; what it raises instead is of no interest to anybody any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _seconds(name: str, value: object) -> float:
    """Raises InvalidRequestError for what an event loop's timer can't be set to."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e8:
        raise InvalidRequestError(f"{name} must be a number of seconds, at least 0 and at most 1e8", param=name)
    return float(value)


def _is_text(path: object) -> bool:
    """Whether it can be told to a worker: a path of bytes that are not UTF-8 can't."""
    return isinstance(path, str) and path == path.encode(errors="ignore").decode()


def _path_of(reply: dict[str, str]) -> str:
    if "refused" in reply:
        raise InvalidRequestError(reply["refused"])
    return reply["path"]


_OPTIONS = {"deadline": None, "first_token_deadline": None, "priority": 0, "request_id": None, "cache_salt": None}


def _all(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            raise InvalidRequestError(unknown_name(name, set(_OPTIONS)), param=name)
    return _OPTIONS | options
