"""The two phases over a fake model whose logits depend on every token, position and slot."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from runner_fakes import POOLED, ConstantModel, FakeModel, expected_logits, make_runner, request, step

from aengine.errors import InternalError
from aengine.ipc.messages import GrammarOutput, SchedulerOutput, int32
from aengine.runner.model_runner import ModelRunner
from aengine.runner.pooling.vectors import VectorLayers
from aengine.runner.sampling.features import penalties
from aengine.runner.sampling.logprob_modes import LOGPROBS_MODES

VOCAB = 97


def fake_runner(**limits: Any) -> tuple[ModelRunner, FakeModel]:
    model = FakeModel(VOCAB, limits.get("num_blocks", 40), limits.get("block_size", 4))
    return make_runner(model, VOCAB, **limits), model


def greedy(token_ids: list[int]) -> int:
    return int(expected_logits(token_ids, VOCAB).argmax())


def grow(token_ids: list[int], count: int) -> list[int]:
    """token_ids, and what greedy sampling appends."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(greedy(ids))
    return ids


def test_decode_reads_what_was_sampled() -> None:
    runner, _ = fake_runner()
    prompt = [5, 6, 7, 8, 9]
    wanted = grow(prompt, 6)
    got = [*step(runner, {3: 5}, new=[request(3, prompt, [9, 2, 30])]).token_ids]
    got += [step(runner, {3: 1}).token_ids[0] for _ in range(5)]
    assert prompt + got == wanted


def test_chunks_sample_only_at_the_end_and_blocks_grow() -> None:
    runner, _ = fake_runner()
    prompt = list(range(10, 21))
    outputs = [step(runner, {0: 3}, new=[request(0, prompt, [7])])]
    outputs.append(step(runner, {0: 6}, more_blocks=[(0, 1), (0, 39)]))
    outputs.append(step(runner, {0: 2}))
    outputs.append(step(runner, {0: 1}))
    outputs.append(step(runner, {0: 1}, more_blocks=[(0, 0)]))
    assert [o.token_ids[0] for o in outputs] == [-1, -1, *grow(prompt, 3)[len(prompt) :]]


class DeviceEvent:
    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        assert self.is_over, "the host waits"


def test_a_chunk_that_samples_nothing_is_done_when_it_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it was launched: as many chunks as there are would be on the device at once, and each would seem to take
    no time, until the last one seems to hang."""
    runner, _ = fake_runner()
    event = DeviceEvent()
    monkeypatch.setattr(type(runner.platform), "record_event", lambda self: event)
    runner.execute_model(
        SchedulerOutput(
            1,
            new_requests=[request(0, [1, 2, 3, 4, 5], [7, 8])],
            req_idx=int32([0]),
            num_scheduled_tokens=int32([3]),
        )
    )
    answer = runner.sample_tokens(None)
    assert not answer.ready()
    event.is_over = True
    assert answer.ready() and list(answer.get().token_ids) == [-1]


def test_prefix_hit_uses_the_blocks_of_another() -> None:
    runner, _ = fake_runner()
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 50, 51]
    step(runner, {0: 9}, new=[request(0, first, [10, 11, 12])])
    out = step(runner, {1: 2, 0: 1}, new=[request(1, second, [10, 11, 13], num_computed_tokens=8)])
    assert list(out.token_ids) == [greedy(second), grow(first, 2)[-1]]


def test_resume_after_preemption_goes_on() -> None:
    runner, _ = fake_runner()
    prompt = [40, 41, 42]
    wanted = grow(prompt, 8)
    step(runner, {5: 3}, new=[request(5, prompt, [0, 1])])
    step(runner, {5: 1})
    step(runner, removed=[5])  # a step without requests
    # Back in another row, with the tokens it had.
    resumed = request(2, wanted[:5], [20, 21, 22], num_prompt_tokens=3)
    got = [step(runner, {2: 5}, new=[resumed]).token_ids[0]] + [step(runner, {2: 1}).token_ids[0] for _ in range(5)]
    assert wanted[:5] + got == wanted


def test_a_row_is_freed_and_taken_in_one_step() -> None:
    runner, _ = fake_runner()
    step(runner, {0: 30}, new=[request(0, [3] * 30, range(8))])
    out = step(runner, {0: 2}, removed=[0], new=[request(0, [8, 9], [4])])
    assert out.token_ids[0] == greedy([8, 9])
    assert step(runner, {0: 1}).token_ids[0] == grow([8, 9], 2)[-1]


def test_empty_and_remove_only_steps() -> None:
    runner, _ = fake_runner()
    out = step(runner, step_id=12)
    assert (out.step_id, list(out.token_ids), out.logprobs, out.errors) == (12, [], None, [])
    step(runner, {0: 1}, new=[request(0, [1], [0])])
    assert list(step(runner, removed=[0], step_id=13).token_ids) == []
    step(runner, new=[request(0, [1], [0])])  # added now, computed later
    assert list(step(runner, {0: 1}).token_ids) == [greedy([1])]


def test_phases_must_alternate() -> None:
    runner, _ = fake_runner()
    with pytest.raises(InternalError, match="execute_model comes first"):
        runner.sample_tokens(None)
    runner.execute_model(SchedulerOutput(1))
    with pytest.raises(InternalError, match="step 2 came before step 1 was sampled"):
        runner.execute_model(SchedulerOutput(2))
    with pytest.raises(InternalError, match="bitmask of step 5 came for step 1"):
        runner.sample_tokens(GrammarOutput(5, int32(), b""))


@pytest.mark.parametrize(
    "batch, fields, message",
    [
        ({7: 1}, {}, "no request"),
        ({99: 1}, {}, "no request"),
        ({0: 0}, {}, "no token"),
        ({0: 4}, {}, "not known"),
        ({0: 3}, {"blocks": []}, "needs room"),
        ({0: 3}, {"blocks": [40]}, "outside"),
        ({0: 3}, {"blocks": [-1]}, "outside"),
        ({0: 3}, {"blocks": range(17)}, "holds 16"),
        ({0: 3}, {"row": 8}, "8 rows"),
        ({0: 3}, {"ids": [1] * 65}, "holds 64"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(batch: dict[int, int], fields: dict, message: str) -> None:
    runner, _ = fake_runner()
    new = request(fields.get("row", 0), fields.get("ids", [1, 2, 3]), fields.get("blocks", [0]))
    with pytest.raises(InternalError, match=message):
        step(runner, batch, new=[new])


@pytest.mark.parametrize("pair", [[0, 40], [-1, 0]])
def test_pages_that_are_not_there_are_not_copied(pair: list[int]) -> None:
    runner, _ = fake_runner()
    with pytest.raises(InternalError, match="to be copied"):
        runner.execute_model(SchedulerOutput(1, page_copies=int32(pair)))


def test_a_row_in_use_is_not_taken_and_a_free_one_not_freed() -> None:
    runner, _ = fake_runner()
    step(runner, {0: 1}, new=[request(0, [1], [0])])
    with pytest.raises(InternalError, match="still has"):
        step(runner, {0: 1}, new=[request(0, [1], [0])])
    with pytest.raises(InternalError, match="has no request"):
        step(runner, removed=[3])


def test_invalid_token_ids_fail_their_request_only() -> None:
    runner, _ = fake_runner()
    new = [
        request(0, [5, VOCAB, 6], [0]),
        request(1, [5, 6], [1]),
        request(2, [-3], [2]),
        request(3, [4], [3], logit_bias={VOCAB + 5: 1.0}),
    ]
    out = step(runner, {3: 1, 0: 2, 1: 2, 2: 1}, new=new)  # row 0: a chunk
    assert list(out.token_ids) == [-1, -1, greedy([5, 6]), -1]
    assert [(e.batch_idx, e.type) for e in out.errors] == [(i, "InvalidRequestError") for i in (0, 1, 3)]
    assert f"token id {VOCAB}," in out.errors[1].message and "logit_bias" in out.errors[0].message
    # A step that was already on its way still computes them; then the row is good again.
    assert len(step(runner, {0: 1, 1: 1}).errors) == 1
    assert step(runner, {0: 1}, removed=[0], new=[request(0, [7], [0])]).errors == []


@pytest.mark.parametrize(
    ("extras", "text"),
    [
        ({"logit_bias": [b"1234"]}, "1 columns instead of 2"),
        ({"logit_bias": [b"1234", b"123"]}, "ends within a number"),
        ({"logit_bias": [b"1234", b""]}, "1 tokens and 0 numbers"),
        ({"logit_bias": [bytes(4 * 1025)] * 2}, "1025 tokens"),
        ({"logit_bias": [b""] * 2, "colour": [b"red"]}, "has colour, which no feature"),
        ({"allowed_token_ids": [b""]}, "is empty"),
        ({"bad_words": [int32([0]).tobytes(), b""]}, "0 tokens, which are not 1 sequences"),
        ({"bad_words": [int32([2, 1]).tobytes(), int32([1, 2]).tobytes()]}, "2 tokens, which are not 2 sequences"),
        ({"bad_words": [int32([33]).tobytes(), int32(range(33)).tobytes()]}, "33 tokens, which are not"),
        ({"bad_words": [b"", b""]}, "0 tokens, which are not 0"),
        ({"pooling": [b"", bytes(8)]}, "2 numbers instead of 1"),
        ({"pooling": [bytes(3) + b"1", bytes(4)]}, "names token id"),
    ],
)
def test_extras_that_no_feature_can_read_fail_their_request_only(extras: dict[str, list[bytes]], text: str) -> None:
    runner, _ = fake_runner()
    torn, good = request(0, [5, 6], [0]), request(1, [5, 6], [1])
    torn.extras = extras
    out = step(runner, {0: 2, 1: 2}, new=[torn, good])
    assert list(out.token_ids) == [-1, greedy([5, 6])]
    assert [(e.batch_idx, e.type) for e in out.errors] == [(0, "InternalError")] and text in out.errors[0].message
    assert step(runner, {0: 1}, removed=[0], new=[request(0, [7], [0])]).errors == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_fail_their_request_only(temperature: float) -> None:
    runner, model = fake_runner()
    model.nan_tokens = {66}
    new = [request(i, [token], [i], temperature=temperature, logprobs=2, top_k=5) for i, token in enumerate((4, 66, 5))]
    out = step(runner, {0: 1, 1: 1, 2: 1}, new=new)
    assert out.token_ids[1] == -1 and out.token_ids[0] >= 0 and out.token_ids[2] >= 0
    assert [(e.batch_idx, e.type) for e in out.errors] == [(1, "InternalError")]
    assert "NaN" in out.errors[0].message
    assert out.logprobs is not None and list(out.logprobs.token_idx) == [0, 2]
    assert step(runner, {0: 1, 2: 1}, removed=[1]).errors == []


def test_same_seed_and_position_same_token_in_any_batch(rng: random.Random) -> None:
    """One request alone, token by token; then among others, in another row, chunked, resumed."""
    prompt, seed = [rng.randrange(VOCAB) for _ in range(9)], rng.getrandbits(63)
    how = {"temperature": 1.3, "top_p": 0.95, "seed": seed}
    runner, _ = fake_runner()
    alone = [step(runner, {0: 9}, new=[request(0, prompt, range(8), **how)]).token_ids[0]]
    alone += [step(runner, {0: 1}).token_ids[0] for _ in range(11)]
    runner, _ = fake_runner()
    others = [
        request(i, [i], range(8 * i, 8 * i + 8), temperature=i / 2, seed=i, top_k=i, repetition_penalty=1.1)
        for i in (0, 1, 2)
    ]
    new = [*others, request(6, prompt + alone[:4], range(30, 38), num_prompt_tokens=9, **how)]
    step(runner, {0: 1, 6: 5, 1: 1}, new=new)
    got = [step(runner, {2: 1, 1: 1, 6: 8, 0: 1}).token_ids[2]]
    got += [step(runner, {6: 1, 0: 1}).token_ids[0] for _ in range(7)]
    assert got == alone[4:]
    assert len(set(alone)) > 1


def test_bitmask_reaches_the_right_rows() -> None:
    runner, _ = fake_runner()
    new = [request(i, [10 + i, 20 + i], [i], temperature=i % 2, seed=i) for i in range(4)]
    out = SchedulerOutput(3, new_requests=new, req_idx=int32([2, 0, 3, 1]), num_scheduled_tokens=int32([2, 1, 2, 2]))
    out.sample_now = False
    runner.execute_model(out)
    allowed = {0: 31, 1: 5, 2: 96}  # batch positions 0 (row 2), 1 (row 0: a chunk), 2 (row 3)
    bits = np.zeros((3, 4), dtype="<u4")
    for i, token in enumerate(allowed.values()):
        bits[i, token // 32] = 1 << token % 32
    answer = runner.sample_tokens(GrammarOutput(3, int32(allowed), bits.tobytes())).get()
    alone = fake_runner()[0]
    free = step(alone, {1: 2}, new=[request(1, [11, 21], [1], temperature=1, seed=1)]).token_ids[0]
    assert list(answer.token_ids) == [31, -1, 96, free]


def test_a_bitmask_that_allows_nothing_is_an_error_of_its_request() -> None:
    for temperature in (0.0, 0.7):
        runner, _ = fake_runner()
        new = [request(i, [1], [i], temperature=temperature, top_p=0.5) for i in range(2)]
        out = SchedulerOutput(1, new_requests=new, req_idx=int32([0, 1]), num_scheduled_tokens=int32([1, 1]))
        runner.execute_model(out)
        answer = runner.sample_tokens(GrammarOutput(1, int32([1]), bytes(16))).get()
        assert answer.token_ids[0] >= 0 and answer.token_ids[1] == -1
        assert [e.batch_idx for e in answer.errors] == [1] and "forbid" in answer.errors[0].message


def test_a_bitmask_of_the_wrong_size_is_refused() -> None:
    runner, _ = fake_runner()
    new = [request(0, [1], [0])]
    runner.execute_model(SchedulerOutput(1, new_requests=new, req_idx=int32([0]), num_scheduled_tokens=int32([1])))
    with pytest.raises(InternalError, match="12 bytes"):
        runner.sample_tokens(GrammarOutput(1, int32([0]), bytes(12)))


def test_logprobs_are_the_models_own() -> None:
    runner, _ = fake_runner()
    new = [
        request(0, [3, 4], [0], logprobs=3, logit_bias={50: 100.0}),
        request(1, [5], [1]),
        request(2, [6], [2], logprobs=0, temperature=2.0, seed=9),
        request(4, [7], [3], logprobs=64, temperature=1.0, top_k=3),
    ]
    out = step(runner, {1: 1, 0: 2, 4: 1, 2: 1}, new=new)
    assert out.token_ids[1] == 50
    columns = out.logprobs
    assert columns is not None
    assert list(columns.token_idx) == [1, 2, 3] and list(columns.counts) == [3, 64, 0]
    tokens = {1: [3, 4], 2: [7], 3: [6]}
    begin = 0
    for i, batch_idx in enumerate(columns.token_idx):
        wanted = torch.log_softmax(expected_logits(tokens[batch_idx], VOCAB).double(), 0)
        assert columns.sampled[i] == pytest.approx(float(wanted[out.token_ids[batch_idx]]), abs=1e-5)
        top = wanted.sort(descending=True)
        end = begin + columns.counts[i]
        assert list(columns.token_ids[begin:end]) == top.indices[: columns.counts[i]].tolist()
        assert list(columns.values[begin:end]) == pytest.approx(top.values[: columns.counts[i]].tolist(), abs=1e-5)
        begin = end


def test_logprobs_of_what_was_drawn_from() -> None:
    """Processed ones: after bias and cutoffs, of the scaled logits; of a greedy row with temperature 1."""
    runner, _ = fake_runner(logprobs_mode=LOGPROBS_MODES["processed_logprobs"])
    new = [
        request(0, [3, 4], [0], logprobs=3, logit_bias={50: 9.0}),
        request(2, [6], [2], logprobs=0, temperature=2.0, seed=9),
        request(4, [7], [3], logprobs=5, temperature=0.5, top_k=3, seed=4),
        request(1, [8], [4], logprobs=0, temperature=0.5, top_k=1),
    ]
    out = step(runner, {0: 2, 2: 1, 4: 1, 1: 1}, new=new)
    logits = torch.stack([expected_logits(tokens, VOCAB) for tokens in ([3, 4], [6], [7], [8])]).double()
    logits[0, 50] += 9.0
    logits[2, logits[2] < logits[2].topk(3).values[-1]] = -torch.inf
    logits[3, logits[3] < logits[3].max()] = -torch.inf
    wanted = torch.log_softmax(logits / torch.tensor([[1.0], [2.0], [0.5], [0.5]]), 1)
    assert out.logprobs is not None and out.token_ids[0] == 50
    assert list(out.logprobs.sampled) == pytest.approx(
        [float(wanted[i, t]) for i, t in enumerate(out.token_ids)], abs=1e-5
    )
    few = [*wanted[0].topk(3).values.tolist(), *wanted[2].topk(5).values.tolist()]
    assert list(out.logprobs.values) == pytest.approx(few, abs=1e-5) and few[-2:] == [-torch.inf] * 2


def test_min_tokens_bans_stop_ids_until_then() -> None:
    runner, _ = fake_runner()
    prompt = [8, 9]
    stop = grow(prompt, 1)[-1]
    wanted, ids = [], list(prompt)
    for i in range(5):
        logits = expected_logits(ids, VOCAB)
        bans = [stop, 12] if i < 3 else []
        logits[bans] = -torch.inf
        ids.append(int(logits.argmax()))
        wanted.append(ids[-1])
    new = request(0, prompt, [0, 1], min_tokens=3, stop_token_ids=[stop, 12, 5000])
    got = [step(runner, {0: 2}, new=[new]).token_ids[0]] + [step(runner, {0: 1}).token_ids[0] for _ in range(4)]
    assert got == wanted and got[0] != stop


def test_penalties_follow_what_is_generated() -> None:
    """Constant logits close to each other, so that every count decides."""
    flat = torch.linspace(1.0, 2.0, VOCAB)
    runner = make_runner(ConstantModel(flat), VOCAB)
    for frequency, presence in (
        (0.3, -0.2),
        (0.05, 0.1),
    ):  # the second takes the first one's row, and none of its counts
        prompt, resumed = [1, 2, 3, 2], [96, 96]
        ids = prompt + resumed
        penalties = {"repetition_penalty": 0.9, "frequency_penalty": frequency, "presence_penalty": presence}
        new = request(1, ids, range(5), num_prompt_tokens=4, **penalties)
        got = [step(runner, {1: 6}, new=[new]).token_ids[0]] + [step(runner, {1: 1}).token_ids[0] for _ in range(10)]
        for token in got:
            logits = flat.double()
            for seen in set(ids):
                count = ids[4:].count(seen)
                logits[seen] = logits[seen] / 0.9
                logits[seen] -= frequency * count + presence * (count > 0)
            assert token == int(logits.argmax())
            ids.append(token)
        assert max(map(got.count, got)) > 1
        step(runner, removed=[1])


def test_a_row_can_be_filled_to_the_last_token_and_no_further() -> None:
    runner, _ = fake_runner(max_model_len=8)
    step(runner, {0: 6}, new=[request(0, [1] * 6, [0, 1])])
    step(runner, {0: 1})
    with pytest.raises(InternalError, match="row is full"):
        step(runner, {0: 1})


def test_a_step_that_does_not_fit_into_memory_fails_its_prompts_only() -> None:
    class Tight(FakeModel):
        def forward(self, input_ids, positions, attn):
            if len(input_ids) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much. And so on")
            return super().forward(input_ids, positions, attn)

    model = Tight(50, 40, 4)
    runner = make_runner(model, 50)
    first = step(runner, {0: 3}, new=[request(0, [1, 2, 3], [0, 1])])
    tokens = [1, 2, 3, first.token_ids[0]]
    prompts = [request(row, list(range(10)), [10 * row, 10 * row + 1, 10 * row + 2]) for row in (1, 2)]
    answer = step(runner, {1: 10, 0: 1, 2: 10}, new=prompts)
    assert [e.batch_idx for e in answer.errors] == [0, 2] and all(
        "max_num_batched_tokens" in e.message for e in answer.errors
    )
    assert list(answer.token_ids) == [-1, int(expected_logits(tokens, 50).argmax()), -1]
    tokens.append(answer.token_ids[1])
    alone = step(runner, {3: 9}, new=[request(3, list(range(9)), [31, 32, 33])])
    assert list(alone.token_ids) == [-1] and len(alone.errors) == 1
    after = step(runner, {0: 1}, removed=[1, 2, 3])
    assert list(after.token_ids) == [int(expected_logits(tokens, 50).argmax())] and not after.errors


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_step_that_is_tried_again_counts_its_tokens_once(failures: int) -> None:
    """A chunk of a prompt whose mean is wanted, beside one that samples. After two failures both prompts fail."""

    class Tight(FakeModel):
        failures = 0

        def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.float()

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            if self.failures:
                self.failures -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much. And so on")
            return super().compute_logits(hidden)

    model = Tight(50, 40, 4)
    runner = make_runner(model, 50, vectors=VectorLayers("mean"))
    pooled = request(0, list(range(1, 11)), [0, 1, 2], extras=POOLED)
    step(runner, {0: 4}, new=[pooled])
    model.failures = failures
    answer = step(runner, {0: 6, 1: 3}, new=[request(1, [7, 8, 9], [5])])
    if failures == 2:
        assert [error.batch_idx for error in answer.errors] == [0, 1] and not answer.results
        return
    assert answer.results is not None and not answer.errors
    vector = dict(answer.results.items())[0]
    assert vector[1] == 5.5, "the mean of the ids from 1 to 10"


def test_a_sampler_without_memory_fails_those_that_need_it() -> None:
    runner, _ = fake_runner()
    choose = runner.sampler._choose

    def no_memory(logits: torch.Tensor, batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much. And so on")

    new = [request(0, [1, 2, 3], [0, 1]), request(1, [4, 5], [2, 3], logprobs=2), request(2, [6, 7], [4, 5])]
    runner.sampler._choose = no_memory
    answer = step(runner, {0: 3, 1: 2, 2: 2}, new=new)
    assert [e.batch_idx for e in answer.errors] == [1] and "log-probabilities" in answer.errors[0].message
    first = int(expected_logits([1, 2, 3], VOCAB).argmax())
    assert list(answer.token_ids) == [first, -1, int(expected_logits([6, 7], VOCAB).argmax())]
    assert answer.logprobs is None
    runner.sampler._choose = choose
    after = step(runner, {0: 1}, removed=[1, 2])
    assert list(after.token_ids) == [int(expected_logits([1, 2, 3, first], VOCAB).argmax())] and not after.errors
    runner.sampler.sample_plainly = no_memory
    with pytest.raises(torch.OutOfMemoryError):  # nobody is to blame
        step(runner, {0: 1})


def test_penalties_without_memory_fail_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = fake_runner()

    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(penalties, "lazy_zeros", no_memory)
    new = [request(0, [1, 2, 3], [0, 1]), request(1, [4, 5], [2, 3], frequency_penalty=1.0)]
    answer = step(runner, {0: 3, 1: 2}, new=new)
    assert [e.batch_idx for e in answer.errors] == [1] and "penalties" in answer.errors[0].message
    assert list(answer.token_ids) == [int(expected_logits([1, 2, 3], VOCAB).argmax()), -1]
    monkeypatch.undo()
    again = step(runner, {1: 2}, removed=[0, 1], new=[request(1, [4, 5], [2, 3], frequency_penalty=1.0)])
    assert not again.errors
