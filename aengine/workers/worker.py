"""The worker's busy loop: frame -> runner -> frame.

Every rank reads the same frames in the same order. One of them answers steps; a collective call is executed and
answered by all. An exception while loading is reported and ends the worker; so does one in a step, since the content of
the device's memory is not known after it: the host has every request's tokens and starts anew, all ranks together. One
in a collective call is that call's answer.

    ring ──> queue of frames (step_queue.py) ──> launched, at most max_in_flight_steps ──> answered
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import AEngineError
from ..ipc.channel import Frame, PeerGoneError, WorkerChannel
from ..ipc.lead import Lead
from ..ipc.messages import GrammarOutput, Kind, SchedulerOutput, pack, unpack
from .agreement import AnswerCheck
from .answer_times import AnswerTimes
from .calls import AT_ONCE, CALLS, call_model
from .device_watch import DeviceWatch
from .loaded import Answer, JoiningRunner, Later, Runner
from .loading import Loading
from .logs import WorkerLogs
from .step_queue import Queued, StepQueue

logger = logging.getLogger("aengine.workers")

_HEARTBEAT_PERIOD = 0.25  # seconds
_MEMORY_PERIOD = 5.0  # seconds between two looks at the device's memory
_EAGER_POLL = 0.01  # seconds for which the device's answer is polled without a pause after an event
_POLL = 0.0002  # seconds between two polls after that, when no frame comes
_LEAD_POLL = 50e-6  # seconds between two looks whether the first rank has begun a step
_HURRY = 0.0005  # seconds that waking up and launching a step may take
_LOGS_PERIOD = 0.25  # seconds between two attempts to publish a log for which the ring had no room


class Worker:
    """The main loop of a rank. ``target``: the ``module:function`` that loads its model. ``logs``: its log handler."""

    def __init__(self, channel: WorkerChannel, rank: int, target: str, logs: WorkerLogs | None = None) -> None:
        self._channel = channel
        self._logs = logs or WorkerLogs(channel)
        self._loading = Loading(channel, rank, target, self._logs)
        self._runner: Runner | None = None
        self._queue = StepQueue()
        self._max_launched = 1
        self._answers: deque[tuple[int, Answer, int]] = deque()  # (step id, answer, tokens) of launched steps
        self._later: list[tuple[int, Later]] = []  # (call's id, its value to come) of calls that were not replied to
        self._times = AnswerTimes()  # durations of the steps in ``_answers``
        self._device = DeviceWatch()  # how far the device is overdue with the steps in ``_answers``
        self._num_tokens = 0  # tokens of the step that was executed last
        self._prepares = False  # whether to call `prepare_more` when idle
        self._awaits_bitmask = False  # the device works on a step whose bitmask has not come
        self._check: AnswerCheck | None = None  # compares answers with the leading rank's; None: there is one rank
        self._step_id = 0  # id of the frame in hand, for error reports
        self._ended = threading.Event()
        self._last_event = 0.0  # when the last frame came (monotonic seconds)

    def run(self) -> int:
        """Run until SHUTDOWN (exit code 0) or an error that was reported (1)."""
        try:
            while self._turn():
                pass
        except PeerGoneError:
            raise
        except BaseException as error:
            self._logs.publish()
            self._channel.publish(Kind.ERROR, self._step_id, pack(_report_of(error)))
            return 1
        finally:
            self._ended.set()
        self._logs.publish()
        return 0

    def _turn(self) -> bool:
        """Take the frames that have come, handle one, and report what has become ready. False after SHUTDOWN."""
        # While the device computes, the thread either sleeps as long as a step surely takes, or polls all the time.
        frame = self._channel.consume(self._wait_seconds(), spins=self._is_idle)
        if self._queue.look():
            frame = frame or self._channel.consume(0)  # a frame that came before that look must be taken too
        while frame is not None:
            self._take(frame)
            frame = self._channel.consume(0)
        if self._may_handle:
            kind, self._step_id, message = self._queue.pop()
            self._device.note_busy()
            if not self._handle(kind, message):
                return False
            self._last_event = time.monotonic()
        elif self._queue.is_over:
            return False
        elif self._is_idle and self._prepares_after is not None:
            self._prepare_more()
        while self._answers and self._answers[0][1].ready():
            self._step_id, answer, num_tokens = self._answers.popleft()
            output = answer.get()
            output.seconds = self._times.note_taken(time.monotonic())
            self._device.note_done(num_tokens, output.seconds)
            if self._check is not None:
                self._check.note(output)
            if self._loading.rank.answers:
                output.answered_at = time.monotonic()
                self._channel.publish(Kind.OUTPUT, self._step_id, pack(output))
        for call in [call for call in self._later if call[1].ready()]:
            self._later.remove(call)
            self._reply(call[0], call[1].get)
        if self._answers:
            self._device.note_not_done(self._answers[0][2], time.monotonic())
        elif self._awaits_bitmask:  # the devices of other ranks may wait for this one, which waits for the bitmask
            self._device.note_busy()
        else:
            self._device.note_idle()
        if self._logs.is_pending:
            self._logs.publish()
        return True

    def _take(self, frame: Frame) -> None:
        self._step_id = frame.step_id
        kind = Kind(frame.kind)
        is_bare = kind is Kind.SHUTDOWN or (kind is Kind.REVOKE and not frame.payload)
        message = None if is_bare else unpack(kind, frame.payload)
        if kind is Kind.REVOKE:
            num_dropped = self._queue.revoke(message)
            if message is None:
                self._channel.publish(Kind.REVOKED, self._step_id, pack(num_dropped))
        elif kind is Kind.CALL and message is not None and message[0] in AT_ONCE:
            self._call(message)
        else:
            self._queue.put(Queued(kind, frame.step_id, message))

    @property
    def _may_launch(self) -> bool:
        """Whether the device can be given another step."""
        return len(self._answers) < self._max_launched

    @property
    def _may_handle(self) -> bool:
        """Whether a frame can be handled now. A step has to wait while enough steps are on the device."""
        return self._queue.next_frame(may_step=self._may_launch) is not None

    @property
    def _is_idle(self) -> bool:
        return not self._answers and not self._awaits_bitmask and not self._queue and not self._later

    @property
    def _prepares_after(self) -> float | None:
        return self._runner.prepares_after if self._prepares and self._runner is not None else None

    def _wait_seconds(self) -> float | None:
        """Return how many seconds to wait for a frame; None: for ever, as nothing else can happen."""
        if self._may_handle:
            return 0
        if self._queue and self._may_launch:  # the leading rank will begin the step or drop it soon
            return _LEAD_POLL
        if self._is_idle:
            prepares_after = self._prepares_after
            return _LOGS_PERIOD if prepares_after is None and self._logs.is_pending else prepares_after
        now = time.monotonic()
        # A step that the host owes must be launched before the device is done with those that it has.
        owes_none = not self._may_launch
        seconds = self._times.seconds_to_sleep(now, may_nap=owes_none) if self._answers else 0.0
        if seconds > 0 and (seconds > _HURRY or owes_none):
            return seconds
        if (self._answers or self._awaits_bitmask) and now - self._last_event < _EAGER_POLL:
            return 0
        return _POLL if self._answers or self._later else None

    def _prepare_more(self) -> None:
        self._device.note_busy()  # the devices of other ranks may wait for this rank's next step
        try:
            self._loaded().prepare_more()
        except Exception:  # out of memory, say: what is missing is prepared when a step needs it
            logger.warning("what steps may need could not be prepared ahead", exc_info=True)
            self._prepares = False

    def _handle(self, kind: Kind, message: Any) -> bool:
        if kind is Kind.SHUTDOWN:
            self._queue.note_over()
            return False
        if kind is Kind.STEP:
            self._execute(message)
        elif kind is Kind.GRAMMAR:
            self._sample(message)
        elif kind is Kind.JOIN:
            runner = self._loaded()
            assert isinstance(runner, JoiningRunner), "replicas that share no experts"
            runner.join(*message)
        elif kind is Kind.CALL:
            self._call(message)
        elif kind is Kind.LOAD:
            self._load(message)
        elif kind is Kind.ALLOCATE:
            self._allocate(message)
        else:
            raise ValueError(f"a {kind.name} message is not for a worker")
        return True

    def _execute(self, out: SchedulerOutput) -> None:
        runner, begun = self._loaded(), time.monotonic()
        self._queue.note_begun(out.step_id)
        runner.execute_model(out)
        self._awaits_bitmask = not out.sample_now
        self._num_tokens = sum(out.num_scheduled_tokens)
        if out.sample_now:
            only_decodes = self._num_tokens == len(out.req_idx)
            self._answers.append((out.step_id, runner.sample_tokens(None), self._num_tokens))
            self._times.note_launched(time.monotonic(), only_decodes=only_decodes, begun=begun)

    def _sample(self, grammar: GrammarOutput) -> None:
        self._awaits_bitmask = False
        if isinstance(grammar.bitmask, int):
            grammar.bitmask = self._channel.bitmask(grammar.bitmask)
        self._answers.append((grammar.step_id, self._loaded().sample_tokens(grammar), self._num_tokens))
        self._times.note_launched(time.monotonic(), only_decodes=False)  # begun by `_execute`, before its bitmask came

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise ValueError("a step came before ALLOCATE")
        return self._runner

    # -- loading

    def _load(self, message: dict[str, Any]) -> None:
        lead = Lead(message["lead"]) if "lead" in message else None
        config = self._loading.load(message)
        self._queue.lead, self._queue.leads = lead, self._loading.rank.leads
        if lead is not None:
            self._check = AnswerCheck(lead, self._loading.rank)
        self._max_launched = config.steps_in_flight
        self._prepares = True

    def _allocate(self, plan: dict[str, int]) -> None:
        self._runner = self._loading.allocate(plan)
        threading.Thread(target=self._publish_heartbeats, name="aengine-heartbeat", daemon=True).start()

    def _publish_heartbeats(self) -> None:
        """Publish heartbeats while Python runs here: not in a stopped process, nor while a thread keeps the GIL."""
        device_bytes, counted = 0, -_MEMORY_PERIOD
        while not self._ended.is_set():
            if time.monotonic() - counted >= _MEMORY_PERIOD:
                counted = time.monotonic()
                with contextlib.suppress(Exception):  # heartbeats go on even if the device fails
                    assert self._loading.model is not None
                    device_bytes = self._loading.model.device_bytes()
            self._channel.beat(device_bytes, self._device.word)
            self._ended.wait(_HEARTBEAT_PERIOD)

    # -- collective calls

    def _call(self, message: list[Any]) -> None:
        """Make a collective call: ``[method, is_own, *arguments]``. The method is one of CALLS or a public one of the
        worker extension, never a name that is looked up elsewhere."""
        method, is_own, *arguments = message

        def value() -> Any:
            if not is_own:
                return self._call_extension(method, arguments)
            if method in CALLS:
                return CALLS[method](self._loading.rank, self._loading.model, *arguments)
            return call_model(self._loading.model, method, arguments)

        self._reply(self._step_id, value)

    def _reply(self, call_id: int, make: Callable[[], Any]) -> None:
        """Reply to a call what ``make`` returns or raises; later, if it returns a `Later`."""
        try:
            value = make()
            if isinstance(value, Later):
                self._later.append((call_id, value))
                return
            reply = pack({"value": value})
            unpack(Kind.REPLY, reply)  # the host decodes it too, and not all that can be packed can be unpacked
        except Exception as error:
            reply = pack({"error": _report_of(error)})
        self._channel.publish(Kind.REPLY, call_id, reply)

    def _call_extension(self, method: str, arguments: list[Any]) -> Any:
        if self._loading.extension is None:
            raise ValueError("a call came before ALLOCATE")
        return self._loading.extension.call(method, arguments)


def _report_of(error: BaseException) -> dict[str, str]:
    """Return the content of an ERROR frame. Never raises, whatever the error's own __str__ does."""
    if isinstance(error, AEngineError):
        kind, message = type(error).__name__, str(error)
    else:
        kind, message = "InternalError", "".join(traceback.format_exception_only(error)).strip()
    report = {"type": kind, "message": message, "traceback": "".join(traceback.format_exception(error))}
    # A file name that is not UTF-8 has surrogates, which can't be packed.
    return {key: text.encode("utf-8", "backslashreplace").decode() for key, text in report.items()}
