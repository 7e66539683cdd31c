"""`Accounts`: who asks an engine, what each has had, and what its quota allows.

    of(name) ──> Account ──> AdmissionQueue   places in the queue by weight; quotas, by which it refuses or holds
                    │  ──> pools of threads   turns by weight (threads/turns.py)
                    └───> FairOrder           rows, chunks and blocks by counters (fair_share.py)

Until a request names a tenant, or the settings do, all are of one account, and schedulers serve in their plain order.
Of tenants that the settings do not name the latest `MAX_REMEMBERED_TENANTS` are remembered that ask for nothing; who
is forgotten comes back as one who was idle.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import QuotaExceededError
from ...limits.bounds import MAX_REMEMBERED_TENANTS
from ...limits.tenants import OTHERS, Tenant
from ...telemetry.metrics import MAX_SHOWN_TENANTS, TenantStatistics
from ..scheduler.scheduler import serve_by
from ..tokenizer.prompt import PromptPart, TextPart, TokensPart
from .fair_share import Account, FairOrder, FairShare

if TYPE_CHECKING:
    from ...outputs import Usage
    from ...params import SamplingParams
    from ..replicas.replica import Replica

Clock = Callable[[], float]

_UNKNOWN_OUTPUT = 256
"""Tokens that a completion without max_tokens counts as, until it ends."""
_CHARACTERS_PER_TOKEN = 4
"""Characters that count as a token of a prompt which is not encoded yet."""


class TokenBucket:
    """A quota of tokens a minute: as many may come at once, and as many more each minute. What a request will need is
    taken when it is let in, and what it has not needed is given back at its end."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self._capacity = self._level = float(per_minute)
        self._clock = clock
        self._time = clock()

    def seconds(self) -> float:
        """Return how long it takes until the next request may be let in; 0: it may now. A clock that was set back
        counts on from there."""
        self.take(0)
        return 0.0 if self._level > 0 else (1.0 - self._level) * 60 / self._capacity

    def take(self, num_tokens: float) -> None:
        """Take tokens out, or, if less than 0, give them back."""
        now = self._clock()
        elapsed, self._time = max(0.0, now - self._time), now
        self._level = min(self._capacity, self._level + elapsed * self._capacity / 60) - num_tokens


class NoBucket:
    """No quota of tokens."""

    def seconds(self) -> float:
        return 0.0

    def take(self, num_tokens: float) -> None:
        pass


@dataclass(slots=True)
class Counts:
    """What an account has had since the engine's start; several that are not shown by name share one."""

    num_requests: int = 0
    num_rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Payer(Account):
    """The account of one tenant, or of all requests that name none, with its quotas."""

    __slots__ = ("bucket", "counts", "num_open")

    def __init__(self, name: str, terms: Tenant, counts: Counts, clock: Clock) -> None:
        super().__init__(name, terms)
        limit = terms.tokens_per_minute
        self.bucket = NoBucket() if limit is None else TokenBucket(limit, clock)
        self.counts = counts
        self.num_open = 0  # requests that have not ended

    def check_quota(self, num_queued: int) -> None:
        """Raise QuotaExceededError if another request is over a quota. ``num_queued``: of its requests that wait."""
        most, quota, seconds = self.terms.max_waiting, "tokens_per_minute", self.bucket.seconds()
        if most is not None and num_queued >= most:
            quota, seconds = "max_waiting", max(1.0, seconds)
        if seconds:
            self.counts.num_rejected += 1
            limit = getattr(self.terms, quota)
            text = f"the quota of {self.name or 'requests without a tenant'!r:.80} is used up ({quota}={limit})"
            raise QuotaExceededError(f"{text}: try again in about {seconds:.1f} s", retry_after=seconds, quota=quota)

    def begin(self) -> None:
        """Note that a request was accepted."""
        self.num_open += 1
        self.counts.num_requests += 1

    def end(self, usage: Usage, num_reserved: int, keep: float) -> None:
        """Note that a request has ended, of which so many tokens were taken from the quota, and whose KV is kept for
        ``keep`` seconds."""
        self.num_open -= 1
        counts, total = self.counts, usage.prompt_tokens + usage.completion_tokens
        counts.prompt_tokens += usage.prompt_tokens
        counts.cached_tokens += usage.cached_tokens
        counts.generated_tokens += usage.completion_tokens
        self.bucket.take(total - num_reserved)
        self.charge_kept(total, keep)


def num_expected(prompt: PromptPart, params: SamplingParams, max_model_len: int) -> int:
    """Return how many tokens a request takes from its quota, as far as can be said before it is prepared."""
    num_prompt = 0
    if isinstance(prompt, TokensPart):
        num_prompt = len(prompt.token_ids)
    elif isinstance(prompt, TextPart):
        num_prompt = len(prompt.text) // _CHARACTERS_PER_TOKEN
    most = max(0, max_model_len - num_prompt)
    return num_prompt + params.n * min(most, _UNKNOWN_OUTPUT if params.max_tokens is None else params.max_tokens)


class Accounts:
    """The accounts of an engine, on its loop."""

    def __init__(
        self, tenants: Mapping[str, Tenant], replicas: Iterable[Replica], clock: Clock = time.monotonic
    ) -> None:
        """``clock``: seconds that only grow; one that is set back does no harm."""
        self._tenants = tenants
        self._replicas = replicas
        self._clock = clock
        self._share = FairShare()
        self._is_shared = False
        self._shown: dict[str, Counts] = {}
        self._others = Counts()
        self._named = {name: self._new(name) for name in tenants if name != OTHERS}
        self._remembered: OrderedDict[str, Payer] = OrderedDict()
        self._nameless = self._new("")
        if tenants:
            self._begin_sharing()

    def _new(self, name: str) -> Payer:
        counts = self._shown.get(name)
        if counts is None and name != OTHERS and len(self._shown) < MAX_SHOWN_TENANTS:
            counts = self._shown[name] = Counts()
        terms = self._tenants.get(name) or self._tenants.get(OTHERS) or Tenant()
        return Payer(name, terms, counts or self._others, self._clock)

    def _begin_sharing(self) -> None:
        self._is_shared = True
        for replica in self._replicas:
            self._share.on_room.append(replica.steps.wake)
            serve_by(replica.scheduler, FairOrder(self._share))

    def of(self, name: str | None) -> Payer:
        """Return the account of a tenant; None: that of all who name none."""
        if name is None:
            return self._nameless
        if not self._is_shared:
            self._begin_sharing()
        found = self._named.get(name) or self._remembered.get(name)
        if found is None:
            found = self._remembered[name] = self._new(name)
            self._forget()
        elif name in self._remembered:
            self._remembered.move_to_end(name)
        return found

    def find(self, name: str | None) -> Payer:
        """Return the account of a tenant as far as there is one, else that of all who name none. From any thread."""
        return self._named.get(name or "") or self._remembered.get(name or "") or self._nameless

    def _forget(self) -> None:
        excess = len(self._remembered) - MAX_REMEMBERED_TENANTS
        for name, account in list(self._remembered.items())[: max(0, excess)]:
            if not account.num_open:
                del self._remembered[name]

    def statistics(self) -> tuple[TenantStatistics, ...]:
        """See `Statistics.tenants`."""
        live = [*self._named.values(), *self._remembered.values()]
        live = [*live, self._nameless] if live else []
        rows: dict[int, list[Payer]] = {}
        for account in live:
            rows.setdefault(id(account.counts), []).append(account)
        shown = [(name, counts) for name, counts in self._shown.items() if live] + [(OTHERS, self._others)] * bool(
            self._others.num_requests
        )
        return tuple(
            TenantStatistics(
                name=name,
                num_running=sum(one.num_running for one in rows.get(id(counts), ())),
                num_open=sum(one.num_open for one in rows.get(id(counts), ())),
                num_requests=counts.num_requests,
                num_rejected=counts.num_rejected,
                prompt_tokens=counts.prompt_tokens,
                cached_tokens=counts.cached_tokens,
                generated_tokens=counts.generated_tokens,
            )
            for name, counts in shown
        )
