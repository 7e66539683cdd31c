"""What settings, a model's files and the machine say of a start before a worker is started, which takes seconds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..config import EngineConfig
from ..errors import ModelLoadError
from ..limits.registry import PLATFORMS, registered
from .pooling import labels_of

_MOST_RANKS = 1024
_LEAST_BLOCK = 16  # tokens of a block, where the setting says nothing
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Where a GPU has a driver one of these is there, but for some boards, which have libcuda.so.1 alone."""


def check_start(config: EngineConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a start that can't succeed. What needs more than this to be known, workers find out.
    Blocking: looks for files.

    ``hf_config``: the content of config.json.
    """
    check_division(config, hf_config)
    if config.batch_invariant:
        check_invariance(config)
    check_kv_memory(config, hf_config)
    longest = hf_config.get("max_position_embeddings")
    if type(longest) is int and longest > 0:
        resolve_max_model_len(config, longest)
    if config.pooling != "auto" and (labels := labels_of(hf_config)):
        raise ModelLoadError(
            f"pooling={config.pooling!r}: the model scores {len(labels)} classes and gives no vectors: leave it out"
        )
    device = config.device.partition(":")[0]
    if config.executor == "ray" or device not in ("auto", "cuda", "cpu"):
        return  # the devices are other machines', or not known here
    if device == "cuda" and not _may_have_gpu():
        raise ModelLoadError(
            f"device={config.device!r}: there is no NVIDIA driver: install one, or start this container with its GPUs, "
            f"or use device='cpu'"
        )
    if device == "cpu" or (set(registered(PLATFORMS)) == {"cuda", "cpu"} and not _may_have_gpu()):
        check_cpu(config)


def check_cpu(config: EngineConfig) -> None:
    """Raise ModelLoadError for settings that only a GPU can follow."""
    for name in ("quantization", "attention_backend", "cudagraph_mode", "cudagraph_capture_sizes"):
        value = getattr(config, name)
        if value not in ("auto", "gguf", None):
            raise ModelLoadError(f"{name}={value!r} is for GPUs: leave it out on a CPU")


def check_invariance(config: EngineConfig) -> None:
    """Raise ModelLoadError for settings that go against batch_invariant=True, whatever the model and the device."""
    sums, cure, size = "are cut by the batch's size", "", config.tensor_parallel_size
    if size > 1:
        reason = f"sums over the ranks of tensor_parallel_size={size} {sums}"
        cure = "divide the model by pipeline_parallel_size"
    elif config.enable_expert_parallel:
        reason, cure = f"sums over the ranks of enable_expert_parallel=True {sums}", "leave that at False"
    elif config.model_impl == "transformers":
        reason = "model_impl='transformers' has torch add up, in an order that depends on the number of rows"
        cure = "leave that at 'auto'"
    if cure:
        raise ModelLoadError(f"batch_invariant=True: {reason}: {cure}, or leave batch_invariant at False")


def _may_have_gpu() -> bool:
    if any(map(os.path.exists, _DRIVERS)):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def resolve_max_model_len(config: EngineConfig, model_max_len: int) -> int:
    """Return the length wanted, before memory is looked at. Raises ModelLoadError if it is more than the model has."""
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ModelLoadError(
            f"max_model_len={config.max_model_len}, but the model's context is {model_max_len} tokens: "
            f"give at most that, or leave it out"
        )
    return config.max_model_len or model_max_len


def check_division(config: EngineConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError where config.json says that the model has not the heads, layers or experts for so many
    ranks, which each would find out after its start; what else does not divide, they find out."""
    num_ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    heads, layers = hf_config.get("num_attention_heads"), hf_config.get("num_hidden_layers")
    if isinstance(layers, int) and 0 < layers < stages:
        raise ModelLoadError(
            f"pipeline_parallel_size={stages}: the model has {layers} layers, one a stage at least: use "
            f"{layers} or less"
        )
    if config.enable_expert_parallel and not has_experts(hf_config):
        raise ModelLoadError(
            "enable_expert_parallel=True: the model has no mixtures of experts (its config has no "
            f"{' or '.join(_NUMBERS_OF_EXPERTS)} above 0), and nothing else is divided by it: leave it out"
        )
    if stages > 1 and config.data_parallel_size > 1:  # only ranks that share experts know of their replicas
        raise ModelLoadError(
            f"pipeline_parallel_size={stages} with data_parallel_size={config.data_parallel_size}: experts can't be "
            f"divided among replicas that are pipelines: leave enable_expert_parallel out, or use tensor_parallel_size"
        )
    if config.executor == "ray" and config.data_parallel_size > 1:  # only ranks that share experts know of replicas
        raise ModelLoadError(
            f"executor='ray' with data_parallel_size={config.data_parallel_size}: experts can be divided among "
            f"replicas on one machine only: leave enable_expert_parallel out"
        )
    if num_ranks > 1 and config.model_impl == "transformers":
        raise ModelLoadError(
            f"tensor_parallel_size={num_ranks}: layers that are computed by transformers (model_impl='transformers' "
            f"was asked for) can't be divided among ranks: use model_impl='auto', or data_parallel_size"
        )
    if isinstance(heads, int) and heads > 0:
        kv_heads = hf_config.get("num_key_value_heads")
        kv_heads = kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads

        def fits(size: int) -> bool:
            return not heads % size and (not kv_heads % size or not size % kv_heads)

        if not fits(num_ranks):
            raise ModelLoadError(
                f"tensor_parallel_size={num_ranks}: the model has {heads} attention heads and {kv_heads} key-value "
                f"heads, which can't be divided by it; it can be {sizes_that(fits, heads)}"
            )


def check_kv_memory(config: EngineConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for memory that holds not one block of a single layer, at a byte a number. How large a page
    is, and how many are needed, workers find out."""
    text = hf_config.get("text_config")
    model = text if isinstance(text, dict) else hf_config
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, kv_heads, hidden, size = (_size(model.get(name)) for name in names)
    if not heads or model.get("kv_lora_rank"):  # what is kept of a token is not keys and values of heads
        return
    num_heads = max((kv_heads or heads) // config.tensor_parallel_size, 1)
    least = 2 * num_heads * (size or hidden // heads) * (config.block_size or _LEAST_BLOCK)
    for name in ("kv_cache_memory_bytes", "swap_space_bytes"):
        asked = getattr(config, name)
        if asked and asked < least:
            raise ModelLoadError(f"{name}={asked} holds no page, which has {least} bytes at least: raise it")


def _size(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def has_experts(hf_config: Mapping[str, Any]) -> bool:
    """Return whether config.json says that layers are mixtures of experts."""
    texts = [hf_config, hf_config.get("text_config")]
    return any(text.get(key) for text in texts if isinstance(text, dict) for key in _NUMBERS_OF_EXPERTS)


def sizes_that(fits: Callable[[int], bool], most: int) -> str:
    """Return in words the tensor parallel sizes from 1 to ``most`` that fit, as far as there are machines for them."""
    usable = [size for size in range(1, min(most, _MOST_RANKS) + 1) if fits(size)]
    return ", ".join(map(str, usable[:-1])) + f" or {usable[-1]}" if len(usable) > 1 else "1"
