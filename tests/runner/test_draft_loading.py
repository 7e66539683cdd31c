"""What a draft model must be, for a model in the same worker: otherwise an error says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aengine.checkpoint.source import ModelSource
from aengine.config import EngineConfig
from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.limits.speculation import NEEDS_MODEL
from aengine.runner.kv_spec import FullKV, LayerKV, SharedKV, StateKV, WindowKV
from aengine.runner.model_config import AttendingLayers
from aengine.runner.speculation.proposer import FINDS_IN_ROWS
from aengine.runner.startup.draft import Target, _check_layers, _check_vocabularies, find_proposer, load_proposer

DRAFTED: dict[str, Any] = {"method": "draft_model", "model": "somewhere", "num_speculative_tokens": 3}


def config_of(*layers: LayerKV) -> Any:
    return SimpleNamespace(kv_layers=layers, query_heads=(2,) * len(layers), ropes=("rope",), model_type="some")


def target_of(*layers: LayerKV) -> Any:
    return Target(SimpleNamespace(config=config_of(*layers)), *[None] * 4)  # type: ignore[arg-type]


def source_of(folder: Path, vocabulary: dict[str, int] | None) -> ModelSource:
    folder.mkdir()
    if vocabulary is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return ModelSource(folder.name, str(folder), "safetensors", {})


def test_settings_are_read_and_checked() -> None:
    config = EngineConfig(model="m", speculation=DRAFTED)
    assert config.speculation_settings == ("draft_model", "somewhere", 3)
    assert (
        EngineConfig(model="m", speculation=json.dumps(DRAFTED)) == config == EngineConfig.from_wire(config.to_wire())
    )
    read = {"method": "eagle3", "model": "m", "parallel_drafting": True}  # as vLLM is told of P-EAGLE
    assert EngineConfig(model="m", speculation=read).speculation_settings == ("peagle", "m", 4)
    placed = EngineConfig(model="m", speculation={**DRAFTED, "model": Path("some", "where")})
    assert placed.speculation_settings.model == str(Path("some", "where"))
    for off in (None, {"method": "none"}, {"method": "none", "tokens": 3, "model": "m"}):
        assert EngineConfig(model="m", speculation=off).speculation == "none"
    wrong: list[Any] = ["draft_model", {**DRAFTED, "model": ""}, {**DRAFTED, "depth": 2}, {**DRAFTED, "tokens": 17}]
    for one, said in (
        ({**DRAFTED, "tokens": 3}, "tokens or num_speculative_tokens, which is the same"),
        ({**read, "parallel_drafting": "yes"}, "parallel_drafting is true"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            EngineConfig(model="m", speculation=one)
    for one in [
        *wrong,
        {"method": "suffix", "model": "somewhere"},
        {"method": "suffix", "tokens": 4},
        {"model": "somewhere"},
        {"method": []},
        "{",
        '{"a":' * 50_000,
        3,
    ]:
        with pytest.raises(InvalidRequestError, match="speculation="):
            EngineConfig(model="m", speculation=one)


def test_a_model_with_states_and_stages_are_refused() -> None:
    config, target = EngineConfig(model="m", speculation=DRAFTED), target_of(StateKV(()))
    with pytest.raises(ModelLoadError, match="leave"):
        load_proposer(config, target, lambda *report: None)
    named = config.replace(speculation="ngram_worker")
    assert load_proposer(named, target, lambda *report: None) is FINDS_IN_ROWS
    for method in NEEDS_MODEL:
        how = {"method": method} | ({"model": "somewhere"} if NEEDS_MODEL[method] else {})
        with pytest.raises(ModelLoadError, match="use tensor_parallel_size"):  # before weights are read
            find_proposer(config.replace(speculation=how, pipeline_parallel_size=2))
    find_proposer(named.replace(pipeline_parallel_size=2))


@pytest.mark.parametrize(
    ("method", "right", "settings"),
    [("mtp", "eagle3", {"draft_vocab_size": 8}), ("eagle3", "peagle", {"draft_vocab_size": 8, "ptd_token_id": 1})],
)
def test_a_head_of_another_method_is_refused(tmp_path: Path, method: str, right: str, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    config = EngineConfig(model="m", speculation={"method": method, "model": str(tmp_path)})
    with pytest.raises(ModelLoadError, match=f'use speculation={{"method": "{right}"'):
        load_proposer(config, target_of(FullKV(1, 8)), lambda *report: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelLoadError, match=f"^{tmp_path}: config.json: 'bert' names no head"):
        load_proposer(config, target_of(FullKV(1, 8)), lambda *report: None)


def test_a_folder_that_is_not_there_is_named_before_weights_are_read(tmp_path: Path) -> None:
    config = EngineConfig(model="m", speculation={**DRAFTED, "model": str(tmp_path / "no")})
    with pytest.raises(ModelLoadError, match="speculation='draft_model': there is no model"):
        find_proposer(config)
    find_proposer(config.replace(speculation="ngram_worker"))


def test_a_draft_model_has_the_tokens_of_its_model(tmp_path: Path) -> None:
    words, others = {"a": 0, "b": 1}, {"a": 1, "b": 0}
    target, same, other = (source_of(tmp_path / str(i), v) for i, v in enumerate((words, words, others)))
    unknown = source_of(tmp_path / "unknown", None)
    _check_vocabularies(same, target, 64, 128)  # tables that are padded
    _check_vocabularies(unknown, target, 128, 128)
    for one, size in ((other, 128), (unknown, 64)):
        with pytest.raises(ModelLoadError, match="take a model of the same"):
            _check_vocabularies(one, target, size, 128)


def test_layers_that_a_draft_model_may_have() -> None:
    _check_layers(config_of(FullKV(1, 8), WindowKV(1, 8, 64), SharedKV(0)))
    for kv in (StateKV(()), WindowKV(1, 8, 63)):
        with pytest.raises(ModelLoadError, match="full attention"):
            _check_layers(config_of(kv))


def test_layers_of_two_models_lie_behind_each_other() -> None:
    first, second = config_of(FullKV(1, 8), FullKV(1, 8)), config_of(WindowKV(1, 8, 64), SharedKV(0))
    joined = AttendingLayers.of(first, second)
    assert joined.kv_layers == (FullKV(1, 8), FullKV(1, 8), WindowKV(1, 8, 64), SharedKV(2))
    assert joined.query_heads == (2, 2, 2, 2) and len(joined.ropes) == 2
