"""Rows with the same blocks in the GPU's runner, its kernels in Triton's interpreter: tokens of the CPU's runner."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_gpu_path import make_runner, triton, write_model  # noqa: F401

from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.attention import shared_prefixes
from aengine.runner.model_runner import ModelRunner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_programs")]


def steps(rng: random.Random) -> list[tuple[bool, SchedulerOutput]]:
    """Whether keys are read together, and the step. The first row computes the prefix, others get its blocks; rows go,
    and come again without it."""
    prefix = [rng.randrange(300) for _ in range(48)]
    free = list(range(32))
    rng.shuffle(free)
    shared = [free.pop() for _ in range(3)]

    def request(row: int, known: int) -> NewRequest:
        rest = [rng.randrange(300) for _ in range(rng.randint(1, 9))]
        begin = (shared, prefix) if known or row == 0 else ([free.pop() for _ in range(3)], prefix[::-1])
        blocks, ids = int32([*begin[0], *(free.pop() for _ in range(2))]), int32([*begin[1], *rest])
        return NewRequest(row, ids, len(ids), known, blocks, temperature=0.0, seed=row)

    def prefill(new: list[NewRequest], **more: object) -> SchedulerOutput:
        counts = int32([len(one.token_ids) - one.num_computed_tokens for one in new])
        rows = int32([one.req_idx for one in new])
        return SchedulerOutput(0, new_requests=new, req_idx=rows, num_scheduled_tokens=counts, **more)  # type: ignore[arg-type]

    def decode(rows: list[int]) -> SchedulerOutput:
        return SchedulerOutput(0, req_idx=int32(rows), num_scheduled_tokens=int32([1] * len(rows)))

    out = [(False, prefill([request(0, 0)])), (False, prefill([request(row, 48) for row in (1, 2, 3, 5)]))]
    out += [(True, decode([0, 1, 2, 3, 5]))] * 2 + [(True, decode([5, 3, 1, 0])), (False, decode([1, 2, 3]))]
    out.append((False, prefill([request(4, 0), request(1, 0)], removed=int32([1]))))
    return [*out, (True, decode([4, 0, 5, 3, 1, 2])), (False, decode([0, 1, 4, 5]))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
@pytest.mark.parametrize("arch", ["qwen3", "mistral"])
def test_the_same_tokens(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """All layers of the second have windows: its steps are of one kind."""
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 32)
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    folder = write_model(tmp_path, arch)
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True)
    assert like_gpu.decode_kinds.kinds == ((0, 1) if arch == "qwen3" else (0,))

    def answer(runner: ModelRunner, out: SchedulerOutput) -> list[int]:
        runner.execute_model(out)
        given = runner.sample_tokens(None).get()
        assert not given.errors
        return list(given.token_ids)

    for together, out in steps(rng):
        expected = answer(plain, out)
        with triton_everywhere():
            assert answer(like_gpu, out) == expected
        if len(out.req_idx) > 2 and not out.new_requests:
            assert like_gpu.decode_kinds.kind == (together and arch == "qwen3")
