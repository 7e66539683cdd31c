"""The way in and the way out of the engine: validate, count, encode, admit; abort, time out, retire.

    stream() -> Call: held (queue full, admission="wait") -> its grammar is compiled, if it has one (compile pool)
                                                          -> encoding (tokenizer thread) -> in the scheduler -> gone

A `Call` is one user call, with one scheduler `Request` for each of its n completions. It is registered before anything
is awaited, so an abort finds it in every phase. It is forgotten when its last completion has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..errors import (
    AEngineError,
    DeadlineExceededError,
    EngineOverloadedError,
    GrammarError,
    InternalError,
    InvalidRequestError,
)
from ..outputs import FinishReason
from ..params import SamplingParams, StructuredOutput
from ..scheduler.request import CacheKey, Request, RequestStatus
from ..streams.token_stream import ChoiceOutput, IncrementalText, Mailbox, error_for_waiter
from ..structured.asked_type import AskedType
from ..structured.bitmasks import RequestGrammar
from ..structured.service import GrammarService
from ..telemetry.metrics import Counters
from ..telemetry.observer import Observer
from ..threads.pools import Lane
from ..tokenizer.prompt import Prompt, check_token_ids, encode_prompt, is_long, prompt_kind
from ..tokenizer.tokenizer import Tokenizer
from .request_checks import check_call
from .reservations import Reservation, Reservations
from .step_loop import StepLoop
from .unread import UnreadWatch
from .user_request import Call, Limits

if TYPE_CHECKING:
    from ..chat.plan import ChatRequest
    from ..structured.output_type import OutputType
    from ..structured.spec import GrammarSpec

__all__ = ["Admission"]


class Admission:
    """Registers calls and brings them to the step loop. Lives on the engine's event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tokenizer: Tokenizer | None,
        limits: Limits,
        counters: Counters,
        observer: Observer,
        grammars: GrammarService | None = None,
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._has_tokenizer = tokenizer is not None  # stays when it is dropped
        self._grammars = grammars
        self._limits = limits
        self._counters = counters
        self._observer = observer
        self._calls: dict[str, Call] = {}
        self._held: list[Call] = []  # the most urgent first; of equals, the first that came
        self._num_encoding = 0
        self._random = random.Random()  # of our own: the host's global one is not touched
        self._lane = Lane("tokenizer")
        self._long_lane = Lane("tokenizer-long")  # for texts that would hold up others
        self._started = time.monotonic()
        self._next_id = 0
        self._reservations = Reservations(self._reservation_ended)
        self._unread = UnreadWatch(loop, limits.unread_timeout, self._calls, self._fail)
        self.on_empty: Callable[[], None] = lambda: None  # called when the last call has ended
        self.steps: StepLoop  # set by the engine, which makes both

    @property
    def num_queued(self) -> int:
        """Requests that have no row on the worker yet, in whatever phase."""
        return len(self._held) + len(self._reservations) + self._num_encoding + self.steps.num_waiting

    @property
    def is_empty(self) -> bool:
        """Whether every call has ended, those included that are being prepared."""
        return not self._calls and not self._reservations

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        deadline: float | None,
        first_token_deadline: float | None,
        priority: int,
        request_id: str | None,
        cache_salt: str | None,
        final_only: bool,
        constraint: GrammarSpec | None = None,
        output_type: OutputType | None = None,
        asked_type: AskedType | None = None,
        since: float | None = None,
        markers: frozenset[int] = frozenset(),
        chat: ChatRequest | None = None,
    ) -> Call:
        """Check what can be checked at once, and register. Nothing is awaited here.

        ``output_type``: what ``params.structured_output`` says, as a type; ``asked_type``: one that is yet to be
        described, which may take too long for the loop. ``since``: the loop's time from which both deadlines count;
        None: now. ``markers``: control tokens that divide the text into parts, see `MarkedDetokenizer`.

        Raises:
            InvalidRequestError, ContextLengthError: see `stream`.
            EngineOverloadedError: the queue is full and admission is "error".
        """
        kind = prompt_kind(prompt)
        limits = (deadline, first_token_deadline, priority, request_id, cache_salt)
        check_call(self._limits, self._has_tokenizer, kind, params, *limits)
        params = self._limits.sampling.applied(params)
        if request_id is None:
            self._next_id += 1
            request_id = f"req-{self._next_id}"
        elif request_id in self._calls:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a running request", param="request_id")
        seconds_ago = 0.0 if since is None else self._loop.time() - since
        call = Call(
            request_id=request_id,
            prompt=prompt,
            kind=kind,
            params=params,
            priority=priority,
            cache_salt=(cache_salt or "").encode(),
            arrival_time=self._loop.time(),
            mailbox=Mailbox(final_only=final_only, times=self._observer.new_times(seconds_ago)),
            constraint=constraint or params.structured_output,
            asked_type=asked_type,
            chat=chat,
        )
        call.mailbox.output_type = output_type
        call.mailbox.is_json = asked_type is not None or _is_json(params.structured_output)
        want_logprobs = params.logprobs is not None
        call.mailbox.open(
            [ChoiceOutput(call.mailbox, i, self._detokenizer(params, markers), want_logprobs) for i in range(params.n)]
        )
        full = self.num_queued >= self._limits.max_num_queued_requests
        self.check_room()
        if kind == "token_ids":
            self._check_ids(call)
        self._calls[request_id] = call
        self._counters.num_requests += 1
        self._observer.note_queued(call)
        since = call.arrival_time if since is None else since
        # The second one only looks, when it is due, whether a token has come: delivering one costs nothing more.
        for seconds, expire in ((deadline, self._expire), (first_token_deadline, self._expire_unless_begun)):
            if seconds is not None:
                call.timers += (self._loop.call_at(since + seconds, expire, call, float(seconds)),)
        if not final_only:
            self._unread.begin()
        if full:
            insort(self._held, call, key=attrgetter("priority"))
        else:
            self._begin(call)
        return call

    # For another thread than the loop's, ahead of `submit`.

    def has(self, request_id: str) -> bool:
        """Whether such a call is under way."""
        return request_id in self._calls or self._reservations.has(request_id)

    def count(self, others: set[str]) -> int:
        """How many calls are under way, those of the ids ``others`` included."""
        return len({*self._calls, *others}) + len(self._reservations)

    def check_room(self, num_coming: int = 0) -> None:
        """Raises EngineOverloadedError when the queue is full, or will be with so many more, and callers don't wait."""
        full = self.num_queued + num_coming >= self._limits.max_num_queued_requests
        if full and not self._limits.wait_when_full:
            self._counters.num_rejected += 1
            raise self._overloaded()

    def check(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Prompt:
        """Raises what `submit` would of the call by itself. Returns the prompt, no longer the caller's to change."""
        kind = prompt_kind(prompt)
        check_call(self._limits, self._has_tokenizer, kind, params, **options)
        if kind == "token_ids":
            return check_token_ids(prompt, self._limits.vocab_size, self._limits.max_model_len)  # type: ignore[arg-type]
        return prompt if kind == "text" else list(prompt)  # type: ignore[return-value]

    def abort(self, request_id: str) -> bool:
        """End a call in whatever phase it is. Returns whether there was one. Idempotent."""
        call = self._calls.get(request_id) if isinstance(request_id, str) else None
        if call is None:
            return isinstance(request_id, str) and self._reservations.abort(request_id)
        self._counters.num_aborted += 1
        self._end(call, FinishReason.ABORT, None)
        return True

    def abort_all(self) -> int:
        """End every call, in whatever phase it is. Returns how many there were."""
        ids = list(self._calls)
        for request_id in ids:
            self.abort(request_id)
        return len(ids) + self._reservations.abort_all()

    def on_request_end(self, request: Request) -> None:
        """The step loop's word that one request has left the scheduler."""
        call = self._calls.get(request.request_id)
        if call is None:
            return
        mailbox = call.mailbox
        if mailbox.error is not None:
            self._counters.num_failed += 1
            self._end(call, FinishReason.ERROR, None)
            return
        if request.index == 0:
            mailbox.cached_tokens = request.num_cached_tokens
        call.num_left -= 1
        if call.num_left == 0:
            self._counters.num_finished += 1
            self._retire(call)
            self._observer.note_end(call)

    def on_scheduled(self) -> None:
        """The queue may have room again for those held back."""
        while self._held and self.num_queued - len(self._held) < self._limits.max_num_queued_requests:
            call = self._held.pop(0)
            if call.request_id in self._calls:
                self._begin(call)

    def _let_in_soon(self) -> None:
        """Not every place in the queue is left by way of a step."""
        if self._held:
            self._loop.call_soon(self.on_scheduled)

    def fail_all(self, error: AEngineError) -> None:
        """Every call ends with its own copy of the error."""
        self._unread.stop()
        self._held.clear()
        for call in list(self._calls.values()):
            if call.request_id not in self._calls:  # its caller was told of another's end, and ended it
                continue
            self._counters.num_failed += 1
            call.mailbox.fail(error_for_waiter(error))
            self._retire(call)
            self._observer.note_end(call)

    def close(self) -> tuple[Lane, ...]:
        """No more prompts are encoded. Returns the lanes, whose threads may be waited for. From any thread."""
        lanes = self._lane, self._long_lane
        for lane in lanes:
            lane.close()
        return lanes

    def drop_tables(self) -> None:
        """Free the tokenizer and the grammars, after `fail_all` and `close`: streams that are kept hold the rest."""
        self._tokenizer = self._grammars = None

    # -- the way in

    def _begin(self, call: Call) -> None:
        if call.constraint is not None or call.asked_type is not None:
            self._num_encoding += 1  # from now on, not from when the task runs: the queue's limit counts it
            call.preparing = self._loop.create_task(self._prepare(call), name="aengine-grammar")
            call.preparing.add_done_callback(self._prepared)
        elif call.kind == "token_ids":
            self._enqueue(call)
        else:
            self._encode(call)

    async def _prepare(self, call: Call) -> None:
        """Its grammar first, so that a prompt is not encoded for a request that is refused."""
        try:
            if self._grammars is None:
                raise GrammarError("a grammar needs a tokenizer: start without skip_tokenizer=True", kind="unsupported")
            if call.asked_type is not None:
                call.mailbox.output_type, call.constraint = await self._grammars.run(call.asked_type.described)
                call.asked_type = None
            assert call.constraint is not None
            call.compiled = await self._grammars.prepare(call.constraint)
        except AEngineError as ours:
            self._fail(call, ours)
            return
        except Exception as bug:
            failure = InternalError(f"the grammar could not be prepared: {bug!r}")
            failure.__cause__ = bug
            self._fail(call, failure)
            return
        call.preparing = None
        call.mailbox.warnings = call.compiled.warnings
        if self._calls.get(call.request_id) is call:
            if call.kind == "token_ids":
                self._enqueue(call)
            else:
                self._encode(call)

    def _prepared(self, task: asyncio.Task[None]) -> None:
        self._num_encoding -= 1
        self._let_in_soon()

    @contextmanager
    def reserved(self, request_id: str | None) -> Iterator[Reservation]:
        """Within: a call that is not made yet counts as queued. Raises EngineOverloadedError when the queue is full."""
        self.check_room()
        with self._reservations.hold(request_id) as reservation:
            yield reservation

    def _reservation_ended(self) -> None:
        self._let_in_soon()
        if self.is_empty:
            self.on_empty()

    def check_options(
        self,
        params: SamplingParams,
        *,
        deadline: float | None,
        first_token_deadline: float | None,
        priority: int,
        request_id: str | None,
        cache_salt: str | None,
    ) -> None:
        """What `submit` would refuse of a call whose prompt is not known yet. Raises InvalidRequestError."""
        limits = (deadline, first_token_deadline, priority, request_id, cache_salt)
        check_call(self._limits, self._has_tokenizer, "messages", params, *limits)
        if request_id in self._calls:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a running request", param="request_id")

    def _encode(self, call: Call) -> None:
        assert self._tokenizer is not None and call.prompt is not None
        try:
            lane = self._long_lane if is_long(call.prompt, call.kind) else self._lane
            encoding = lane.run(encode_prompt, call.prompt, call.kind, self._tokenizer, self._limits.max_model_len)
        except AEngineError as error:  # no thread is to be had
            self._fail(call, error)
            return
        self._num_encoding += 1
        encoding.add_done_callback(partial(self._encoded, call))

    def _encoded(self, call: Call, future: asyncio.Future[list[int]]) -> None:
        self._num_encoding -= 1
        self._let_in_soon()
        if future.cancelled():
            return
        error = future.exception()
        if self._calls.get(call.request_id) is not call:  # ended meanwhile; another may have its id
            return
        try:
            if error is not None:
                raise error
            call.prompt = future.result()
            self._check_ids(call)
        except AEngineError as ours:
            self._fail(call, ours)
        except Exception as bug:
            failure = InternalError(f"the prompt could not be encoded: {bug!r}")
            failure.__cause__ = bug
            self._fail(call, failure)
        else:
            self._enqueue(call)

    def _check_ids(self, call: Call) -> None:
        call.prompt = check_token_ids(call.prompt, self._limits.vocab_size, self._limits.max_model_len)  # type: ignore[arg-type]

    def _enqueue(self, call: Call) -> None:
        params, limits = call.params, self._limits
        ids: list[int] = call.prompt  # type: ignore[assignment]
        call.prompt = None  # the requests hold it now
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or call.compiled is not None:  # past its end a grammar allows nothing else
            stop_ids |= limits.eos_token_ids
        room = limits.max_model_len - len(ids)
        max_num_tokens = len(ids) + (room if params.max_tokens is None else min(room, params.max_tokens))
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        call.mailbox.num_prompt_tokens = len(ids)
        call.requests = [
            Request(
                call.request_id,
                ids,
                params,
                seed=_nth_seed(seed, i),
                max_num_tokens=max_num_tokens,
                stop_token_ids=stop_ids,
                index=i,
                priority=call.priority,
                arrival_time=call.arrival_time,
                cache_key=CacheKey(call.cache_salt),
                sink=output,
                grammar=None if call.compiled is None else RequestGrammar(call.compiled),
            )
            for i, output in enumerate(call.mailbox.choices)
        ]
        call.num_left = params.n
        self._counters.prompt_tokens += len(ids)
        for request in call.requests:
            self.steps.add(request)

    def _detokenizer(self, params: SamplingParams, markers: frozenset[int]) -> IncrementalText | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return self._tokenizer.detokenizer(
            params.stop,  # type: ignore[arg-type]  # made a tuple by SamplingParams
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            markers=markers,
        )

    def _overloaded(self) -> EngineOverloadedError:
        elapsed = time.monotonic() - self._started
        rate = self._counters.num_finished / elapsed if elapsed > 0 else 0.0
        retry_after = min(60.0, max(0.1, 1.0 / rate)) if rate else 1.0
        limit = self._limits.max_num_queued_requests
        return EngineOverloadedError(
            f"{self.num_queued} requests are waiting, and max_num_queued_requests is {limit}: try again in about "
            f"{retry_after:.1f} s, raise the limit, or start the engine with admission='wait'",
            retry_after=retry_after,
        )

    # -- the way out

    def _expire(self, call: Call, deadline: float) -> None:
        done = sum(len(choice.token_ids) for choice in call.mailbox.choices)
        error = DeadlineExceededError(
            f"request {call.request_id} did not end within its deadline of {deadline:g} s "
            f"({done} tokens were generated)",
            deadline=deadline,
        )
        self._fail(call, error)

    def _expire_unless_begun(self, call: Call, limit: float) -> None:
        if not any(choice.token_ids for choice in call.mailbox.choices):
            text = f"request {call.request_id}: no token within first_token_deadline={limit:g} s ({self._phase(call)})"
            self._fail(call, DeadlineExceededError(text, deadline=limit))

    def _phase(self, call: Call) -> str:
        """Where a call is that has no token yet."""
        if call in self._held:
            return "the request waited for a place in the queue"
        if not call.requests:
            return "its prompt was being encoded" if call.preparing is None else "its grammar was being prepared"
        first = call.requests[0]
        if first.status in (RequestStatus.NEW, RequestStatus.WAITING, RequestStatus.HELD):
            return "the request was still queued"
        num_begun = min(first.num_computed_tokens, first.num_prompt_tokens)
        return f"{num_begun} of {first.num_prompt_tokens} prompt tokens were computed or being computed"

    def _fail(self, call: Call, error: AEngineError) -> None:
        self._counters.num_failed += 1
        self._end(call, FinishReason.ERROR, error)

    def _end(self, call: Call, reason: FinishReason, error: AEngineError | None) -> None:
        """The one place where a call ends early."""
        self._retire(call)
        if error is not None:
            call.mailbox.fail(error)
        if call in self._held:
            self._held.remove(call)
        for request in call.requests:
            self.steps.finish(request, reason)
        for choice in call.mailbox.choices:
            choice.end(reason)
        self._observer.note_end(call)

    def _retire(self, call: Call) -> None:
        self._calls.pop(call.request_id, None)
        if call.preparing is not None and call.preparing is not asyncio.current_task():
            call.preparing.cancel()
        for timer in call.timers:
            timer.cancel()
        call.timers = ()
        self._let_in_soon()
        if self.is_empty:
            self.on_empty()


def _is_json(shape: StructuredOutput | None) -> bool:
    return shape is not None and (shape.json_schema is not None or shape.json_object)


def _nth_seed(seed: int, index: int) -> int:
    """seed + index, wrapped to 64 bits with sign."""
    return (seed + index + 2**63) % 2**64 - 2**63
