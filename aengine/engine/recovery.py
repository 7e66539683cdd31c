"""Decisions when a worker has died, or seems to hang: whether to start another, when, and which request to blame.

    steps under way, no answer ──Watchdog──> executor.fail(WorkerDiedError)   like any other death from here on
    death ──RestartBudget──> start again after `delay` seconds, or give up
          ──Scheduler.preempt_all──> everybody is computed again from the ids that the host holds

Which request a worker may have died of is another question: see engine/scheduler/crash_quarantine.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import WorkerDiedError
from ..ipc.liveness import Liveness

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 30.0
_FIRST_STEP_SECONDS = 120.0
"""Allowed for a step when none has been answered yet: kernels are compiled at first use."""
_LATER_STEPS = 4.0
"""A step may take so many times as long, by its tokens, as the slowest of the last, and ``hang_timeout`` on top."""
_NUM_STEPS = 64
_LEAST_TOKENS = 16  # tokens; steps of fewer take as long as one of so many
_BEATS_TO_CONFIRM = 2
"""Ranks say with each heartbeat how far their devices are. After so many more heartbeats, what all of them have said is
of one time: not of before the step ended on one, and of after on another."""


class RestartBudget:
    """Limits restarts to ``most`` within ``window`` seconds, each delayed longer than the one before."""

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._restarts: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Count a restart at ``now`` (seconds), and return how many seconds to wait before it; None: the budget is used
        up."""
        while self._restarts and self._restarts[0] <= now - self._window:
            self._restarts.popleft()
        count = len(self._restarts)
        if count >= self._most:
            return None
        self._restarts.append(now)
        # restarts within the last minute: older ones are no series with this one
        recent = sum(at > now - 60 for at in self._restarts) - 1
        return 0.0 if recent <= 0 else min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(recent - 1, 16))

    def forgive(self) -> None:
        """Count the restarts so far no longer: their cause has been found, and is gone."""
        self._restarts.clear()

    def __str__(self) -> str:
        return f"{self._most} restarts within {self._window:g} s"


def hang_error(fault: str) -> WorkerDiedError:
    """Make the error for workers that hang; ``fault`` is the description that `Watchdog` gave."""
    return WorkerDiedError(f"{fault}: it was killed")


class Watchdog:
    """Checks ten times a second that the worker makes progress while it has steps. Costs nothing when idle.

    A worker hangs when it has sent no heartbeat for ``hang_timeout`` seconds (a stopped process, a thread that holds
    the GIL); when its device has worked on a step for so much longer than it can take (`DeviceWatch`); or when its
    oldest step takes ``hang_timeout`` longer than a step of so many tokens could.
    """

    PERIOD = 0.1

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hang_timeout: float,
        liveness: Callable[[], Liveness],
        on_hang: Callable[[str], None],
        *,
        patience: float = 0.0,
    ) -> None:
        """``liveness``: returns what the workers show of themselves; ``on_hang``: called with a description, once;
        ``patience``: seconds that any step may take while heartbeats come."""
        self._loop = loop
        self._hang_timeout = hang_timeout
        self._liveness = liveness
        self._on_hang = on_hang
        self.patience = patience
        self._timer: asyncio.TimerHandle | None = None
        self._steps: deque[tuple[int, float]] = deque()  # tokens of each step under way, and when it could begin
        # seconds of each of the last steps, and seconds per token
        self._known: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)
        self._looked = self._beaten = 0.0  # times of the last look and of the last heartbeat, by the loop's clock
        self._num_beats = -1
        self._overdue_since_beat: int | None = None  # number of heartbeats when the devices were found overdue
        self._num_pauses = 0
        self._num_stops = 0
        self._num_suspenders = 0

    def begin(self, num_tokens: int) -> None:
        """Start to watch a step of ``num_tokens`` tokens that was published."""
        now = self._loop.time()
        self._steps.append((num_tokens, now))
        if self._timer is None:
            self._looked = self._beaten = now
            self._timer = self._loop.call_later(self.PERIOD, self._look)

    def end(self) -> None:
        """Note that the oldest step was answered. Without effect after `stop`."""
        if not self._steps:
            return
        now = self._loop.time()
        num_tokens, begun = self._steps.popleft()
        seconds = now - begun
        if not self._num_suspenders:
            self._known.append((seconds, seconds / max(num_tokens, _LEAST_TOKENS)))
        if self._steps:
            self._begin_anew()  # the next step could not begin before this one ended
        else:
            self.stop()

    def drop(self, num_steps: int) -> None:
        """Stop watching the newest ``num_steps`` steps, which the worker has dropped."""
        for _ in range(min(num_steps, len(self._steps))):
            self._steps.pop()
        if not self._steps:
            self.stop()

    def pause(self) -> int:
        """Stop the step's time until `resume`, which takes what this returns: the oldest step waits for the host.
        Heartbeats are still checked."""
        self._num_pauses += 1
        return self._num_stops

    def resume(self, paused: int) -> None:
        if paused == self._num_stops:  # after a `stop` the pause does not count any more
            self._num_pauses -= 1
            self._begin_anew()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which the worker's silence is not counted as a hang."""
        self._num_suspenders += 1
        try:
            yield
        finally:
            self._num_suspenders -= 1
            self._beaten = self._loop.time()
            self._begin_anew()

    def _begin_anew(self) -> None:
        if self._steps:
            self._steps[0] = (self._steps[0][0], self._loop.time())

    def stop(self) -> None:
        """Forget all steps; `begin` starts to watch again."""
        self._num_pauses = 0
        self._num_stops += 1
        self._overdue_since_beat = None
        self._steps.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def allowed(self, num_tokens: int) -> float:
        """Return the seconds that a step of ``num_tokens`` tokens may take, by what the last steps took."""
        if not self._known:
            return max(_FIRST_STEP_SECONDS, self._hang_timeout)
        longest, slowest = map(max, zip(*self._known, strict=True))
        return max(self.patience, self._hang_timeout + _LATER_STEPS * max(longest, slowest * num_tokens))

    def _look(self) -> None:
        now = self._loop.time()
        late = now - self._looked - self.PERIOD
        self._looked = now
        liveness = self._liveness()
        if liveness.num_heartbeats != self._num_beats:
            self._num_beats, self._beaten = liveness.num_heartbeats, now
        if late > 1.0:  # the loop itself stood still, and answers may lie unread
            self._beaten = now
            self._steps = deque((num_tokens, max(begun, now - 1.0)) for num_tokens, begun in self._steps)
        if self._num_pauses or self._num_suspenders:
            self._begin_anew()
        if self._num_suspenders:
            self._beaten = now
        num_tokens, begun = self._steps[0]
        fault = ""
        if now - self._beaten > self._hang_timeout:
            fault = f"has shown no sign of life for {now - self._beaten:.1f} s"
        elif (overdue := self._confirmed(liveness.overdue_seconds)) > self._hang_timeout:
            fault = f"has a device that is stuck in a step: it takes {overdue:.1f} s longer than it could"
        elif now - begun > self.allowed(num_tokens):
            fault = f"has worked on a step of {num_tokens} tokens for {now - begun:.1f} s"
        if fault:  # the step stays: its answer may have come just before, and is still taken
            self._timer = None
            self._on_hang(f"{liveness.slowest} {fault}")
        else:
            self._timer = self._loop.call_later(self.PERIOD, self._look)

    def _confirmed(self, overdue: float) -> float:
        """Return for how many seconds the devices' step is overdue, if that holds for more than a moment; else 0."""
        if self._num_suspenders or overdue <= self._hang_timeout:
            self._overdue_since_beat = None
            return 0.0
        if self._overdue_since_beat is None:
            self._overdue_since_beat = self._num_beats
        return overdue if self._num_beats >= self._overdue_since_beat + _BEATS_TO_CONFIRM else 0.0
