"""Adapters' files: what is read of sound ones, and the error of each kind that can't be served."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aengine.checkpoint.lora import find_lora, named_as
from aengine.errors import ModelLoadError

Q = "model.layers.0.self_attn.q_proj"


def write(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def factors(matrix: str, rank: int = 4, prefix: str = "base_model.model.") -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{matrix}.lora_A.weight": (rank, 8), f"{prefix}{matrix}.lora_B.weight": (12, rank)}


def test_scales_and_ranks_are_pefts(tmp_path: Path) -> None:
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "alpha_pattern": {"k_proj": 6, "^model.layers.1.mlp.up_proj": 1},
    }
    k, up = "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"
    shapes = factors(Q) | factors(k, 2, "") | factors(up)
    found = find_lora(str(write(tmp_path / "plain", config, shapes)))
    assert {name: (own.rank, own.scale) for name, own in found.matrices.items()} == {
        Q: (4, 2),
        k: (2, 3),
        up: (4, 0.25),
    }
    assert (found.rank, found.matrices[Q].in_features, found.matrices[Q].out_features) == (4, 8, 12)
    root = find_lora(str(write(tmp_path / "root", {"lora_alpha": 8, "use_rslora": True}, factors(Q))))
    assert root.matrices[Q].scale == 4


@pytest.mark.parametrize(("pattern", "scale"), [("o_proj.weight", 3), ("o_proj", 2)])
def test_patterns_are_of_a_parameters_name(tmp_path: Path, pattern: str, scale: float) -> None:
    """Where PEFT was told the parameter, and not the module."""
    o = Q.replace("q_proj", "o_proj")
    config = {"r": 4, "lora_alpha": 8, "target_parameters": ["o_proj.weight"], "alpha_pattern": {pattern: 12}}
    found = find_lora(str(write(tmp_path / "one", config, factors(o) | factors(Q))))
    assert (found.matrices[o].scale, found.matrices[Q].scale) == (scale, 2)


def test_parameters_of_experts_are_named(tmp_path: Path) -> None:
    """By where PEFT nests them, or by target_parameters, with the ranks and alphas of their own names."""
    experts = "model.layers.0.mlp.experts"

    def stack(module: str, rank: int) -> dict[str, tuple[int, ...]]:
        return {f"{module}.lora_A.weight": (6 * rank, 8), f"{module}.lora_B.weight": (12, rank * 6)}

    targets = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    config = targets | {"r": 4, "lora_alpha": 8, "rank_pattern": {"experts.down_proj": 2}}
    config |= {"alpha_pattern": {r".*\.gate_up_proj": 2}}
    shapes = stack(experts, 2) | stack(f"{experts}.base_layer", 4) | factors(Q)
    found = find_lora(str(write(tmp_path / "both", config, shapes)))
    assert {name: (own.rank, own.scale, own.num_experts) for name, own in found.matrices.items()} == {
        f"{experts}.gate_up_proj": (4, 0.5, 6),
        f"{experts}.down_proj": (2, 4, 6),
        Q: (4, 2, 0),
    }
    assert (found.rank, found.expert_rank) == (4, 4)
    for name in ("gate_up_proj", "down_proj"):
        one = write(tmp_path / name, {"r": 2, "target_parameters": [f"experts.{name}"]}, stack(experts, 2))
        assert list(find_lora(str(one)).matrices) == [f"{experts}.{name}"]
    layered = {"r": 2, "target_parameters": ["0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]}
    both = stack(experts, 2) | stack(experts.replace("0", "1"), 2)
    assert list(find_lora(str(write(tmp_path / "layered", layered, both))).matrices) == [
        f"{experts}.gate_up_proj",
        f"{experts.replace('0', '1')}.down_proj",
    ]
    with pytest.raises(ModelLoadError, match="twice"):
        find_lora(str(write(tmp_path / "twice", config, shapes | stack(f"{experts}.gate_up_proj", 4))))
    with pytest.raises(ModelLoadError, match="does not say of which matrix"):
        find_lora(str(write(tmp_path / "neither", targets, stack(experts, 2))))
    with pytest.raises(ModelLoadError, match="rank times as many"):
        find_lora(str(write(tmp_path / "odd", targets | {"r": 5}, shapes)))


def test_alphas_are_of_the_first_pattern_that_fits(tmp_path: Path) -> None:
    """As PEFT's `get_pattern_key` finds it."""
    patterns = [r"layers\.0\.self_attn\.(q|k)_proj", "q_proj", "^self_attn.v_proj", "proj", ".*_proj$", "o_proj"]
    matrices = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qvo"]
    config = {"r": 1, "lora_alpha": 100, "alpha_pattern": {one: i for i, one in enumerate(patterns)}}
    shapes = {name: shape for matrix in matrices for name, shape in factors(matrix, 1).items()}
    found = find_lora(str(write(tmp_path / "one", config, shapes)))
    for name, own in found.matrices.items():
        fits = [i for i, one in enumerate(patterns) if re.match(rf"(.*\.)?({one})$", name)]
        assert own.scale == min(fits), name


def test_names_are_the_models_own(tmp_path: Path) -> None:
    """Where the language model of the checkpoint, or of the adapter's training, was part of another."""
    alike = Q, Q.replace("model.", "model.language_model.", 1), f"language_model.{Q}", Q.removeprefix("model.")
    for number, name in enumerate(alike):
        found = find_lora(str(write(tmp_path / str(number), {}, factors(name))))
        assert list(named_as(found, {Q: [12, 8]}).matrices) == [Q]
    twice = find_lora(str(write(tmp_path / "twice", {}, factors(alike[0]) | factors(alike[1]))))
    with pytest.raises(ModelLoadError, match="twice"):
        named_as(twice, {Q: [12, 8]})


@pytest.mark.parametrize(
    "config, shapes, says",
    [
        ({"peft_type": "IA3"}, factors(Q), "LORA alone"),
        ({"use_dora": True}, factors(Q), "DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, factors(Q), "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, factors(Q), "the base's own weights"),
        ({"alora_invocation_tokens": [1, 2]}, factors(Q), "active from some tokens on"),
        ({"modules_to_save": ["lm_head"]}, factors(Q), "modules_to_save"),
        ({"bias": "all"}, factors(Q), "bias='none'"),
        ({"alpha_pattern": {"(?=a)b": 3}}, factors(Q), "looks around"),
        ({"alpha_pattern": {f"(a{i})": 3 for i in range(65)}}, factors(Q), "more than 64 regular expressions"),
        ({"lora_alpha": float("inf")}, factors(Q), "finite"),
        ({"lora_alpha": "8"}, factors(Q), "finite number"),
        ({}, {f"{Q}.lora_A.weight": (4, 8)}, "no lora_B"),
        ({}, {f"{Q}.lora_A.weight": (4, 8), f"{Q}.lora_B.weight": (12, 5)}, r"\[4, 8\] and lora_B \[12, 5\]"),
        ({}, {"base_model.model.lm_head.weight": (4, 8)}, "no lora_A or lora_B"),
        ({}, factors(Q, 128), "max_lora_rank=64"),
        ({}, {}, "no tensors"),
    ],
)
def test_what_can_not_be_served_is_named(
    tmp_path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], says: str
) -> None:
    folder = write(tmp_path / "bad", config, shapes)
    with pytest.raises(ModelLoadError, match=says) as caught:
        find_lora(str(folder), 64)
    assert str(folder) in str(caught.value)


def test_folders_without_an_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", {}, factors(Q))
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    with pytest.raises(ModelLoadError, match="truncated or corrupt"):
        find_lora(str(folder))
    weights.write_bytes(b"\x00" * 7)
    with pytest.raises(ModelLoadError, match="truncated or corrupt"):
        find_lora(str(folder))
    weights.unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        find_lora(str(folder))
    (folder / "adapter_model.bin").write_bytes(content)
    with pytest.raises(ModelLoadError, match="a pickle, which can run any code"):
        find_lora(str(folder))
    for source in (str(tmp_path / "nowhere"), "\0", "~nobody-of-this-name/x", "x" * 5000):
        with pytest.raises(ModelLoadError, match="folder"):
            find_lora(source)
