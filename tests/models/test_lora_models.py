"""LoRA adapters of requests: the logits and tokens of models whose weights were merged with the adapter."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import CPU, Driver, check_near, no_progress, source_of
from lora_files import merged, write_adapter
from pairs import some
from safetensors.torch import load_file
from test_scenarios import DEEPSEEK_V3
from tiny import write_tiny_model
from torch import Tensor

from aengine.ipc.messages import NewRequest, int32
from aengine.runner.distributed.group import ALONE, TensorGroup
from aengine.runner.distributed.stage import WHOLE, PipelineStage
from aengine.runner.lora.rows import LoraRows
from aengine.runner.models import build_model, read_config
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.plain import PlainWeight
from aengine.runner.weights.sources.loader import load_weights

sys.path.append(str(Path(__file__).parents[1] / "parallel"))  # behind all else: that folder has a conftest.py too
RANK, SLOTS = 8, 3
FEW = ("qkv_proj", "up_proj", "down_proj", "w3", "gate_up_proj")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 20, "sliding_window": 9},
    "phi3": {},
    "granite": {"residual_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "olmo2": {},
    "starcoder2": {},
    "cohere": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
}
WITH_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")


def load(
    folder: Path,
    group: TensorGroup = ALONE,
    stage: PipelineStage = WHOLE,
    load_format: str = "auto",
    divides_experts: bool = False,
) -> tuple[Any, LoraRows]:
    source = source_of(folder, load_format)
    config = read_config(source.hf_config).of_rank(group.size, divides_experts=divides_experts)
    rows = LoraRows(SLOTS, RANK, 8, torch.float32, config.num_layers, CpuPlatform(), RANK if config.num_experts else 0)
    formats = replace(choose_formats("float32", CPU, source.hf_config), step_rows=rows)
    model = build_model(config, formats, group, stage)
    load_weights(model, source, 0, no_progress)
    return model, rows


def fill(rows: LoraRows, slot: int, folder: Path) -> str:
    """Load an adapter, and return what the last call says."""
    while (state := rows.calls["load_lora"](slot, str(folder)).get()) == "loading":
        time.sleep(0.001)
    return state


def take(rows: LoraRows, row: int, slot: int | None) -> tuple[str, str] | None:
    extras = {} if slot is None else {"lora": [int32([slot]).tobytes()]}
    return rows.add_request(NewRequest(row, int32([1]), 1, 0, int32([0]), extras=extras))


def begin(rows: LoraRows, counts: dict[int, int]) -> None:
    """``counts``: tokens of each row, in the batch's order."""
    rows.choose(np.array(list(counts)))
    rows.begin(torch.tensor([row for row, count in counts.items() for _ in range(count)]))


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(200) for _ in range(count)]


@pytest.mark.parametrize("family", some(list(FAMILIES), "llama", "gemma2", "phi3", "granite", *WITH_EXPERTS))
def test_rows_have_the_logits_of_merged_models(tmp_path: Path, rng: random.Random, family: str) -> None:
    """Prompts, chunks and decodes, of two adapters and of none in one batch; one has some modules only."""
    folder = write_tiny_model(tmp_path / "model", family, **FAMILIES[family])
    adapters = [
        write_adapter(tmp_path / "a", folder, rng, 3, use_rslora=True, is_stacked=family == "mixtral"),
        write_adapter(tmp_path / "b", folder, rng, RANK, ("q_proj", "v_proj", *FEW), is_stacked=family == "qwen3_moe"),
    ]
    folders = [merged(tmp_path / f"merged-{one.name}", folder, one) for one in adapters] + [folder]
    model, rows = load(folder)
    for slot, adapter in zip((2, 0), adapters, strict=True):
        assert fill(rows, slot, adapter) == "ready"
    assert [take(rows, row, slot) for row, slot in enumerate((2, 0, None))] == [None] * 3
    mixed, alone = Driver(model, rng), [Driver(load(one)[0], rng) for one in folders]
    for counts in ({0: 7, 1: 3}, {2: 5, 0: 1, 1: 4}, {1: 1, 0: 1, 2: 1}, {2: 1}, {1: 2, 2: 2}):
        batch = {str(row): tokens(rng, count) for row, count in counts.items()}
        begin(rows, counts)
        assert rows.kind == (counts.keys() != {2})
        got = mixed.step(batch)
        for row in counts:
            # The norms behind Gemma 2's sums make rounding ten times as large: up to 8e-5 in 40 runs.
            share = 5e-4 if family == "gemma2" else 5e-5
            wanted = alone[row].step({str(row): batch[str(row)]})[str(row)]
            check_near(got[str(row)], wanted, f"{family}, row {row}", share)


IN_GROUPS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": IN_GROUPS}},
        "ignore": ["lm_head"],
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_base_has_it_beside(tmp_path: Path, rng: random.Random, kind: str) -> None:
    """The logits of the numbers that its codes stand for, changed by the adapter."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1, **sizes)
    adapter = write_adapter(tmp_path / "a", folder, rng, RANK)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISED[kind]}))
    model, rows = load(folder, load_format="dummy")
    assert fill(rows, 0, adapter) == "ready" and take(rows, 0, 0) is None and take(rows, 1, None) is None
    prompt, layer = tokens(rng, 6), model.layers[0]
    begin(rows, {0: 6})
    got = Driver(model, rng).step({"x": prompt})["x"]
    begin(rows, {1: 6})
    factors = load_file(adapter / "adapter_model.safetensors")
    for linear, place, names in (
        (layer.attention.qkv, "self_attn", ("q_proj", "k_proj", "v_proj")),
        (layer.attention.o, "self_attn", ("o_proj",)),
        (layer.mlp.gate_up, "mlp", ("gate_proj", "up_proj")),
        (layer.mlp.down, "mlp", ("down_proj",)),
    ):
        starts = [f"base_model.model.model.layers.0.{place}.{name}" for name in names]
        change = [2 * factors[f"{one}.lora_B.weight"] @ factors[f"{one}.lora_A.weight"] for one in starts]
        numbers = linear.multiply(torch.eye(change[0].shape[1])).t()
        linear.weight = PlainWeight((numbers + torch.cat(change)).contiguous(), None)
    check_near(got, Driver(model, rng).step({"x": prompt})["x"])


def test_a_slot_is_filled_again_while_others_run(tmp_path: Path, rng: random.Random) -> None:
    """With an adapter that has less than the one before; and a request of an empty slot has an error of its own."""
    folder = write_tiny_model(tmp_path / "model", "llama")
    first = write_adapter(tmp_path / "a", folder, rng, RANK)
    second = write_adapter(tmp_path / "b", folder, rng, 2, ("k_proj",), dtype=torch.bfloat16)
    model, rows = load(folder)
    assert take(rows, 0, 1) == ("InvalidRequestError", "there is no adapter in slot 1: it was not loaded")
    assert take(rows, 0, SLOTS) is not None
    assert fill(rows, 1, first) == fill(rows, 0, first) == "ready"
    assert take(rows, 0, 0) is None and take(rows, 1, 1) is None
    driver, batch = Driver(model, rng), tokens(rng, 5)
    begin(rows, {0: 5, 1: 5})
    got = driver.step({"0": batch, "1": batch})
    assert torch.equal(got["0"], got["1"])
    rows.remove_request(1)
    assert fill(rows, 1, second) == "ready" and take(rows, 1, 1) is None
    begin(rows, {0: 1, 1: 5})
    later = driver.step({"0": batch[:1], "2": batch})
    alone = Driver(load(merged(tmp_path / "merged", folder, second))[0], rng).step({"x": batch})
    check_near(later["2"], alone["x"])
    whole = Driver(load(merged(tmp_path / "merged-a", folder, first))[0], rng)
    check_near(got["0"], whole.step({"x": batch})["x"])
    check_near(later["0"], whole.step({"x": batch[:1]})["x"])
    assert rows.calls["load_lora"](1, str(second)).get() == "ready"
    shutil.copytree(first, second, dirs_exist_ok=True)  # the same folder, with other files
    rows.calls["load_lora"](1, str(second))
    rows.settle()
    assert rows.calls["load_lora"](1, str(second)).get() == "ready" and take(rows, 1, 1) is None
    begin(rows, {1: 5})
    check_near(driver.step({"3": batch})["3"], got["1"])


def nan(found: dict[str, Tensor]) -> None:
    next(iter(found.values()))[0, 0] = torch.nan


def of_another_shape(found: dict[str, Tensor]) -> None:
    name = next(name for name in found if "lora_A" in name)
    found[name] = found[name][:, 1:].contiguous()


def of_layer(index: int) -> Callable[[dict[str, Tensor]], None]:
    def change(found: dict[str, Tensor]) -> None:
        name = next(name for name in found if "layers.0" in name and "lora_A" in name)
        for one in (name, name.replace("lora_A", "lora_B")):
            found[one.replace("layers.0", f"layers.{index}")] = found.pop(one)

    return change


@pytest.mark.parametrize(
    ("change", "rank", "config", "message"),
    [
        (nan, 2, {}, "not finite"),
        (of_another_shape, 2, {}, "of another base model"),
        (of_layer(9), 2, {}, "layers.9"),
        (lambda found: None, RANK + 1, {}, f"max_lora_rank={RANK}"),
        (lambda found: found.popitem(), 2, {}, "save the adapter again"),
        (lambda found: None, 2, {"use_dora": True}, "DoRA"),
        (lambda found: None, 2, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (lambda found: found.update(codes=torch.zeros(1)), 2, {}, "codes"),
    ],
)
def test_what_is_no_adapter_of_this_model(
    tmp_path: Path,
    rng: random.Random,
    change: Callable[[dict[str, Tensor]], object],
    rank: int,
    config: dict[str, object],
    message: str,
) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    _, rows = load(folder)
    state = fill(rows, 0, write_adapter(tmp_path / "a", folder, rng, rank, change=change, **config))
    assert state.startswith("refused: ") and message in state and take(rows, 0, 0) is not None
    assert fill(rows, 0, write_adapter(tmp_path / "b", folder, rng, 1)) == "ready"


def of_another_number(found: dict[str, Tensor]) -> None:
    for name in [name for name in found if ".experts." in name]:
        more = found[name] if "lora_A" in name else found[name].t()
        more = torch.cat((more, more[: len(more) // 2]))
        found[name] = more.contiguous() if "lora_A" in name else more.t().contiguous()


def of_a_larger_number(found: dict[str, Tensor]) -> None:
    for name in [name for name in found if ".experts.5." in name]:
        found[name.replace("experts.5.", "experts.6.")] = found.pop(name)


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    def change(found: dict[str, Tensor]) -> None:
        for name in [name for name in found if old in name]:
            found[name.replace(old, new)] = found.pop(name)

    return change


def in_both_forms(found: dict[str, Tensor]) -> None:
    for factor in "AB":
        new = f"base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_{factor}.weight"
        found[new] = torch.zeros((2, 48) if factor == "A" else (40, 2))


@pytest.mark.parametrize(
    ("change", "rank", "is_stacked", "message"),
    [
        (of_another_number, 2, True, "x 48 x 9, and it has 80 x 48 x 6"),
        (of_a_larger_number, 2, False, "experts.6."),
        (in_both_forms, 2, True, "one by one and all together"),
        (renamed("experts.lora", "experts.gate_proj.lora"), 2, True, "experts.gate_proj, which is none"),
        (renamed("experts.0.down_proj", "experts.0.gate_up_proj"), 2, False, "experts.0.gate_up_proj, which is none"),
        (renamed("experts.lora", "experts.*.down_proj.lora"), 2, True, "experts.*.down_proj, which is none"),
        (lambda found: None, RANK + 1, True, f"max_lora_expert_rank={RANK}"),
    ],
)
def test_what_is_no_adapter_of_these_experts(
    tmp_path: Path,
    rng: random.Random,
    change: Callable[[dict[str, Tensor]], object],
    rank: int,
    is_stacked: bool,
    message: str,
) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    _, rows = load(folder)
    modules = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
    adapter = write_adapter(tmp_path / "a", folder, rng, rank, modules, change, is_stacked=is_stacked)
    state = fill(rows, 0, adapter)
    assert state.startswith("refused: ") and message in state


def test_other_files_are_refused(tmp_path: Path, rng: random.Random) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    _, rows = load(folder)
    pickled = write_adapter(tmp_path / "a", folder, rng, 1)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    assert "pickle" in fill(rows, 0, pickled)
    cut = write_adapter(tmp_path / "b", folder, rng, 1) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    assert "fetch it again" in fill(rows, 0, cut.parent)
    wrong = write_adapter(tmp_path / "c", folder, rng, 1) / "adapter_model.safetensors"
    size = int.from_bytes(wrong.read_bytes()[:8], "little")
    header = json.loads(wrong.read_bytes()[8 : 8 + size])
    next(iter(header.values()))["data_offsets"][1] -= 4
    content = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    wrong.write_bytes(size.to_bytes(8, "little") + content + wrong.read_bytes()[8 + size :])
    assert "not its shape" in fill(rows, 0, wrong.parent)
    assert fill(rows, 0, tmp_path / "none").startswith("refused: ")
    assert fill(rows, SLOTS, pickled).startswith("refused: there is no slot")


@pytest.mark.parametrize(
    ("family", "divides_experts"),
    some(
        [("llama", False), ("phi3", False), ("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", False)],
        ("phi3", False),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
    ),
)
def test_divided_among_ranks(tmp_path: Path, rng: random.Random, family: str, divides_experts: bool) -> None:
    from ranks_as_threads import ThreadGroup, run_ranks

    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    folder = write_tiny_model(tmp_path / "model", family, **sizes)
    adapter = write_adapter(tmp_path / "a", folder, rng, 5, is_stacked=divides_experts)
    prompt = tokens(rng, 9)
    wanted = Driver(load(merged(tmp_path / "merged", folder, adapter))[0], rng).step({"x": prompt})["x"]

    def of_rank(group: ThreadGroup) -> Tensor:
        model, rows = load(folder, group, divides_experts=divides_experts)
        assert fill(rows, 1, adapter) == "ready" and take(rows, 0, 1) is None
        begin(rows, {0: 9})
        return Driver(model, random.Random(1)).step({"x": prompt})["x"]

    check_near(torch.cat(run_ranks(2, of_rank), 1)[:, : wanted.shape[1]], wanted)


def test_a_stage_has_its_layers_alone(tmp_path: Path, rng: random.Random) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=3)
    adapter = write_adapter(tmp_path / "a", folder, rng, 2)
    for index in range(2):
        _, rows = load(folder, stage=PipelineStage(index, 2))
        assert fill(rows, 0, adapter) == "ready"
    wrong = write_adapter(tmp_path / "b", folder, rng, 2, change=of_layer(3))
    assert "layers.3" in fill(rows, 0, wrong)
