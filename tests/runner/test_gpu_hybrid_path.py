"""A hybrid's steps with prompts as a GPU's graphs hold them, on the CPU: padded, by tables, in Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_gpu_path import make_runner

from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.graphs import batch_states
from aengine.runner.model_runner import ModelRunner

DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 0,
    "mlp_only_layers": [],
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_programs")]


def answer(runner: ModelRunner, batch: dict[int, int], **more) -> list[int]:
    runner.execute_model(SchedulerOutput(0, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()), **more))
    given = runner.sample_tokens(None).get()
    assert given.errors == []
    return list(given.token_ids)


def tokens_of(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Two prompts at once, states of the first kept on the way; a third in chunks beside decodes; the first again, from
    what was kept."""
    groups = runner.tables.groups
    free = iter(range(2, 32))

    def request(row: int, ids: list[int], computed: int = 0, state_pages: list[int] | None = None) -> NewRequest:
        blocks, spans = [], []
        for i, group in enumerate(groups):
            is_state = group.kind == "state"
            own = [next(free) for _ in range(1 if is_state else -(-len(ids) // group.block_size) + 1)]
            if state_pages is not None:
                own = [state_pages[i]] if is_state else list(runner.tables.on_host[i, 0, : len(own)])
            blocks += own
            spans += [0, len(own)]
        more = {"block_spans": tuple(spans)}
        return NewRequest(row, int32(ids), len(ids), computed, int32(blocks), temperature=0.0, seed=row, **more)

    states = [i for i, group in enumerate(groups) if group.kind == "state"]
    kept = {i: next(free) for i in states}
    columns = int32(word for i in states for word in (0, 37, i, kept[i]))
    new = [request(i, prompts[i]) for i in range(2)]
    got = [answer(runner, {0: len(prompts[0]), 1: len(prompts[1])}, new_requests=new, kept_states=columns)]
    third = [request(2, prompts[2])]
    got += [answer(runner, {0: 1, 2: 5, 1: 1}, new_requests=third), answer(runner, {1: 1, 2: 1, 0: 1})]
    got += [answer(runner, {2: len(prompts[2]) - 6, 0: 1}), answer(runner, {0: 1, 1: 1, 2: 1})]
    again = request(3, prompts[0], 37, [kept.get(i, 0) for i in range(len(groups))])
    return [*got, answer(runner, {3: len(prompts[0]) - 37, 1: 1}, new_requests=[again])]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
@pytest.mark.parametrize("room", [16, 0], ids=["held", "too many cuts"])
def test_the_same_tokens(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    pytest.importorskip("triton")
    from tiny import write_tiny_model

    monkeypatch.setattr(batch_states, "_CUTS", room)
    folder = write_tiny_model(tmp_path, "qwen3_next", seed=7, **DELTA)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (70, 20, 12)]
    plain = make_runner(folder, like_gpu=False)
    like_gpu = make_runner(folder, like_gpu=True, enforce_eager=False)
    graphs = like_gpu.batch_graphs
    assert graphs is not None and graphs.num_tokens
    shapes = []
    monkeypatch.setattr(graphs, "prepare", shapes.append)
    wanted = tokens_of(plain, prompts)
    with triton_everywhere():
        assert tokens_of(like_gpu, prompts) == wanted
    assert shapes, "no shape came again, which would be a graph"
