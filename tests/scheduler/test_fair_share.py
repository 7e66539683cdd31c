"""Accounts share what steps compute by their weights, whoever asks more often; nobody is starved, nothing is wasted."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from scheduler_harness import Driver
from scheduler_invariants import check_scheduler

from aengine.engine.scheduler.request import Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler, serve_by
from aengine.engine.scheduler.waiting_queue import ServingOrder
from aengine.engine.tenants.fair_share import OUTPUT_COST, Account, FairOrder, FairShare
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, int32
from aengine.limits.tenants import Tenant
from aengine.outputs import FinishReason
from aengine.params import SamplingParams

PARAMS = SamplingParams(ignore_eos=True)


class Served:
    """A scheduler with one step in flight whose worker answers at once, and what it has served to each account."""

    def __init__(self, *names: str, order: ServingOrder | None = None, **limits: Any) -> None:
        terms = {name.partition("=")[0]: Tenant(weight=float(name.partition("=")[2] or 1)) for name in names}
        self.accounts = {name: Account(name, one) for name, one in terms.items()}
        limits = {"num_blocks": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096} | limits
        self.scheduler = Scheduler(kv_groups=[KVCacheGroup("full", 16)], max_in_flight_steps=1, **limits)
        serve_by(self.scheduler, order or FairOrder(FairShare()))
        self.begun: list[Request] = []
        self.cost: Counter[str] = Counter()  # of what was computed for the first time
        self.running: Counter[str] = Counter()  # rows in the last step
        self._done: Counter[Request] = Counter()
        self._num_added = 0

    def add(self, name: str, num_prompt: int = 20, num_output: int = 8, **more: Any) -> Request:
        self._num_added += 1
        prompt = [self._num_added, *range(1, num_prompt)]
        account = self.accounts[name]
        limits = {"seed": 0, "max_num_tokens": num_prompt + num_output, "stop_token_ids": frozenset()}
        arrival = {"arrival_time": float(self._num_added), "account": account}
        request = Request(f"{name}-{self._num_added}", prompt, PARAMS, **limits | arrival | more)
        self.scheduler.add_request(request)
        return request

    def step(self) -> bool:
        scheduler = self.scheduler
        output = scheduler.schedule()
        if output is None:
            return False
        step = scheduler.newest_step
        assert step is not None
        self.begun += step.newcomers
        self.running = Counter(request.account.name for request in scheduler.rows.running)
        self.is_full = not scheduler.rows.num_free
        self.served_last = sum(output.num_scheduled_tokens)
        known = [request.num_computed_tokens >= len(request.token_ids) for request in step.batch]
        for request in step.batch:
            done, self._done[request] = self._done[request], max(self._done[request], request.num_computed_tokens)
            of_prompt = min(self._done[request], request.num_prompt_tokens) - min(done, request.num_prompt_tokens)
            self.cost[request.account.name] += of_prompt + OUTPUT_COST * (self._done[request] - done - of_prompt)
        scheduler.update(ModelRunnerOutput(output.step_id, int32([7 if samples else -1 for samples in known])))
        check_scheduler(scheduler)
        return True

    def waits(self, name: str) -> int:
        return sum(request.account.name == name for request in self.scheduler.waiting)


def test_nobody_falls_behind_by_more_than_a_batch(rng: random.Random) -> None:
    """As VTC proves: of two who always have something waiting, neither gets more than the other by more than what the
    rows and one more request cost, however many or large its requests are."""
    served = Served("few", "flood", max_num_batched_tokens=48)
    bound = (8 + 1) * (96 + 24 * OUTPUT_COST)
    for _ in range(200):
        served.add("flood", rng.randint(1, 96), rng.randint(1, 24))
    for _ in range(1200):
        while served.waits("few") < 9:  # more than can get a row in one step
            served.add("few", rng.randint(1, 16), rng.randint(1, 4))
        while served.waits("flood") < 100:
            served.add("flood", rng.randint(1, 96), rng.randint(1, 24))
        assert served.step()
        assert abs(served.cost["few"] - served.cost["flood"]) <= bound
    assert served.cost["few"] > 10 * bound


def test_weights_divide_what_is_served(rng: random.Random) -> None:
    served = Served("one", "three=3")
    for _ in range(1500):
        for name in ("one", "three"):
            while served.waits(name) < 4:
                served.add(name, rng.randint(1, 40), rng.randint(1, 12))
        served.step()
    assert served.cost["three"] / served.cost["one"] == pytest.approx(3, rel=0.1)


def test_who_asks_seldom_is_next_when_a_row_is_free() -> None:
    served = Served("flood", "seldom")
    for _ in range(200):
        served.add("flood", num_output=40)
    for _ in range(100):
        served.step()
    for _ in range(5):
        request = served.add("seldom")
        num_begun = len(served.begun)
        while not request.has_begun:
            served.step()
        assert served.begun[num_begun] is request, "another got the first free row"
        while request.finish_reason is None:
            served.step()


def test_nobody_saves_up_by_being_idle() -> None:
    served = Served("idle", "busy")
    for _ in range(600):
        served.add("busy", num_output=4)
    for _ in range(100):
        served.step()
    for _ in range(100):
        served.add("idle", num_output=4)
    before = served.cost["busy"]
    for _ in range(60):
        served.step()
    assert served.cost["idle"] == pytest.approx(served.cost["busy"] - before, rel=0.3)


def test_who_is_held_by_a_quota_saves_nothing_up_either() -> None:
    """Its counter stands still meanwhile; a third who comes is not put before one who has gone on."""
    served = Served("held", "busy", "late")
    served.accounts["held"].terms = Tenant(max_running=1)
    for _ in range(50):
        served.add("held", num_output=100)
        served.add("busy", num_output=4)
    for _ in range(100):
        served.step()
    for _ in range(50):
        served.add("busy", num_output=4)
        served.add("late", num_output=4)
    before = Counter(served.cost)
    for _ in range(60):
        served.step()
    gained = served.cost - before
    assert gained["late"] == pytest.approx(gained["busy"], rel=0.3)


@pytest.mark.parametrize("most", [1, 3])
def test_a_quota_of_rows_lets_others_go_past(most: int) -> None:
    served = Served("flood", "other")
    served.accounts["flood"].terms = Tenant(max_running=most)
    for _ in range(20):
        served.add("flood")
    others = [served.add("other") for _ in range(20)]
    seen = 0
    while served.step():
        assert served.running["flood"] <= most
        seen = max(seen, served.running["flood"])
    assert seen == most and all(request.finish_reason for request in others)
    assert not served.scheduler.num_waiting, "those over the quota were forgotten"


def test_rows_are_full_while_somebody_waits(rng: random.Random) -> None:
    """Sharing takes no longer for all together than serving in order of arrival."""
    load = [(rng.choice("aaaab"), rng.randint(1, 60), rng.randint(1, 20)) for _ in range(120)]
    num_steps = []
    for order in (ServingOrder(), FairOrder(FairShare())):
        served = Served("a", "b", order=order)
        for one in load:
            served.add(*one)
        count = 0
        while served.step():
            count += 1
            assert served.is_full or served.served_last == 64 or not served.scheduler.waiting
        num_steps.append(count)
    assert num_steps[1] <= 1.1 * num_steps[0]


def test_within_an_account_the_order_is_as_before(rng: random.Random) -> None:
    served = Served("a", "b", max_num_batched_tokens=16)
    for _ in range(60):
        served.add(rng.choice("ab"), rng.randint(1, 30), rng.randint(1, 9), priority=rng.choice([-1, 0, 0, 1]))
    while served.step():
        pass
    for name in "ab":
        own = [request.sort_key for request in served.begun if request.account.name == name]
        assert own == sorted(own)


def test_priority_does_not_put_one_account_before_another() -> None:
    served = Served("pushy", "polite", max_num_seqs=2)
    for _ in range(30):
        served.add("pushy", priority=-100)
    late = [served.add("polite", priority=100) for _ in range(5)]
    for _ in range(60):
        served.step()
    assert all(request.finish_reason is not None for request in late)


def test_a_long_prompt_leaves_room_to_who_waits() -> None:
    """A prompt of 4,000 tokens would have whole steps of 64 to itself; a short one of another account does not wait."""
    served = Served("long", "short")
    long = served.add("long", 4000)
    for _ in range(5):
        served.step()
    short = served.add("short", 20, 1)
    served.step()
    served.step()
    assert short.finish_reason is not None and long.status is RequestStatus.CATCHING_UP


def test_two_long_prompts_are_computed_side_by_side() -> None:
    served = Served("first", "second")
    first, second = served.add("first", 2000, 1), served.add("second", 2000, 1)
    for _ in range(30):
        served.step()
    computed = first.num_computed_tokens, second.num_computed_tokens
    assert sum(computed) == 30 * 64, "room of steps was wasted"
    assert abs(computed[0] - computed[1]) <= 128


def test_blocks_are_taken_from_who_has_had_most() -> None:
    """The pool is too small for all: the one who asks little keeps its blocks though it came last."""
    served = Served("flood", "little", num_blocks=40, max_num_batched_tokens=256)
    for _ in range(7):
        served.add("flood", 60, 100)
    for _ in range(4):
        served.step()
    little = served.add("little", 16, 100, priority=5)
    while little.finish_reason is None:
        assert served.step()
        assert not little.is_preempted
    assert served.scheduler.rows.num_preemptions > 0


def test_what_is_computed_again_is_not_charged_again() -> None:
    served = Served("a", num_blocks=24, max_num_batched_tokens=256)
    requests = [served.add("a", 40, 100) for _ in range(6)]
    while served.step():
        pass
    assert served.scheduler.rows.num_preemptions > 0
    assert all(request.num_charged < request.max_num_tokens for request in requests)
    alone = Served("a")
    for _ in range(6):
        alone.add("a", 40, 100)
    while alone.step():
        pass
    assert served.accounts["a"].counter == pytest.approx(alone.accounts["a"].counter)


def test_what_is_found_in_the_cache_costs_less() -> None:
    served = Served("a", "b")
    common = list(range(1, 200))
    for name in "ab":
        for index in range(4):
            request = Request(
                f"{name}{index}",
                [*common, 300 + index] if name == "a" else [400 + index, *common],
                PARAMS,
                seed=0,
                max_num_tokens=202,
                stop_token_ids=frozenset(),
                account=served.accounts[name],
            )
            served.scheduler.add_request(request)
            while request.finish_reason is None:
                served.step()
    assert served.accounts["a"].counter < 0.5 * served.accounts["b"].counter


def test_two_schedulers_share_the_counters() -> None:
    """With several replicas an account's rows and cost are those of all."""
    share, account, woken = FairShare(), Account("a", Tenant(max_running=3)), []
    share.on_room.append(lambda: woken.append(True))
    drivers = [Driver(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64) for _ in range(2)]
    for driver in drivers:
        serve_by(driver.scheduler, FairOrder(share))
        for _ in range(3):
            driver.add([1, 2, 3], max_tokens=4, min_tokens=4, account=account)
        driver.schedule()
    assert [driver.scheduler.num_running for driver in drivers] == [3, 0]
    assert not drivers[1].scheduler.waiting and len(drivers[1].scheduler.waiting) == 3
    while not woken:
        drivers[0].schedule()
        for request in list(drivers[0].scheduler.rows.running):
            drivers[0].scheduler.finish(request, FinishReason.ABORT)
    drivers[1].schedule()
    assert drivers[1].scheduler.num_running == 3
