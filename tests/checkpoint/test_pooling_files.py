"""How a folder of sentence-transformers says that vectors are made, and which labels a classifier has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aengine.checkpoint.pooling import PoolingConfig, labels_of, read_pooling
from aengine.errors import ModelLoadError


def folder(path: Path, modules: list[str], **files: Any) -> Path:
    """``files``: the content of each, by its name with "__" for "/" and without ".json"."""
    steps = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    for name, content in {"modules": steps, **files}.items():
        file = path / (name.replace("__", "/") + ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return path


def test_all_that_a_folder_may_say(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        ["Transformer", "Pooling", "Dense", "Dense", "Normalize"],
        **{"1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}},
        config_sentence_transformers={"prompts": {"query": "q: ", "none": None}, "default_prompt_name": "query"},
        sentence_bert_config={"max_seq_length": 128},
    )
    found = read_pooling(path, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}})
    assert found == PoolingConfig(
        mode="cls",
        dense=("2_Dense", "3_Dense"),
        prompts={"query": "q: "},
        default_prompt="q: ",
        max_tokens=128,
        score_activation="torch.nn.modules.activation.Sigmoid",
    )
    assert PoolingConfig.from_wire(json.loads(json.dumps(found.to_wire()))) == found
    old = read_pooling(tmp_path, {"sbert_ce_default_activation_function": "Tanh"})
    assert old.score_activation == "Tanh"


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, {}) == PoolingConfig() and PoolingConfig().to_wire() == {}
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 0}')
    assert read_pooling(tmp_path, {}).max_tokens is None
    for modules in ('{"0": {}}', "[{}, 1]"):
        (tmp_path / "modules.json").write_text(modules)
        with pytest.raises(ModelLoadError, match="must hold a list of JSON objects"):
            read_pooling(tmp_path, {})


@pytest.mark.parametrize(
    ("config", "mode", "fault"),
    [
        ({}, "mean", ""),
        ({"pooling_mode_lasttoken": True}, "last", ""),
        ({"pooling_mode": "cls"}, "cls", ""),
        ({"pooling_mode": ["lasttoken"], "include_prompt": True}, "last", ""),
        ({"pooling_mode": ["cls", "mean"]}, "", "its pooling is cls and mean"),
        ({"pooling_mode_max_tokens": True}, "", "its pooling is max_tokens, and aengine has one of mean"),
        ({"pooling_mode": "mean", "include_prompt": False}, "", "leaves out the tokens of the prompt"),
    ],
)
def test_the_modes_of_pooling(tmp_path: Path, config: dict[str, Any], mode: str, fault: str) -> None:
    found = read_pooling(folder(tmp_path, ["Transformer", "Pooling"], **{"1_Pooling__config": config}), {})
    assert found.mode == mode and fault in found.fault and bool(found.fault) == bool(fault)


def test_a_step_that_is_not_known_is_a_fault(tmp_path: Path) -> None:
    assert "type 'WordWeights'" in read_pooling(folder(tmp_path, ["Transformer", "WordWeights"]), {}).fault
    known = ["Transformer", "Pooling", "Normalize", "LogitScore"]
    assert read_pooling(folder(tmp_path, known), {}).fault == ""


def test_labels() -> None:
    classifier: dict[str, Any] = {"architectures": ["BertForSequenceClassification"]}
    assert labels_of({}) == labels_of({"architectures": ["BertModel"], "id2label": {"0": "a"}}) == ()
    assert labels_of(classifier) == ("LABEL_0", "LABEL_1")
    names = ["BertForSequenceClassification", "BertModel"]
    assert labels_of({"architectures": names}) and not labels_of({"architectures": names[::-1]})
    assert labels_of(classifier | {"num_labels": 3}) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert labels_of(classifier | {"id2label": {"10": "c", "2": "b", "0": 5}}) == ("5", "b", "c")
    for labels in ({"a": "b"}, {"0": "a", "-1": "b"}, {"1" * 10: "a"}):
        with pytest.raises(ModelLoadError, match="must have numbers as keys"):
            labels_of(classifier | {"id2label": labels})
