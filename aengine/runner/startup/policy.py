"""The `KernelPolicy` that the settings ask for, of what the device and the model can do."""

from __future__ import annotations

from ...config import EngineConfig
from ...errors import ModelLoadError
from ...kernels.policy import KernelPolicy
from ..kv_spec import StateKV
from ..model_config import ModelConfig
from ..platforms.platform import Platform
from ..weights.formats import COMPILED_DTYPES


def choose_policy(config: EngineConfig, model_config: ModelConfig, platform: Platform) -> KernelPolicy:
    """Choose the kernels' policy. Raises ModelLoadError if the model, the device or the division has no batch-invariant
    variant."""
    if config.batch_invariant and (reason := _why_not(config, model_config, platform)):
        raise ModelLoadError(f"batch_invariant=True: {reason}: leave it at False here")
    return KernelPolicy(config.batch_invariant)


def _why_not(config: EngineConfig, model_config: ModelConfig, platform: Platform) -> str:
    if platform.is_accelerator:
        return "it is for device='cpu' so far; the kernels of a GPU are chosen by the batch's size"
    if model_config.implementation == "transformers":
        return f"a model of {model_config.model_type!r} is computed by transformers' code, which adds up as torch does"
    if model_config.num_experts and not (platform.compiled_types and config.dtype in COMPILED_DTYPES):
        return "without compiled kernels an expert multiplies the rows of all requests that chose it together"
    if any(isinstance(kv, StateKV) for kv in model_config.kv_layers):
        return "recurrent layers add up a prompt in chunks that depend on how it is cut into steps"
    if config.tensor_parallel_size > 1 or config.enable_expert_parallel:
        return "sums over ranks, of tensor_parallel_size or enable_expert_parallel, are cut by the batch's size"
    return ""
