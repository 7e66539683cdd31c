"""The `KernelPolicy` that the settings ask for, of what the device and the model can do."""

from __future__ import annotations

from ...config import EngineConfig
from ...errors import ModelLoadError
from ...kernels.policy import KernelPolicy
from ..kv_spec import LatentKV, StateKV
from ..model_config import ModelConfig
from ..platforms.platform import Platform
from ..weights.formats import COMPILED_DTYPES


def choose_policy(config: EngineConfig, model_config: ModelConfig, platform: Platform, dtype: str) -> KernelPolicy:
    """Choose the kernels' policy. ``dtype``: of the activations. Raises ModelLoadError if the model, the device or the
    division has no batch-invariant variant."""
    if config.batch_invariant and (reason := _why_not(config, model_config, platform, dtype)):
        raise ModelLoadError(f"batch_invariant=True: {reason}, or leave batch_invariant at False")
    return KernelPolicy(config.batch_invariant)


def _why_not(config: EngineConfig, model_config: ModelConfig, platform: Platform, dtype: str) -> str:
    """Return the reason, and what else can be done about it; "" if there is none. What the settings say by themselves,
    early_checks.py has found."""
    if platform.is_accelerator and (reason := _why_not_on_gpu(config, platform, dtype)):
        return reason
    kind = model_config.model_type
    if model_config.implementation == "transformers":
        return f"{kind!r} is computed by transformers' code, where torch adds up: use a model of aengine's own families"
    if any(isinstance(kv, StateKV) for kv in model_config.kv_layers):
        return (
            f"{kind!r} has recurrent layers or short convolutions, which add up in an order that depends on how a "
            f"prompt is cut into steps: use a model that only attends"
        )
    if any(isinstance(kv, LatentKV) for kv in model_config.kv_layers):
        return f"{kind!r} multiplies head by head, by a library that adds up in an order of its own: use another model"
    if model_config.num_experts and not platform.is_accelerator:
        return _why_no_experts(config, platform)
    return ""


def _why_no_experts(config: EngineConfig, platform: Platform) -> str:
    together = "an expert multiplies the rows of all requests that chose it together"
    if not platform.compiled_types:
        return f"without compiled kernels {together}: get them (extra 'cpu'; a worker logs why there are none)"
    if config.dtype not in COMPILED_DTYPES:
        others = " or ".join(map(repr, COMPILED_DTYPES))
        return f"dtype={config.dtype!r} has no compiled kernels, and without them {together}: use dtype={others}"
    return ""


def _why_not_on_gpu(config: EngineConfig, platform: Platform, dtype: str) -> str:
    if not platform.adds_in_order:
        return f"{platform.name} has no kernels that add up in one order: use a GPU of compute capability 9.0"
    if dtype == "float32":
        return "on a GPU a library multiplies float32, in an order of its own: use dtype='bfloat16' or 'float16'"
    if config.kv_cache_dtype not in ("auto", dtype):
        return f"kv_cache_dtype={config.kv_cache_dtype!r} has no such attention on a GPU: leave that at 'auto'"
    if config.attention_backend not in ("auto", "triton"):
        backend = config.attention_backend
        return f"attention_backend={backend!r} chooses by the lengths of a step's prompts: leave that at 'auto'"
    return ""
