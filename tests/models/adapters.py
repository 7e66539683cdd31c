"""Random LoRA adapters as PEFT saves them, and models whose weights were merged with one."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    rng: random.Random,
    rank: int,
    modules: Sequence[str] = ALL,
    change: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """For the matrices of these names that the model has. ``change``: of the tensors before they are saved; ``config``:
    of adapter_config.json."""
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        matrix = name.removesuffix(".weight")
        if ".layers." in matrix and matrix.rpartition(".")[2] in modules and weight.dim() == 2:
            out, columns = weight.shape
            a, b = torch.randn(rank, columns, generator=gen), torch.randn(out, rank, generator=gen)
            tensors[f"base_model.model.{matrix}.lora_A.weight"] = (a * columns**-0.5).to(dtype)
            tensors[f"base_model.model.{matrix}.lora_B.weight"] = (b * 0.1).to(dtype)
    assert tensors
    change(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(own | config))
    return folder


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with W + scale B A, in a folder of its own."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    weights, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in factors.items():
        if ".lora_A." in name:
            matrix = re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name)
            assert matrix is not None
            weight = weights[f"{matrix[1]}.weight"]
            changed = weight.double() + scale * factors[name.replace("lora_A", "lora_B")].double() @ a.double()
            weights[f"{matrix[1]}.weight"] = changed.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
