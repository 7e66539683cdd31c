"""Weights into a model: from safetensors, from GGUF, or random.

A model names the tensors it wants (`DecoderModel.slots`). Each source is an iterator of (name, tensor) in
transformers' spelling; tensors are handed over one by one, so that no second copy of the model is ever in memory.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.gguf_file import GgufFile
from ..checkpoint.source import ModelSource
from ..errors import ModelLoadError
from .layers.slot import Slot
from .models.decoder import DecoderModel

__all__ = ["LoadedWeights", "load_weights"]

logger = logging.getLogger("aengine.runner")

Progress = Callable[[str, int, int, str], None]
CPU = torch.device("cpu")
Named = Iterator[tuple[str, Tensor]]

# A checkpoint may hold these, and no model here needs them.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|rope_freqs|\.masked_bias$|attn_rot_embd")


class LoadedWeights:
    """What was loaded: ``num_parameters``, and ``num_bytes`` in the checkpoint's format."""

    def __init__(self) -> None:
        self.num_parameters = 0
        self.num_bytes = 0


def load_weights(
    model: DecoderModel, source: ModelSource, seed: int, progress: Progress, device: torch.device = CPU
) -> LoadedWeights:
    """Fill the model. ``progress(stage, done, total, unit)`` is told bytes.

    Raises:
        ModelLoadError: a file is missing, truncated or corrupt; a tensor is missing or has another shape.
    """
    slots = {slot.name: slot for slot in model.slots()}
    if source.format == "dummy":
        tensors, total = _random(slots, seed, device), _wanted_bytes(slots)
    elif source.format == "gguf":
        tensors, total = _gguf(source, model)
    else:
        tensors, total = _safetensors(Path(source.path), device)
    loaded = LoadedWeights()
    unexpected: list[str] = []
    tied = "lm_head.weight" if model.config.tie_word_embeddings else ""
    progress("weights", 0, total, "bytes")
    for name, tensor in tensors:
        loaded.num_bytes += tensor.nbytes
        slot = slots.pop(name, None)
        if slot is not None:
            _check_shape(slot, tensor, source)
            loaded.num_parameters += tensor.numel()
            slot.set(tensor.to(device))
        elif name != tied and not _IGNORED.search(name):
            unexpected.append(name)
        progress("weights", min(loaded.num_bytes, total), total, "bytes")
    progress("weights", total, total, "bytes")
    if slots:
        raise ModelLoadError(f"{source.path} lacks {len(slots)} tensors of the model: {_some(sorted(slots))}")
    if unexpected:
        logger.warning(
            "%s has %d tensors that the model does not use: %s", source.path, len(unexpected), _some(unexpected)
        )
    return loaded


def _check_shape(slot: Slot, tensor: Tensor, source: ModelSource) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise ModelLoadError(
            f"{source.path}: {slot.name} has the shape {list(tensor.shape)}, but by the config it is {list(slot.shape)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _wanted_bytes(slots: dict[str, Slot]) -> int:
    return sum(4 * torch.Size(slot.shape).numel() for slot in slots.values())


# -- safetensors


def _safetensors(folder: Path, device: torch.device) -> tuple[Named, int]:
    files = _shards(folder)
    return _read_safetensors(files, device), sum(path.stat().st_size for path in files)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index} can't be read: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(f"{index} names {_some(missing)}, which are not in {folder}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no .safetensors file")
    return files


def _read_safetensors(files: list[Path], device: torch.device) -> Named:
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(f"{path} is truncated or corrupt: {error}; fetch it again") from error


# -- GGUF


_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """transformers' name of a GGUF tensor; names that have none are returned as they are."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_GGUF_LAYER[part]}.{kind}" if part in _GGUF_LAYER else name
    return f"{_GGUF_TOP[stem]}.{kind}" if stem in _GGUF_TOP else name


def _gguf(source: ModelSource, model: DecoderModel) -> tuple[Named, int]:
    file = GgufFile(source.path)
    total = sum(4 * torch.Size(tensor.shape).numel() for tensor in file.tensors.values())
    return _read_gguf(file, model), total


def _read_gguf(file: GgufFile, model: DecoderModel) -> Named:
    """Dequantised to float32 in threads (numpy lets the GIL go), no more than one tensor a thread ahead."""
    config = model.config
    interleaved = config.model_type in ("llama", "mistral")

    def read(name: str) -> tuple[str, Tensor]:
        tensor = _dequantise(file, name)
        hf_name = _hf_name(name)
        if interleaved and ".self_attn.q_proj." in hf_name:
            tensor = _separate_halves(tensor, config.num_heads)
        elif interleaved and ".self_attn.k_proj." in hf_name:
            tensor = _separate_halves(tensor, config.num_kv_heads)
        return hf_name, tensor

    # Not pool.map: it takes all names at once, and a model larger than memory would be dequantised into it.
    num_threads = max(1, torch.get_num_threads())
    ahead: deque[Future[tuple[str, Tensor]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="dequantise") as pool:
        for name in file.tensors:
            ahead.append(pool.submit(read, name))
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _dequantise(file: GgufFile, name: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    try:
        data = dequantize(file.tensor_data(name), GGMLQuantizationType(tensor.type_code))
    except (NotImplementedError, KeyError, ValueError) as error:
        raise ModelLoadError(
            f"{file.path}: tensor {name} is quantised as {tensor.type.name}, which the gguf package can't read: {error}"
        ) from error
    if not data.flags.writeable:  # float32 already: a view of the file
        data = data.copy()
    return torch.from_numpy(data.reshape(tensor.shape))


def _separate_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """llama.cpp interleaves the two elements of each rotary pair; here the first halves of a head come first."""
    rows = tensor.shape[0]
    pairs = tensor.view(num_heads, rows // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)


# -- random


def _random(slots: dict[str, Slot], seed: int, device: torch.device) -> Named:
    """Norm weights near one, the rest small: activations keep their size through any number of layers."""
    generator = torch.Generator(device).manual_seed(seed)
    for slot in list(slots.values()):
        tensor = torch.empty(slot.shape, device=device).uniform_(-0.04, 0.04, generator=generator)
        yield slot.name, tensor.add_(1.0) if "norm" in slot.name else tensor
