"""Random LoRA adapters as PEFT saves them, and models whose weights were merged with one."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EXPERTS = ("w1", "w2", "w3")  # those of Mixtral; others' have the names of dense layers
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
_OF_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""Of transformers' parameters the matrices of an expert in a checkpoint."""


def write_adapter(
    folder: Path,
    model: Path,
    rng: random.Random,
    rank: int,
    modules: Sequence[str] = (*ALL, *EXPERTS),
    change: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    dtype: torch.dtype = torch.float32,
    is_stacked: bool = False,
    **config: object,
) -> Path:
    """For the matrices of these names that the model has. ``change``: of the tensors before they are saved;
    ``is_stacked``: those of experts by parameter, as PEFT has them with transformers 5; ``config``: of
    adapter_config.json."""
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    tensors = {}
    for matrix, (count, out, columns) in _matrices(model, is_stacked):
        if matrix.rpartition(".")[2] in modules:
            name = matrix.replace(".experts.gate_up_proj", ".experts.base_layer").replace(
                ".experts.down_proj", ".experts"
            )
            a, b = torch.randn(count * rank, columns, generator=gen), torch.randn(out, rank * count, generator=gen)
            tensors[f"base_model.model.{name}.lora_A.weight"] = (a * columns**-0.5).to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = (b * 0.1).to(dtype)
    assert tensors
    change(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(own | config))
    return folder


def _matrices(model: Path, is_stacked: bool) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the matrices of layers: how many experts have one in the tensor, output features, input features."""
    stacks: dict[str, tuple[int, int, int]] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        matrix = name.removesuffix(".weight")
        match = _OF_EXPERT.fullmatch(matrix)
        if ".layers." not in matrix or weight.dim() < 2:
            continue
        if weight.dim() == 3:  # [experts, in, out]
            yield matrix, (len(weight), weight.shape[2], weight.shape[1])
        elif match is None or not is_stacked:
            yield matrix, (1, *weight.shape)
        else:
            (of,) = (key for key, parts in _PARTS.items() if any(match[3] in names for names in parts))
            out = weight.shape[0] * (2 if of == "gate_up_proj" else 1)
            count, *_ = stacks.get(f"{match[1]}.mlp.experts.{of}", (0,))
            stacks[f"{match[1]}.mlp.experts.{of}"] = max(count, int(match[2]) + 1), out, weight.shape[1]
    yield from stacks.items()


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with W + scale B A, in a folder of its own."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    weights, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in factors.items():
        if ".lora_A." in name:
            match = re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name)
            assert match is not None
            matrix = re.sub(r"(\.experts)$", r"\1.down_proj", match[1].replace("base_layer", "gate_up_proj"))
            a, b = a.double(), factors[name.replace("lora_A", "lora_B")].double()
            if f"{matrix}.weight" in weights:
                _add(weights, f"{matrix}.weight", scale * b @ a)
            else:
                by_expert = a.view(-1, config["r"], a.shape[1]), b.view(len(b), config["r"], -1)
                _add_stack(weights, matrix, scale * torch.einsum("eri,ore->eoi", *by_expert))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _add(weights: dict[str, Tensor], name: str, change: Tensor) -> None:
    weights[name] = (weights[name].double() + change).to(weights[name].dtype).contiguous()


def _add_stack(weights: dict[str, Tensor], parameter: str, changes: Tensor) -> None:
    """``changes``: [experts, out, in]."""
    if parameter in weights:
        _add(weights, parameter, changes.transpose(1, 2))
        return
    module, _, last = parameter.rpartition(".")
    for expert, change in enumerate(changes):
        for own, parts in _named(module, expert, _PARTS[last], weights):
            for name, part in zip(parts, change.chunk(len(parts)), strict=True):
                _add(weights, f"{own}.{name}.weight", part)


def _named(
    module: str, expert: int, parts: Sequence[Sequence[str]], weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Sequence[str]]]:
    for place, names in zip((module, module.replace(".mlp.", ".block_sparse_moe.")), parts, strict=True):
        if f"{place}.{expert}.{names[0]}.weight" in weights:
            yield f"{place}.{expert}", names
