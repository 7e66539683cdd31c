"""Who asks an engine: accounts and their quotas, places in queues, turns in pools of threads."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aengine import EngineConfig, InvalidRequestError, QuotaExceededError, SamplingParams, Tenant
from aengine.engine.adapters.slots import Lora, LoraSlots
from aengine.engine.admission_queue import AdmissionQueue
from aengine.engine.tenants.accounts import Accounts, Counts, Payer, TokenBucket, num_expected
from aengine.engine.threads.pools import ThreadPool
from aengine.engine.threads.turns import Places, Turns, acting_for
from aengine.engine.tokenizer.prompt import TextPart, TokensPart
from aengine.errors import EngineOverloadedError
from aengine.limits.bounds import MAX_REMEMBERED_TENANTS
from aengine.limits.tenants import checked_tenants
from aengine.outputs import Usage
from aengine.telemetry.metrics import MAX_SHOWN_TENANTS, Counters


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def payer(name: str = "a", clock: Any = time.monotonic, **terms: Any) -> Payer:
    return Payer(name, Tenant(**terms), Counts(), clock)


# -- the setting


@pytest.mark.parametrize("weight", [0, -1, -0.0, math.nan, math.inf, -math.inf, 1e-9, 1e9, "2", None, True, 10**400])
def test_a_weight_is_a_number_within_bounds(weight: Any) -> None:
    with pytest.raises(InvalidRequestError, match="weight"):
        Tenant(weight=weight)
    with pytest.raises(InvalidRequestError, match="weight") as caught:
        EngineConfig(model="tiny", tenants={"a": {"weight": weight}})
    assert caught.value.param == "tenants"


@pytest.mark.parametrize("name", ["max_running", "max_waiting", "tokens_per_minute"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, 2**53, math.nan])
def test_a_quota_is_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        Tenant(**{name: value})


@pytest.mark.parametrize(
    "wrong", [[], 3, {"": Tenant()}, {"x" * 1025: Tenant()}, {3: Tenant()}, {"\ud800": Tenant()}, {"a": 3}, {"a": None}]
)
def test_what_is_no_mapping_of_tenants_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig(model="tiny", tenants=wrong)
    assert caught.value.param == "tenants"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="max_runing.*did you mean.*max_running"):
        EngineConfig(model="tiny", tenants={"a": {"max_runing": 3}})


def test_tenants_are_read_from_a_file_and_go_to_workers_and_back(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.acme]\nweight = 2\nmax_running = 16\n[tenants."*"]\ntokens_per_minute = 1000\n')
    config = EngineConfig(model="tiny", tenants=str(file))
    assert config.tenants == {"acme": Tenant(weight=2, max_running=16), "*": Tenant(tokens_per_minute=1000)}
    assert EngineConfig.from_wire(config.to_wire()).tenants == config.tenants


@pytest.mark.parametrize(
    "content", [b"secret = [", b"\xff\xfe secret", b"tenants = 3 # secret", b"[tenants]\na = 'secret'"]
)
def test_a_bad_file_is_refused_without_what_is_in_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tenants.toml"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError) as caught:
        checked_tenants(file)
    assert caught.value.param == "tenants"
    if b"tenants" not in content:
        assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="No such file"):
        checked_tenants(str(tmp_path / "nowhere"))


# -- quotas


def test_tokens_come_back_by_the_minute() -> None:
    clock = Clock()
    bucket = TokenBucket(600, clock)
    assert bucket.seconds() == 0
    bucket.take(700)
    assert bucket.seconds() == pytest.approx(101 / 10)
    clock.now += 5
    assert bucket.seconds() == pytest.approx(51 / 10)
    clock.now += 5.2
    assert bucket.seconds() == 0
    clock.now += 3600
    bucket.take(600)
    assert bucket.seconds() > 0, "more was saved up than the quota of a minute"


def test_what_was_not_needed_is_given_back() -> None:
    one = payer(tokens_per_minute=100)
    one.begin()
    one.bucket.take(1000)
    with pytest.raises(QuotaExceededError):
        one.check_quota(0)
    one.end(Usage(prompt_tokens=20, completion_tokens=5), 1000, 0.0)
    one.check_quota(0)


def test_a_clock_that_is_set_back_does_no_harm(rng: random.Random) -> None:
    clock = Clock()
    bucket = TokenBucket(600, clock)
    bucket.take(900)
    for _ in range(50):
        clock.now -= rng.random() * 1000
        assert 0 <= bucket.seconds() <= 31
    waited = 0.0
    while (seconds := bucket.seconds()) and waited < 60:
        clock.now += seconds
        waited += seconds
    assert waited == pytest.approx(301 / 10)


def test_a_quota_is_an_error_that_says_when_to_come_again() -> None:
    one = payer("acme", Clock(), tokens_per_minute=60, max_waiting=3)
    one.bucket.take(89)
    with pytest.raises(QuotaExceededError, match="'acme' is used up.*tokens_per_minute=60") as caught:
        one.check_quota(0)
    assert isinstance(caught.value, EngineOverloadedError)
    assert caught.value.retry_after == pytest.approx(30) and caught.value.quota == "tokens_per_minute"
    with pytest.raises(QuotaExceededError) as caught:
        payer(max_waiting=3).check_quota(3)
    assert caught.value.quota == "max_waiting"
    assert one.counts.num_rejected == 1


def test_a_request_takes_what_it_may_need() -> None:
    assert num_expected(TokensPart([1, 2, 3]), SamplingParams(max_tokens=10, n=2), 1000) == 23
    assert num_expected(TextPart("x" * 400), SamplingParams(), 1000) == 100 + 256
    assert num_expected(TokensPart([1, 2, 3]), SamplingParams(max_tokens=10**9), 1000) == 1000, "more has no room"


# -- the queue


def line_of(limit: int, *, wait: bool = True) -> AdmissionQueue:
    return AdmissionQueue(limit, Counters(), wait_when_full=wait)


async def test_one_who_fills_the_queue_leaves_others_their_part() -> None:
    flood, other, third = payer("flood"), payer("other"), payer("third")
    line = line_of(8, wait=False)
    for number in range(8):
        line.check_room(flood)
        assert line.join(f"flood{number}", 0, flood, 0) is None
    with pytest.raises(EngineOverloadedError):
        line.check_room(flood)
    for number in range(4):
        line.check_room(other)
        assert line.join(f"other{number}", 0, other, 0) is None
    with pytest.raises(EngineOverloadedError):
        line.check_room(other)
    line.check_room(third)


async def test_places_are_given_by_weight_however_many_are_held() -> None:
    line, heavy, light = line_of(6), payer("heavy", weight=2), payer("light")
    turns = {}
    for account in (heavy, light):
        for number in range(30):
            turns[f"{account.name}{number}"] = line.join(f"{account.name}{number}", 0, account, 0)
    inside = [name for name, turn in turns.items() if turn is None]
    for _ in range(24):
        line.leave(inside.pop(0))
        inside += [
            name for name, turn in turns.items() if turn is not None and turn.done() and not name.startswith("x")
        ]
        turns = {name: turn for name, turn in turns.items() if turn is not None and not turn.done()}
    assert sum(name.startswith("heavy") for name in inside) in (4, 5) and len(inside) in (6, 7, 8)


async def test_who_is_held_by_a_quota_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    account = payer(tokens_per_minute=60_000)
    line = line_of(8)
    assert line.join("a", 0, account, 60_050) is None
    turn = line.join("b", 0, account, 10)
    other = line.join("c", 0, payer("other"), 10)
    assert turn is not None and not turn.done() and other is None
    await asyncio.wait_for(turn, 10)
    line.leave("b")
    assert len(line) == 2


def test_a_place_that_is_left_is_free(rng: random.Random) -> None:
    accounts = [payer(str(number), weight=rng.choice([0.5, 1, 4])) for number in range(5)]
    places, taken = Places(20), []
    for _ in range(2000):
        account = rng.choice(accounts)
        if rng.random() < 0.6:
            if places.has_room(account):
                places.take(account)
                taken.append(account)
        elif taken:
            places.leave(taken.pop(rng.randrange(len(taken))))
        assert len(places) == len(taken) and all(places.count(one) == taken.count(one) for one in accounts)
        assert len(taken) <= 20 * 3


# -- accounts


def accounts_of(**tenants: Tenant) -> Accounts:
    return Accounts(tenants, [])


def test_an_unknown_tenant_has_what_others_have() -> None:
    accounts = Accounts({"known": Tenant(weight=5), "*": Tenant(max_running=2)}, [])
    assert accounts.of("known").weight == 5
    assert accounts.of("new").terms.max_running == 2 and accounts.of(None).terms.max_running == 2
    assert accounts.of("new") is accounts.of("new") is accounts.find("new")
    assert accounts.of("new") is not accounts.of("newer")
    assert accounts.find("never") is accounts.of(None)


def test_as_many_tenants_are_remembered_as_there_is_room_for() -> None:
    accounts = accounts_of(known=Tenant())
    busy = accounts.of("busy")
    busy.begin()
    known = accounts.of("known")
    for number in range(5000):
        accounts.of(f"t{number}").begin()
        accounts.of(f"t{number}").end(Usage(1, 1), 0, 0.0)
    assert accounts.of("busy") is busy and accounts.of("known") is known
    kept = [number for number in range(5000) if accounts.find(f"t{number}") is not accounts.of(None)]
    assert len(kept) <= MAX_REMEMBERED_TENANTS and kept[-1] == 4999


def test_statistics_are_bounded_and_lose_nothing() -> None:
    accounts = accounts_of(known=Tenant())
    assert accounts_of().statistics() == ()
    for number in range(100):
        account = accounts.of(f"t{number}" if number != 50 else "*")
        account.begin()
        account.end(Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1), 0, 0.0)
    rows = {one.name: one for one in accounts.statistics()}
    assert len(rows) == MAX_SHOWN_TENANTS + 1 and {"known", "", "t0", "*"} <= rows.keys() and "t99" not in rows
    assert sum(one.num_requests for one in rows.values()) == 100
    assert sum(one.generated_tokens for one in rows.values()) == 200
    assert sum(one.cached_tokens for one in rows.values()) == 100


# -- pools


def test_turns_are_divided_by_weight() -> None:
    turns, heavy, light = Turns(), payer("heavy", weight=3), payer("light")
    order = []
    for account in (heavy, light):
        token = acting_for.set(account)
        order += [(turns.next(is_idle=False), account.name) for _ in range(40)]
        acting_for.reset(token)
    first = [name for _, name in sorted(order)[:40]]
    assert 28 <= first.count("heavy") <= 32


async def test_who_has_little_to_do_does_not_wait_for_the_work_of_others() -> None:
    """As grammars: one tenant's 200 are behind each other, and another's comes second."""
    pool, gate, done = ThreadPool("test"), threading.Event(), []
    flood, other = payer("flood"), payer("other")

    def begin(account: Payer, name: str) -> asyncio.Future[None]:
        def call() -> asyncio.Future[None]:
            acting_for.set(account)
            return pool.run(lambda: (gate.wait(), done.append(name))[0] and None)

        return contextvars.copy_context().run(call)

    waiting = [begin(flood, f"flood{number}") for number in range(200)]
    waiting += [begin(other, "other"), begin(other, "other2")]
    gate.set()
    await asyncio.gather(*waiting)
    assert done.index("other") <= 3 and done.index("other2") <= 5
    assert [name for name in done if name.startswith("flood")] == [f"flood{number}" for number in range(200)]
    await pool.aclose()


async def test_a_pool_keeps_all_work_whatever_order_it_comes_in(rng: random.Random) -> None:
    pool, accounts = ThreadPool("test", 3), [payer(str(number), weight=number + 1) for number in range(4)]
    results = []
    for number in range(400):
        token = acting_for.set(rng.choice(accounts))
        results.append(pool.run(lambda number=number: number))
        acting_for.reset(token)
        if rng.random() < 0.2:
            results.pop().cancel()
        if rng.random() < 0.05:
            await asyncio.sleep(0)
    assert sorted(await asyncio.gather(*results)) == sorted({*await asyncio.gather(*results)})
    await pool.aclose()


async def test_adapters_of_one_do_not_hold_up_those_of_another() -> None:
    """One slot, and one tenant asks for 20 adapters at once: another's is loaded second, not after them."""
    loaded: list[str] = []

    async def load(index: int, lora: Lora) -> None:
        loaded.append(lora.name)

    slots = LoraSlots(1, load)

    async def use(name: str, account: Payer) -> None:
        acting_for.set(account)
        _, leave = await slots.acquire(Lora(name, None, 0))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        leave()

    flood, other = payer("flood"), payer("other")
    calls = [asyncio.create_task(use(f"flood{number}", flood)) for number in range(20)]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(use("other", other)))
    await asyncio.wait_for(asyncio.gather(*calls), 20)
    assert loaded.index("other") <= 2 and len(loaded) == 21
    assert [name for name in loaded if name != "other"] == [f"flood{number}" for number in range(20)]
