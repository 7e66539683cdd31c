"""LoRA adapters through a worker's whole runner, on the GPU if there is one: chunks, decodes, drafts, graphs, tapes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lora_files import ALL, merged, write_adapter
from tiny import write_tiny_model
from zoo import write_zoo_model

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.ipc.messages import DraftColumns, NewRequest, SchedulerOutput, int32
from aengine.runner.startup.load import load_model
from aengine.workers.rank import Rank

Request = tuple[list[int], int | None]  # the prompt, and the slot
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def start(folder: Path, adapters: Mapping[int, Path], **settings: Any) -> Any:
    """A runner, whose slots have these adapters."""
    own = {"max_num_seqs": 4, "max_model_len": 96, "kv_cache_memory_bytes": 1 << 24, "max_num_batched_tokens": 64}
    slots = {"max_loras": 3, "max_lora_rank": 8} if adapters else {}
    if adapters and "num_experts" in (folder / "config.json").read_text():
        slots["max_lora_expert_rank"] = 8
    config = EngineConfig.create(str(folder), {"skip_tokenizer": True, **own, **slots, **settings})
    model = load_model(config, resolve_model(config).to_wire(), Rank(), lambda *report: None)
    runner, _ = model.allocate(model.offer)
    for slot, path in adapters.items():
        while (state := model.calls["load_lora"](slot, str(path)).get()) == "loading":
            pass
        assert state == "ready", state
    return runner


def answers(
    runner: Any,
    requests: Mapping[int, Request],
    steps: Sequence[Mapping[int, int]],
    drafts: Mapping[int, Sequence[int]] | None = None,
) -> dict[int, list[tuple[int, float]]]:
    """The tokens of each row and their log-probabilities. ``steps``: how many tokens of each row; ``drafts``: of rows,
    in the last step."""
    new = {}
    for row, (prompt, slot) in requests.items():
        new[row] = NewRequest(row, int32(prompt), len(prompt), 0, int32(range(6 * row, 6 * row + 6)))
        new[row].temperature, new[row].logprobs = 0.0, 1
        if slot is not None:
            new[row].extras = {"lora": [int32([slot]).tobytes()]}
    found: dict[int, list[tuple[int, float]]] = {row: [] for row in requests}
    for step_id, counts in enumerate(steps):
        batch = {row: count for row, count in counts.items() if row in requests}
        if not batch:
            continue
        out = SchedulerOutput(step_id, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()))
        out.new_requests = [new.pop(row) for row in batch if row in new]
        if drafts and step_id == len(steps) - 1:
            own = [list(drafts.get(row, ())) for row in batch]
            out.num_scheduled_tokens = int32(1 + len(ids) for ids in own)
            out.drafts = DraftColumns(int32(map(len, own)), int32(i for ids in own for i in ids), int32([0] * len(own)))
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        assert answer.errors == []
        ids, values = list(answer.token_ids), [] if answer.logprobs is None else list(answer.logprobs.sampled)
        place = 0
        for row, count in zip(batch, answer.num_tokens(), strict=True):
            found[row] += list(zip(ids[place : place + count], values[place : place + count], strict=True))
            place += 1 if answer.counts is None else count
    runner.execute_model(SchedulerOutput(99, removed=int32(row for row in requests)))
    runner.sample_tokens(None)
    return found


def alike(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> None:
    assert [token_id for token_id, _ in found] == [token_id for token_id, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], abs=2e-3)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "float32", "enforce_eager": True}], ids=str)
def test_rows_get_the_tokens_of_merged_models(
    tmp_path: Path, rng: random.Random, settings: dict[str, Any], arch: str
) -> None:
    folder = write_tiny_model(tmp_path / "model", arch, **SIZES)
    adapters = {i: write_adapter(tmp_path / f"a{i}", folder, rng, rank) for i, rank in ((0, 3), (2, 8))}
    folders = {slot: merged(tmp_path / f"m{slot}", folder, adapter) for slot, adapter in adapters.items()}
    requests: dict[int, Request] = {
        row: ([rng.randrange(200) for _ in range(length)], slot)
        for row, length, slot in ((0, 20, 2), (1, 9, 0), (2, 5, None))
    }
    steps = [{0: 20, 1: 4}, {0: 1, 1: 5, 2: 5}, *[{1: 1, 0: 1, 2: 1}] * 3, {2: 1}, {2: 1}, {1: 1, 0: 1, 2: 1}]
    mixed = start(folder, adapters, **settings)
    alone = {slot: start(folders.get(slot, folder), {}, **settings) for slot in (0, 2, None)}
    found = answers(mixed, requests, steps)
    for row, request in requests.items():
        alike(found[row], answers(alone[request[1]], {row: (request[0], None)}, steps)[row])
    again = {0: (requests[0][0], None), 1: (requests[0][0], 2)}  # rows that had others
    found = answers(mixed, again, [{0: 20, 1: 20}, {0: 1, 1: 1}])
    for row, slot in ((0, None), (1, 2)):
        alike(found[row], answers(alone[slot], {0: (requests[0][0], None)}, [{0: 20}, {0: 1}])[0])


BY_TRANSFORMERS = {  # model: modules
    "llama": ALL,  # its layers are computed by ours
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "qwen3_moe": ALL[:4],
}


@pytest.mark.parametrize("model_type", BY_TRANSFORMERS)
def test_a_model_that_transformers_computes(tmp_path: Path, rng: random.Random, model_type: str) -> None:
    folder = tmp_path / "model"
    write_zoo_model(folder, model_type)
    settings = {"dtype": "float32", "model_impl": "transformers"}
    adapters = {i: write_adapter(tmp_path / f"a{i}", folder, rng, 8, BY_TRANSFORMERS[model_type]) for i in (0, 2)}
    requests: dict[int, Request] = {
        row: ([rng.randrange(200) for _ in range(length)], slot)
        for row, length, slot in ((0, 20, 2), (1, 9, 0), (2, 5, None))
    }
    steps = [{0: 20, 1: 4}, {0: 1, 1: 5, 2: 5}, *[{1: 1, 0: 1, 2: 1}] * 3, {2: 1}]
    found = answers(start(folder, adapters, max_lora_expert_rank=0, **settings), requests, steps)
    for row, (prompt, slot) in requests.items():
        model = folder if slot is None else merged(tmp_path / f"m{slot}", folder, adapters[slot])
        alike(found[row], answers(start(model, {}, **settings), {row: (prompt, None)}, steps)[row])


def test_layers_that_see_a_part_of_the_tokens_are_not_changed(tmp_path: Path, rng: random.Random) -> None:
    folder = tmp_path / "model"
    write_zoo_model(folder, "bamba")
    settings = {"dtype": "float32", "model_impl": "transformers"}
    whole = write_adapter(tmp_path / "a", folder, rng, 8, ("o_proj",))
    start(folder, {0: whole}, **settings)
    with pytest.raises(AssertionError, match="in_proj, which is none of the matrices"):
        start(folder, {0: write_adapter(tmp_path / "b", folder, rng, 8, ("in_proj",))}, **settings)
