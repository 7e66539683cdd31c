"""`Admission`: the one owner of a request's life, from its registration to its end.

    submit ──> HELD ──────> PLANNING ─> COMPILING ─> ENCODING ──> SCHEDULED ──> ended
               the queue    a chat      a grammar    a text       Replicas
               is full      └──────── Preparation ─────────┘      StepLoop
                  │                                                   │
                  └── AdmissionQueue: until its first step is made ───┤
                                                                      │
    abort, deadline, unread, engine's end ─> Admission ─> Mailbox <───┴─ tokens, stop, failure: through the sink

A `UserRequest` is registered before anything is awaited, so that an abort finds it in every phase. It has a scheduler
`Request` for each of its n completions, and each of these has a sink in the request's `Mailbox`. Whatever ends a
request ends its mailbox, once; the mailbox tells Admission, which alone undoes what the request still has: its place in
the queue, its timers, its preparation, its rows. Calls go one way: Admission to the replicas, and these to the sinks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial

from ..errors import AEngineError, DeadlineExceededError, EngineClosedError, InternalError, InvalidRequestError
from ..ipc.messages import NO_RESULTS, Extras
from ..outputs import FinishReason, RequestEnd
from ..params import CallOptions, SamplingParams
from ..telemetry.metrics import Counters
from ..telemetry.observer import Kind, Observer
from .admission_queue import AdmissionQueue
from .keeping.keeping import Keeping
from .preparation import Preparation
from .replicas.replicas import Replicas
from .sampling_extras import extras_of, results_from
from .scheduler.request import CacheKey, PromptTokens, Request, RequestStatus
from .sessions.said_tokens import session_of
from .streams.token_stream import Buffer, Mailbox
from .structured.bitmasks import RequestGrammar
from .structured.output_type import AskedType, OutputType
from .tenants.accounts import Accounts, num_expected
from .threads.futures import error_for_waiter
from .threads.pools import ThreadPool
from .threads.turns import acting_for
from .tokenizer.prompt import Prompt, PromptPart, TokensPart, part_of
from .tokenizer.tokenizer import Tokenizer
from .unread import UnreadWatch
from .updates.versions import WeightVersions
from .user_request import Limits, Phase, Prepared, UserRequest, check_request

_FOR_A_RESULT = SamplingParams(max_tokens=1, detokenize=False, seed=0)
_UNSCHEDULED = (RequestStatus.NEW, RequestStatus.WAITING, RequestStatus.HELD)


class Admission:
    """Registers requests, brings them to the step loop, and ends them. Lives on the engine's event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        replicas: Replicas,
        queue: AdmissionQueue,
        preparation: Preparation,
        tokenizer: Tokenizer | None,
        limits: Limits,
        counters: Counters,
        observer: Observer,
        on_queued: Callable[[UserRequest], None],
        on_ended: Callable[[], None],
        versions: WeightVersions,
        keeping: Keeping,
        accounts: Accounts,
    ) -> None:
        """``on_queued`` is called with each request that is accepted, ``on_ended`` whenever one has ended; ``versions``
        is told of each that begins, ``keeping`` of the turns of sessions; ``accounts``:
        of those who ask."""
        self._loop = loop
        self._replicas = replicas
        self._queue = queue
        self.preparation = preparation
        self._tokenizer = tokenizer
        self._has_tokenizer = tokenizer is not None  # whether there is a tokenizer; true also after `drop_tables`
        self._limits = limits
        self._counters = counters
        self._observer = observer
        self._on_queued, self._on_ended = on_queued, on_ended
        self._versions = versions
        self.keeping = keeping
        self._accounts = accounts
        self._requests: dict[str, UserRequest] = {}
        self._random = random.Random()  # draws seeds of requests without one; the host's own is left alone
        self._next_id = 0
        self._unread = UnreadWatch(loop, limits.unread_timeout, self._requests)

    @property
    def is_empty(self) -> bool:
        """Whether every request has ended, those included that were being prepared."""
        return not self._requests

    @property
    def num_preempted(self) -> int:
        """Completions that have had a row, and wait for another."""
        requests = list(self._requests.values())  # asked from other threads, too, while some come and go
        return sum(one.is_preempted for request in requests for one in request.requests)

    # -- the way in

    def submit(
        self,
        prompt: Prompt | PromptPart,
        params: SamplingParams,
        options: CallOptions,
        *,
        final_only: bool,
        output_type: OutputType | None = None,
        asked_type: AskedType | None = None,
        buffer: Buffer | None = None,
        context: Context | None = None,
    ) -> UserRequest:
        """Check what can be checked at once, and register. Nothing is awaited here.

        ``prompt``: a `ChatRequest` has the shape of its answer in it; what `check` has returned is not checked again.
        ``output_type``: what ``params.structured_output`` says, as a type; ``asked_type``: one that is yet to be
        described, which may take too long for the loop. ``buffer``: of a reader on another thread; ``context``: of the
        caller, for those who listen.

        Raises:
            InvalidRequestError, ContextLengthError: see `stream`.
            EngineOverloadedError: the queue is full and admission is "error".
        """
        part = self.check(prompt, params, options)
        request_id = options.request_id
        params = self._limits.sampling.applied(params)
        if request_id is None:
            self._next_id += 1
            request_id = f"req-{self._next_id}"
        elif request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a running request", param="request_id")
        account = self._accounts.of(options.tenant)
        self._queue.check_quota(account)
        self._queue.check_room(account)
        constraint = None if part.kind == "chat" else params.structured_output
        of_prompt = results_from(params)
        mailbox = Mailbox(
            final_only=final_only,
            num_choices=params.n,
            want_logprobs=params.logprobs is not None,
            has_results=of_prompt != NO_RESULTS,
            times=self._observer.new_times(),
            output_type=output_type,
            buffer=buffer,
            is_json=asked_type is not None or (constraint is not None and constraint.is_json),
            on_end=partial(self._ended, request_id),
        )
        self._versions.begin(mailbox)
        request = UserRequest(
            request_id=request_id,
            prompt=part,
            params=params,
            priority=options.priority,
            cache_salt=(options.cache_salt or "").encode(),
            arrival_time=self._loop.time(),
            mailbox=mailbox,
            account=account,
            constraint=constraint,
            asked_type=asked_type,
            samples=params.max_tokens != 0,
            results_from=of_prompt,
            adapter=options.adapter,
            turn=self.keeping.begin(options, request_id),
            session=session_of(options),
            num_expected=num_expected(part, params, self._limits.max_model_len),
            keep=options.keep or 0.0,
        )
        # The second timer checks for a token only when it is due, so that delivering tokens costs nothing more.
        limits = (options.deadline, self._expire), (options.first_token_deadline, self._expire_unless_begun)
        for seconds, expire in limits:
            if seconds is not None:
                timer = self._loop.call_at(request.arrival_time + seconds, expire, request, float(seconds))
                request.timers += (timer,)
        if not final_only:
            self._unread.begin()
        self._register(request, "chat" if part.kind in ("chat", "messages") else "completion", context)
        return request

    def submit_for_result(
        self,
        token_ids: Sequence[int],
        extras: Extras,
        buffer: Buffer,
        options: CallOptions,
        *,
        results_from: int,
        context: Context | None,
    ) -> UserRequest:
        """Register a prompt for one result in place of tokens; ``buffer`` is told of it as of any end. ``options`` are
        checked; ``extras`` say what it is to be, and ``results_from`` of which tokens it is made.

        Raises:
            EngineOverloadedError: the queue is full and admission is "error".
        """
        account = self._accounts.of(options.tenant)
        self._queue.check_room(account)
        self._next_id += 1
        request_id = f"pool-{self._next_id}"
        mailbox = Mailbox(
            final_only=True,
            num_choices=1,
            times=self._observer.new_times(),
            buffer=buffer,
            on_end=partial(self._ended, request_id),
        )
        request = UserRequest(
            request_id=request_id,
            prompt=TokensPart(token_ids),
            params=_FOR_A_RESULT,
            priority=options.priority,
            cache_salt=(options.cache_salt or "").encode(),
            arrival_time=self._loop.time(),
            mailbox=mailbox,
            account=account,
            num_expected=len(token_ids),
            samples=False,
            extras=extras,
            results_from=results_from,
            adapter=options.adapter,
        )
        self._register(request, "embedding", context)
        return request

    def _register(self, request: UserRequest, kind: Kind, context: Context | None) -> None:
        request_id, mailbox = request.request_id, request.mailbox
        self._requests[request_id] = request
        self._counters.num_requests += 1
        request.account.begin()
        self._observer.note_queued(
            request_id, request.params, request.priority, mailbox.times, kind=kind, context=context
        )
        if not mailbox.done:  # a listener may have aborted the request when it was told of it
            self._on_queued(request)
            self._begin(request, self._queue.join(request_id, request.priority, request.account, request.num_expected))

    def check(self, prompt: Prompt | PromptPart, params: SamplingParams, options: CallOptions) -> PromptPart:
        """Check a request by itself and raise what `submit` would; callable from any thread.

        Returns the prompt in a form that the caller can't change any more. Whether the request_id is in use is not
        checked.
        """
        part = prompt if isinstance(prompt, PromptPart) else part_of(prompt, self._limits.max_model_len)
        check_request(self._limits, self._has_tokenizer, part.kind, params, options)
        if options.adapter is not None:
            self.preparation.adapters.check(options.adapter)
        if part is prompt or not isinstance(part, TokensPart):
            return part
        return TokensPart(self.preparation.check_ids(part.token_ids, params))

    # The next three are called by other threads than the loop's, before they call `submit`.

    def has(self, request_id: str) -> bool:
        """Return whether the request with this id has not ended."""
        return request_id in self._requests

    def count(self, others: set[str]) -> int:
        """Return how many requests have not ended, counting the ids ``others`` too."""
        return len({*self._requests, *others})

    def check_room(self, coming: set[str], tenant: str | None) -> None:
        """See `AdmissionQueue.check_room`. ``coming``: ids of those that come, or have just come; from any thread."""
        # below the limit the requests in `coming` that are registered already need not be told apart
        if len(self._queue) + len(coming) >= self._queue.limit:
            coming = coming - self._requests.keys()
        self._queue.check_room(self._accounts.find(tenant), len(coming))

    def _begin(self, request: UserRequest, turn: asyncio.Future[None] | None) -> None:
        """Start to prepare the request, once ``turn`` is done if it is held; one that needs no preparation is scheduled
        at once."""
        if turn is None:
            request.num_taken = request.num_expected
        if turn is None and not request.must_be_prepared:
            assert isinstance(request.prompt, TokensPart)
            self._schedule(request, Prepared(request.prompt.token_ids))
            return
        request.preparing = self._loop.create_task(self._prepare(request, turn), name="aengine-prepare")

    async def _prepare(self, request: UserRequest, turn: asyncio.Future[None] | None) -> None:
        error: AEngineError
        acting_for.set(request.account)
        try:
            if turn is not None:
                await turn
                request.num_taken = request.num_expected
            prepared = await self.preparation.prepare(request)
        except asyncio.CancelledError:
            request.preparing = None
            # This has no effect after the request's own end; else only the engine's end cancels the task.
            request.mailbox.fail(EngineClosedError("the engine was closed while this request was prepared"))
            raise
        except AEngineError as ours:
            error = ours
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as bug:  # a panic of a library in Rust is no Exception
            error = InternalError(f"the request could not be prepared ({request.phase.value}): {bug!r}")
            error.__cause__ = bug
        else:
            request.preparing = None
            self._schedule(request, prepared)
            return
        request.preparing = None
        request.mailbox.fail(error)

    def _schedule(self, request: UserRequest, prepared: Prepared) -> None:
        """Make a scheduler `Request` for each of the n completions, and hand them to a replica."""
        params, limits, mailbox = request.params, self._limits, request.mailbox
        ids, grammar = prepared.token_ids, prepared.grammar if request.samples else None
        request.prompt = None  # the requests hold it now
        request.phase = Phase.SCHEDULED
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos or grammar is not None:  # past its end a grammar allows nothing else
            stop_ids |= limits.eos_token_ids
        room = limits.max_model_len - len(ids)
        max_num_tokens = len(ids) + (min(room, params.max_tokens or room) if request.samples else 1)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        mailbox.stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            mailbox.stop_token_ids -= limits.eos_token_ids
        mailbox.num_prompt_tokens = len(ids)
        if grammar is not None:
            mailbox.warnings = grammar.warnings
        if self._tokenizer is not None and params.detokenize:
            for choice in mailbox.choices:
                detokenizer = self._tokenizer.detokenizer(
                    params.stop,  # type: ignore[arg-type]  # made a tuple by SamplingParams
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                    skip_special_tokens=params.skip_special_tokens,
                    markers=prepared.markers,
                    after=() if prepared.begins_text else ids,
                )
                choice.begin(detokenizer)
        prompt, extras = (
            PromptTokens(ids),
            request.extras | request.share.extras | extras_of(params, prepared.bad_words),
        )
        request.requests = [
            Request(
                request.request_id,
                prompt,
                params,
                seed=_nth_seed(seed, i),
                max_num_tokens=max_num_tokens,
                stop_token_ids=stop_ids,
                index=i,
                priority=request.priority,
                arrival_time=request.arrival_time,
                cache_key=CacheKey(request.cache_salt, request.share.key),
                account=request.account,
                sink=choice,
                grammar=None if grammar is None else RequestGrammar(grammar),
                samples=request.samples,
                extras=extras,
                results_from=NO_RESULTS if i else request.results_from,
            )
            for i, choice in enumerate(mailbox.choices)
        ]
        self._counters.prompt_tokens += len(ids)
        self._replicas.add(request)

    # -- the way out

    def abort(self, request_id: str) -> bool:
        """End a request in whatever phase it is. Returns whether there was one. Idempotent."""
        request = self._requests.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            return False
        request.mailbox.abort()
        return True

    def abort_all(self) -> int:
        """End every request, in whatever phase it is. Returns how many there were."""
        return sum(self.abort(request_id) for request_id in list(self._requests))

    def fail_all(self, error: AEngineError) -> None:
        """End every request, and all waiting for adapters, with its own copy of the error."""
        self._unread.stop()
        self.preparation.adapters.fail(error)
        for request in list(self._requests.values()):
            request.mailbox.fail(error_for_waiter(error))
        self.keeping.close()

    def _expire(self, request: UserRequest, deadline: float) -> None:
        done = sum(len(choice.token_ids) for choice in request.mailbox.choices)
        text = (
            f"request {request.request_id} did not end within its deadline of {deadline:g} s "
            f"({done} tokens were generated)"
        )
        request.mailbox.fail(DeadlineExceededError(text, deadline=deadline))

    def _expire_unless_begun(self, request: UserRequest, limit: float) -> None:
        if not any(choice.token_ids for choice in request.mailbox.choices):
            where = _where(request)
            text = f"request {request.request_id}: no token within first_token_deadline={limit:g} s ({where})"
            request.mailbox.fail(DeadlineExceededError(text, deadline=limit))

    def _ended(self, request_id: str) -> None:
        """Free what an ended request still holds (place in the queue, timers, preparation, rows), count it, and tell
        listeners. Its mailbox calls this once."""
        request = self._requests.pop(request_id)
        mailbox = request.mailbox
        reason = mailbox.finish_reason
        assert reason is not None
        self._queue.leave(request_id)
        if request.preparing is not None:
            request.preparing.cancel()
        for timer in request.timers:
            timer.cancel()
        request.timers = ()
        request.turn(request)
        self.preparation.end_turn(request)
        self._replicas.drop(request, reason)
        request.share.give_back()
        usage = mailbox.usage()
        request.account.end(usage, request.num_taken, request.keep)
        if reason is FinishReason.ERROR:
            self._counters.num_failed += 1
        elif reason is FinishReason.ABORT:
            self._counters.num_aborted += 1
        else:
            self._counters.num_finished += 1
        self._on_ended()
        mailbox.times.end()
        reasons = tuple(choice.finish_reason or reason for choice in mailbox.choices)
        end = RequestEnd(request_id, reason, usage, mailbox.timings(), mailbox.error, reasons)
        self._observer.note_end(end, mailbox.times)

    def close(self) -> tuple[ThreadPool, ...]:
        """Begin no more preparations. Returns the pools, whose threads may be waited for."""
        return self.preparation.close()

    def drop_tables(self) -> None:
        """Free the tokenizer and the grammars, after `fail_all` and `close`. Streams that callers still hold would keep
        them alive."""
        self._tokenizer = None
        self.preparation.drop_tables()


def _where(request: UserRequest) -> str:
    """Describe where a request is that has no token yet."""
    if not request.requests:
        return request.phase.value
    first = request.requests[0]
    if first.status in _UNSCHEDULED:
        return "the request was still queued"
    num_begun = min(first.num_computed_tokens, first.num_prompt_tokens)
    return f"{num_begun} of {first.num_prompt_tokens} prompt tokens were computed or being computed"


def _nth_seed(seed: int, index: int) -> int:
    """Return seed + index, wrapped to a signed 64-bit integer."""
    return (seed + index + 2**63) % 2**64 - 2**63
