"""`Rounds`: the steps of replicas that share experts, which are computed side by side.

In each layer with experts every rank waits for all others. So all replicas have to compute steps in the same order, as
many of them: a round has a step of each replica, or none of those that have nothing to compute.

    replica 0   [step 0][step 1][  -   ][step 2]        step loops give steps as they like; the host pairs them,
    replica 1   [  -   ][step 0][step 1][step 2]        and no message between the workers is needed for it

A round begins when each replica has given a step or rests, which it does when its step loop awaits an answer or a
request. As many are on their way as a step loop has steps in flight, so that a replica that has given a step too late
for one round gives it for the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from ...ipc.messages import SchedulerOutput
from ..recovery import Watchdog
from ..scheduler.crash_quarantine import CrashQuarantine


class Rounds:
    """Puts the steps of replicas that share experts together into rounds: one step of each, perhaps an empty one."""

    def __init__(self, num_replicas: int, max_in_flight: int, watchdog: Watchdog) -> None:
        """``watchdog``: of the workers; what it sees as steps are rounds, which take as long as if each replica had a
        step like the longest."""
        self.watchdog = watchdog
        self.generation = 0  # changes when the workers have died and when others have started
        self.peers = [RoundPeers(self, index) for index in range(num_replicas)]
        self._max_in_flight = max_in_flight
        self._publish: Callable[[Sequence[SchedulerOutput | None]], None] = lambda outs: None  # sends a round
        # steps of each replica that are in no round yet
        self._given: list[deque[SchedulerOutput]] = [deque() for _ in self.peers]
        self._is_busy = [False for _ in self.peers]  # whether each replica's step loop may give a step soon
        self._in_flight: deque[set[int]] = deque()  # for each round in flight, the replicas whose answer has not come
        self._refused: set[int] = set()  # replicas that were refused a step because of another's quarantine

    def begin(self, publish: Callable[[Sequence[SchedulerOutput | None]], None]) -> None:
        """Begin anew, with other workers. ``publish`` gives them a round: a step of each replica, None if it has
        none."""
        self.generation += 1
        self._publish = publish
        self.watchdog.stop()
        self._in_flight.clear()
        for index, given in enumerate(self._given):
            given.clear()
            self._is_busy[index] = False

    def end(self) -> None:
        """Forget all steps after the workers have died; nothing is published or watched before the next `begin`."""
        self.begin(lambda outs: None)

    def give(self, index: int, out: SchedulerOutput) -> None:
        """Queue a replica's next step, and publish a round if one is complete."""
        self._given[index].append(out)
        self._go()

    def note_answer(self, index: int) -> None:
        """Note that a replica's oldest step was answered."""
        self._is_busy[index] = True
        for due in self._in_flight:
            if index in due:
                due.remove(index)
                break
        while self._in_flight and not self._in_flight[0]:
            self._in_flight.popleft()
            self.watchdog.end()
        self._go()

    def note_idle(self, index: int) -> None:
        """Note that a replica will give no step before it gets an answer, or before something else happens: rounds need
        not wait for it."""
        self._is_busy[index] = False
        for other in [other for other in self._refused if self.may_step(other)]:
            self._refused.discard(other)
            self.peers[other].work.set()
        self._go()

    def may_step(self, index: int) -> bool:
        """Return whether a replica may make steps: while workers may have died of a request that runs again, no other
        replica has steps that they might die of instead (engine/scheduler/crash_quarantine.py)."""
        suspicious = next((peers.index for peers in self.peers if peers.quarantine), index)
        if suspicious != index:
            self._refused.add(index)
        return suspicious == index

    def _go(self) -> None:
        while len(self._in_flight) < self._max_in_flight and any(self._given):
            if any(busy and not given for busy, given in zip(self._is_busy, self._given, strict=True)):
                return
            outs = [given.popleft() if given else None for given in self._given]
            self._in_flight.append({index for index, out in enumerate(outs) if out is not None})
            longest = max(sum(out.num_scheduled_tokens) for out in outs if out is not None)
            self.watchdog.begin(len(outs) * longest)
            self._publish(outs)


class RoundPeers:
    """The other replicas in the rounds, as the step loop of one sees them."""

    name = "the group of all workers"
    is_independent = False

    def __init__(self, rounds: Rounds, index: int) -> None:
        self.index = index
        self.reports_deaths = index == 0
        self.quarantine: CrashQuarantine | None = None
        self.work = asyncio.Event()
        self._rounds = rounds

    def attach(self, quarantine: CrashQuarantine, work: asyncio.Event, watchdog: Watchdog) -> None:
        """See `Peers`. The replica's own watchdog is not used."""
        self.quarantine, self.work = quarantine, work

    @property
    def may_step(self) -> bool:
        """Whether a step may be made now; if not, the step loop is woken once it may be."""
        return self._rounds.may_step(self.index)

    @property
    def watchdog(self) -> Watchdog:
        """The watchdog of all replicas' workers."""
        return self._rounds.watchdog

    @property
    def generation(self) -> int:
        """A number that changes when the workers have died and when others have started."""
        return self._rounds.generation

    def note_given(self, num_tokens: int) -> None:
        """Do nothing: the executor tells `Rounds` of each step."""

    def note_answered(self) -> None:
        """Do nothing: the executor tells `Rounds` of each answer."""

    def note_idle(self) -> None:
        """Tell `Rounds` that this replica will give no step for now."""
        self._rounds.note_idle(self.index)
