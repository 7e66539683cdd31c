"""The `KernelPolicy` that the settings ask for, of what the device and the model can do."""

from __future__ import annotations

from ...config import EngineConfig
from ...errors import ModelLoadError
from ...kernels.policy import KernelPolicy
from ..kv_spec import StateKV
from ..model_config import ModelConfig
from ..platforms.platform import Platform
from ..weights.formats import COMPILED_DTYPES


def choose_policy(config: EngineConfig, model_config: ModelConfig, platform: Platform, dtype: str) -> KernelPolicy:
    """Choose the kernels' policy. ``dtype``: of the activations. Raises ModelLoadError if the model, the device or the
    division has no batch-invariant variant."""
    if config.batch_invariant and (reason := _why_not(config, model_config, platform, dtype)):
        raise ModelLoadError(f"batch_invariant=True: {reason}: leave it at False here")
    return KernelPolicy(config.batch_invariant)


def _why_not(config: EngineConfig, model_config: ModelConfig, platform: Platform, dtype: str) -> str:
    if platform.is_accelerator and (reason := _why_not_on_gpu(config, platform, dtype)):
        return reason
    if model_config.implementation == "transformers":
        return f"a model of {model_config.model_type!r} is computed by transformers' code, which adds up as torch does"
    has_compiled = bool(platform.compiled_types) and config.dtype in COMPILED_DTYPES
    if model_config.num_experts and not (platform.is_accelerator or has_compiled):
        return "without compiled kernels an expert multiplies the rows of all requests that chose it together"
    if any(isinstance(kv, StateKV) for kv in model_config.kv_layers):
        return "recurrent layers add up a prompt in chunks that depend on how it is cut into steps"
    if config.tensor_parallel_size > 1 or config.enable_expert_parallel:
        return "sums over ranks, of tensor_parallel_size or enable_expert_parallel, are cut by the batch's size"
    return ""


def _why_not_on_gpu(config: EngineConfig, platform: Platform, dtype: str) -> str:
    if not platform.adds_in_order:
        return f"{platform.name} has no kernels that add up in one order; GPUs of compute capability 9.0 do"
    if dtype == "float32":
        return "on a GPU products of float32 are the library's, which chooses by the number of rows"
    if config.kv_cache_dtype not in ("auto", dtype):
        return f"kv_cache_dtype={config.kv_cache_dtype!r} has no such attention on a GPU"
    if config.attention_backend not in ("auto", "triton"):
        return f"attention_backend={config.attention_backend!r} chooses by the lengths of a step's prompts"
    return ""
