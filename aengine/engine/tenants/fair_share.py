"""Fair shares: requests belong to accounts, and who has got the least for its weight is served next.

    counter of an account += cost of what a step computes for it / its weight       (VTC: Sheng et al., OSDI 2024)

    waiting  ──> the account with the least counter that may have a row, within it by priority and arrival ──> a row
    prompts  ──> chunks by counter; a chunk leaves up to half of its room to those that wait with a lesser counter
    blocks   ──> are taken from the account with the greatest counter

Nobody hoards credit: an account that begins to wait, after it had nothing that could be served, has its counter lifted
to the least of those that wait. Work-conserving: whoever waits is served while there is room, whatever its counter; an
account waits for nothing but its own `Tenant.max_running`.

Each token is charged once, also when its request is preempted and computed again. So counters move only while requests
get on; where none does the order stands still, and the proof of scheduler.py holds: the first in order gets its blocks,
and all end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from ...limits.tenants import Tenant
from ..scheduler.request import Request, RequestStatus
from ..scheduler.rows import Rows
from ..scheduler.waiting_queue import ServingOrder, WaitingQueue

_sort_key = attrgetter("sort_key")

CACHED_COST = 0.1
"""Cost of a prompt token whose KV was found, in units of one that is computed: it holds its block all the same."""
OUTPUT_COST = 2.0
"""Cost of a token of the output."""
CONTEXT_COST = 1 / 4096
"""Cost of a token of the context for each token of the output: it is read from the KV, and holds it for a step."""
KEPT_COST = 0.01
"""Cost of a token whose KV is kept for a second after the request's end."""
_STEPS = 8
"""Steps after which all that decode are charged for."""


class Account:
    """Counts what was computed for one who asks."""

    __slots__ = ("counter", "is_queued", "name", "num_running", "num_waiting", "terms")

    def __init__(self, name: str, terms: Tenant) -> None:
        self.name = name
        self.terms = terms
        self.counter = 0.0  # cost of what was computed so far, by weight
        self.num_running = 0  # requests with a row
        self.num_waiting = 0  # requests in the queues for a row
        self.is_queued = False  # some of them may have a row now

    @property
    def weight(self) -> float:
        """Its share beside others'."""
        return self.terms.weight

    @property
    def has_room(self) -> bool:
        """Whether another of its requests may have a row."""
        return self.terms.max_running is None or self.num_running < self.terms.max_running

    @property
    def load(self) -> float:
        """Its rows by its weight."""
        return self.num_running / self.terms.weight

    def charge(self, request: Request, num_computed: int) -> None:
        """Charge for the request's tokens up to ``num_computed``, as far as this was not done before."""
        begin, prompt = request.num_charged, request.num_prompt_tokens
        if num_computed <= begin:
            return
        request.num_charged = num_computed
        cost = float(max(0, min(num_computed, prompt) - begin))
        if num_computed > prompt:
            first = max(begin, prompt)
            cost += (num_computed - first) * (OUTPUT_COST + CONTEXT_COST * (first + num_computed) / 2)
        self.counter += cost / self.terms.weight

    def charge_found(self, request: Request, num_found: int) -> None:
        """Charge for leading tokens that were found in a cache."""
        number = num_found - request.num_charged
        if number > 0:
            request.num_charged = num_found
            self.counter += number * CACHED_COST / self.terms.weight

    def charge_kept(self, num_tokens: int, seconds: float) -> None:
        """Charge for KV of so many tokens that is kept after a request's end."""
        self.counter += num_tokens * seconds * KEPT_COST / self.terms.weight


class FairShare:
    """The counters of all accounts, which several schedulers may share."""

    def __init__(self) -> None:
        self._queued: set[Account] = set()
        self._last = 0.0  # counter of the account that was the last to leave ``_queued``
        self.on_room: list[Callable[[], None]] = []  # called when an account may have another row

    def note(self, account: Account) -> None:
        """Note that the account's numbers have changed, and lift its counter if it begins to be served."""
        is_queued = account.num_waiting > 0 and account.has_room
        if is_queued == account.is_queued:
            return
        account.is_queued = is_queued
        if is_queued:
            least = min((other.counter for other in self._queued), default=self._last)
            account.counter = max(account.counter, least)
            self._queued.add(account)
        else:
            self._queued.discard(account)
            if not self._queued:
                self._last = account.counter


class FairOrder(ServingOrder):
    """The order of one scheduler's requests by their accounts' counters."""

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self._running: set[Request] = set()
        self._counters: dict[Account, float] = {}  # counters of those with rows, in this plan
        self._num_steps = 0
        self._newest: list[Request] = []  # requests that have got a row since counters were read last
        self._queue = FairQueue(self)

    def new_queue(self) -> WaitingQueue:
        """See `ServingOrder`."""
        return self._queue

    def begin_step(self) -> None:
        """See `ServingOrder`. Decodes are charged for now and then, prompts in each step (`sort`)."""
        self._num_steps += 1
        if not self._num_steps % _STEPS:
            _charge(self._running)

    def charge_newest(self) -> None:
        """Charge those that have just got a row for what the step being planned computes of them."""
        _charge(self._newest)
        self._newest.clear()

    def note_row(self, request: Request) -> None:
        """See `ServingOrder`."""
        account = request.account
        self._running.add(request)
        self._newest.append(request)
        account.charge_found(request, min(request.num_computed_tokens, request.num_prompt_tokens))
        account.num_running += 1
        self.share.note(account)

    def note_left(self, request: Request) -> None:
        """See `ServingOrder`."""
        account = request.account
        self._running.discard(request)
        if request.finish_reason is not None:  # one that is preempted is charged when computed again
            account.charge(request, request.num_computed_tokens)
        had_room = account.has_room
        account.num_running -= 1
        self.share.note(account)
        if not had_room and account.num_waiting:
            for wake in self.share.on_room:
                wake()

    def sort(self, requests: list[Request]) -> None:
        """See `ServingOrder`."""
        _charge(requests)
        # A counter may be lifted within the plan, when a request is preempted and waits: that counts from the next on.
        self._counters = {request.account: request.account.counter for request in self._running}
        requests.sort(key=self._place)

    def last(self, requests: Iterable[Request]) -> Request:
        """See `ServingOrder`."""
        return max(requests, key=self._place)

    def _place(self, request: Request) -> tuple[float, tuple[int, float, int]]:
        return self._counters[request.account], request.sort_key

    def room_for_waiting(self, request: Request, room: int, rows: Rows) -> int:
        """See `ServingOrder`. It leaves no room to a request that could not have a row, or that need not be computed
        as far as it is known."""
        if room < 2 or not rows.num_free:
            return 0
        first = self._queue.first(request.account)
        if first is None:
            return 0
        rows.rope.choose(first)
        prefix = rows.kv.match(first)
        if rows.num_spare_blocks < rows.kv.num_missing(prefix, len(first.token_ids)):
            return 0
        return min(room // 2, len(first.token_ids) - prefix.length)


def _charge(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.num_computed_tokens > request.num_charged:
            request.account.charge(request, request.num_computed_tokens)


class FairQueue(WaitingQueue):
    """Waiting requests by account. It is true while one of them may have a row; its length is the number of all."""

    __slots__ = ("_by_account", "_length", "_order")

    def __init__(self, order: FairOrder) -> None:
        self._order = order
        self._by_account: dict[Account, list[Request]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return any(account.has_room for account in self._by_account)

    def __iter__(self) -> Iterator[Request]:
        for account in sorted(self._by_account, key=self._turn):
            yield from self._by_account[account]

    def _turn(self, account: Account) -> tuple[float, float, tuple[int, float, int]]:
        return account.counter, account.load, self._by_account[account][0].sort_key

    def add(self, request: Request) -> None:
        """See `WaitingQueue`."""
        request.status = RequestStatus.WAITING
        account = request.account
        insort(self._by_account.setdefault(account, []), request, key=_sort_key)
        self._length += 1
        account.num_waiting += 1
        self._order.share.note(account)

    def peek(self) -> Request:
        """Return the next request that may have a row. There must be one."""
        self._order.charge_newest()
        allowed = (account for account in self._by_account if account.has_room)
        return self._by_account[min(allowed, key=self._turn)][0]

    def first(self, later: Account) -> Request | None:
        """Return the next request that may have a row and comes before all of an account; None: there is none."""
        least = later.counter, later.load
        allowed = [one for one in self._by_account if one.has_room and (one.counter, one.load) < least]
        return self._by_account[min(allowed, key=self._turn)][0] if allowed else None

    def pop(self) -> Request:
        """Take the next request out."""
        request = self.peek()
        self.discard(request)
        return request

    def discard(self, request: Request) -> None:
        """See `WaitingQueue`."""
        account = request.account
        own = self._by_account.get(account, [])
        place = bisect_left(own, request.sort_key, key=_sort_key)
        if place < len(own) and own[place] is request:
            del own[place]
            if not own:
                del self._by_account[account]
            self._length -= 1
            account.num_waiting -= 1
            self._order.share.note(account)
