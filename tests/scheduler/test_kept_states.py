"""States are kept where the next prompts go on: how much they find, and what it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from scheduler_invariants import check_scheduler

from aengine.engine.scheduler.prefixes.kept_states import GUESSES
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import STATE_BLOCK_SIZE, KVCacheGroup, ModelRunnerOutput, SchedulerOutput, int32
from aengine.params import SamplingParams

STATE = KVCacheGroup("state", STATE_BLOCK_SIZE)
QWEN3_NEXT = [STATE] * 6 + [KVCacheGroup("full", 528)]
LFM2 = [STATE, KVCacheGroup("full", 16), KVCacheGroup("full", 16)]


def make_scheduler(groups: Sequence[KVCacheGroup], num_blocks: int = 4096) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8192, "max_model_len": 16384}
    return Scheduler(num_blocks=num_blocks, kv_groups=groups, **limits)


def ask(scheduler: Scheduler, prompt: list[int]) -> tuple[int, list[SchedulerOutput]]:
    """How many tokens it found, and its steps."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    limits = {"max_num_tokens": len(prompt) + 1, "stop_token_ids": frozenset[int]()}
    request = Request("", prompt, params, seed=0, **limits)  # type: ignore[arg-type]
    scheduler.add_request(request)
    steps = []
    while (out := scheduler.schedule()) is not None:
        steps.append(out)
        is_last = request.num_computed_tokens >= len(prompt)
        scheduler.update(ModelRunnerOutput(out.step_id, int32([7 if is_last else -1])))
    check_scheduler(scheduler)
    return request.num_cached_tokens, steps


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 50_000) for _ in range(count)]


@pytest.mark.parametrize("groups", [QWEN3_NEXT, LFM2], ids=["qwen3-next", "lfm2"])
@pytest.mark.parametrize("most", [100, 400])
def test_a_hundred_questions_behind_one_instruction(groups: list[KVCacheGroup], most: int, rng: random.Random) -> None:
    """Each finds nine tenths of the instruction, from the second on, in one step a prompt."""
    for _ in range(3):
        scheduler, instruction = make_scheduler(groups), tokens(rng, 4000)
        found = []
        for _ in range(100):
            num_found, steps = ask(scheduler, instruction + tokens(rng, rng.randint(20, most)))
            assert len(steps) == 1, "a prompt was cut"
            found.append(min(num_found, 4000) / 4000)
        assert found[0] == 0 and min(found[1:]) >= 0.9, min(found[1:])


def test_how_far_a_long_question_is_computed_again(rng: random.Random) -> None:
    """Of what two prompts have in common, as much as the first one has of its own, and a block: if that is 512 tokens,
    or an eighth."""
    for count, length in ((5000, 20), (5000, 300), (5000, 500), (10000, 1000), (14000, 900)):
        scheduler, common = make_scheduler(LFM2), tokens(rng, count)
        ask(scheduler, common + tokens(rng, length))
        num_found, _ = ask(scheduler, common + tokens(rng, 50))
        assert count - max(length, 256) - 16 <= num_found <= count


def test_the_third_finds_all_that_is_common(rng: random.Random) -> None:
    scheduler, common = make_scheduler(LFM2), tokens(rng, 5000)
    found = [ask(scheduler, common + tokens(rng, 300))[0] for _ in range(3)]
    assert found[0] == 0 < found[1] < found[2] == 5000 - 5000 % 16


def test_guesses_give_way_to_newer_ones(rng: random.Random) -> None:
    """Prompts of which nothing is seen again leave no more than a share of the pool; another is found all along."""
    scheduler = make_scheduler(LFM2, num_blocks=4096)
    common = tokens(rng, 1000)
    ask(scheduler, common + tokens(rng, 300))
    assert ask(scheduler, common + tokens(rng, 300))[0] > 0
    for _ in range(200):
        ask(scheduler, tokens(rng, 1200))
        assert scheduler.rows.kv.states.num_guesses <= 4096 // GUESSES
        assert ask(scheduler, common + tokens(rng, 30))[0] == 992


def test_a_guess_is_not_saved_before_somebody_has_found_it(rng: random.Random) -> None:
    scheduler = make_scheduler([STATE, KVCacheGroup("full", 512)])
    saved: list[int] = []
    scheduler.rows.kv.pool.on_offer = lambda block_id, name: saved.append(block_id)
    common = tokens(rng, 4000)
    ask(scheduler, common + tokens(rng, 300))
    assert len(saved) == 8 + 1, "blocks of 512 tokens, and the states behind the last"
    ask(scheduler, common + tokens(rng, 30))
    assert len(saved) == 8 + 2, "and those that were found"


def test_no_guess_takes_room_that_others_need_soon(rng: random.Random) -> None:
    """Beside the 18 blocks of the prompt and the states behind its last border an eighth of the pool must be left."""
    for num_blocks, found in ((21, 0), (40, 768)):
        scheduler, common = make_scheduler([STATE, KVCacheGroup("full", 64)], num_blocks), tokens(rng, 800)
        long = common + tokens(rng, 250)
        assert [ask(scheduler, long)[0] for _ in range(2)] == [0, 1024]
        assert ask(scheduler, common + tokens(rng, 20))[0] == found


def test_a_small_pool_has_few_guesses(rng: random.Random) -> None:
    scheduler = make_scheduler(QWEN3_NEXT, num_blocks=60)
    ask(scheduler, tokens(rng, 6000))
    assert scheduler.rows.kv.states.num_guesses == 60 // GUESSES // 6 == 1
