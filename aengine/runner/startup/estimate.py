"""What a model takes in memory: of a loaded one, and, by the headers of its files alone, of one that is not."""

from __future__ import annotations

from typing import Any, Literal

from ...checkpoint.early_checks import check_cpu, check_start
from ...checkpoint.source import ModelSource, resolve_model
from ...checkpoint.value_reader import damage_explained
from ...config import EngineConfig
from ...errors import ModelLoadError
from ...limits.memory import free_memory
from ..attention.torch_attention import DEFAULT_BLOCK_SIZE
from ..kv_spec import FullKV, WindowKV, lay_out_kv
from ..model_config import ModelConfig
from ..models import build_model, gguf_names, read_config
from ..models.causal_lm import CausalLM
from ..models.encoders import is_encoder
from ..platforms.choice import choose_platform
from ..platforms.platform import Platform
from ..weights.formats import COMPILED_DTYPES, WeightFormats, choose_formats
from ..weights.inventory import TensorsOfAKind, inventory, line_of
from ..weights.quantised.gguf import CODED_TYPES
from ..weights.sources.gguf_source import GgufMatrices, gguf_types
from ..weights.sources.loader import check_layers, check_tensors, stored_shapes, tensor_names
from .heads import DecoderHead
from .kv_memory import cpu_budget
from .kv_scales import choose_kv_format


def estimate(config: EngineConfig) -> dict[str, Any]:
    """What all ranks of a replica would take together. Keys: "device"; "line": the tensors in words; "formats": of
    "weights", their `precision`, and on a CPU what computes "attention"; "weight_bytes": those that share "room", bytes
    that are free for them and the KV cache: on a GPU one rank's; "kv_bytes_per_token", in layers that keep all tokens
    or a window of them; "kv_tokens": as many fit beside the weights, activations not counted. Of an encoder nothing is
    counted.

    Raises ModelLoadError: the model is not here, or can't be loaded.
    """
    source = resolve_model(config)
    with damage_explained(source.path):
        check_start(config, source.hf_config)
        if is_encoder(source.hf_config):
            return _of_encoder(config)
        head = DecoderHead.of(source)
        folder = None if source.format == "gguf" else source.path
        hf = head.settings(source.hf_config)
        how: dict[str, Any] = {"model_impl": config.model_impl, "trust_remote_code": config.trust_remote_code}
        model_config = read_config(hf, folder=folder, **how)
        if model_config.implementation == "native":
            check_layers(source, model_config.num_layers)
        platform = choose_platform(config.device)
        if platform.device.type == "cpu":
            check_cpu(config)
        dtype = platform.choose_dtype(config.dtype, model_config.checkpoint_dtype)
        packed = gguf_matrices(config, source, model_config, platform)
        formats = choose_formats(
            dtype,
            platform.device,
            hf,
            packed=packed,
            quantization=config.quantization,
            stored=tensor_names(source),
            dequantises=config.on_unsupported_format == "dequantise",
            is_compiled=model_config.implementation == "native" and bool(platform.compiled_types),
            folder=source.path,
        )
        check_library(config, model_config, formats)
        kept = choose_kv_format(config, model_config, formats.dtype, source, 0)
        model = build_model(model_config, formats)
        if model.weights.names is not None:
            model.weights.names.choose(stored_shapes(source))
        check_tensors(model, source)
        groups = tensors_of(model, source)
    layout = lay_out_kv(
        model_config.kv_layers,
        config.block_size or DEFAULT_BLOCK_SIZE,
        kept.dtype.itemsize,
    )
    weight_bytes = sum(group.bytes for group in groups)
    if platform.is_accelerator:  # a GPU each
        weight_bytes = -(-weight_bytes // config.num_ranks)
    budget, room = _budget(config, platform, weight_bytes)
    per_token = sum(layout.page_bytes / group.block_size for group in layout.groups if group.kind != "state")
    return {
        "device": str(platform.device),
        "line": line_of(groups),
        "formats": {"weights": _formats_of(groups), **formats.precision, **_attention(config, model_config, formats)},
        "weight_bytes": weight_bytes,
        "room": room,
        "kv_bytes_per_token": round(per_token),
        "kv_tokens": int(max(0, budget) * config.num_ranks // per_token) if per_token else 0,
    }


def _formats_of(groups: list[TensorsOfAKind]) -> str:
    """Each format that matrices will be kept in, once."""
    return ", ".join(dict.fromkeys(form for group in groups for form in group.format.split(", ") if form))


def _attention(config: EngineConfig, model: ModelConfig, formats: WeightFormats) -> dict[str, str]:
    """On a CPU: compiled kernels, if they run the model as a tape, else torch."""
    if formats.device.type != "cpu":
        return {}
    sizes = [kv.head_dim for kv in model.kv_layers if isinstance(kv, FullKV | WindowKV)]
    fits = all(size % 16 == 0 for size in sizes) and all(rope.long() is None for rope in model.ropes)
    is_taped = formats.is_compiled and model.has_tape and fits and config.num_ranks == 1 and not config.enforce_eager
    return {"attention": "compiled kernels" if is_taped else "torch"}


def _of_encoder(config: EngineConfig) -> dict[str, Any]:
    platform = choose_platform(config.device)
    return {
        "device": str(platform.device),
        "line": "an encoder, whose matrices are plain numbers and which keeps no keys and values",
        "formats": {},
        "weight_bytes": 0,
        "room": _budget(config, platform, 0)[1],
        "kv_bytes_per_token": 0,
        "kv_tokens": 0,
    }


def tensors_of(model: CausalLM, source: ModelSource) -> list[TensorsOfAKind]:
    """What the tensors of a model have become, or will become."""
    config = model.config
    top_k = getattr(config, "experts_per_token", 0) or getattr(getattr(config, "routing", None), "top_k", 0)
    share = min(1.0, top_k / config.num_experts) if top_k and config.num_experts else 1.0
    is_gguf = source.format == "gguf"
    return inventory(model.weights, share, gguf_types(source.path, gguf_names(config)) if is_gguf else {})


def check_library(config: EngineConfig, model_config: ModelConfig, formats: WeightFormats) -> None:
    """Raise ModelLoadError for what a model of transformers can't have."""
    if model_config.implementation != "transformers" or formats.quantised is None:
        return
    cure = (
        "leave quantization at 'auto'" if config.quantization != "auto" else "give the checkpoint that it was made from"
    )
    if config.model_impl == "transformers":
        cure = f"leave model_impl at 'auto' if aengine has this family, or {cure}"
    raise ModelLoadError(
        f"{formats.folder}: weights in {formats.name}, by quantization={config.quantization!r} and the "
        f"quantization_config of config.json: a model of {model_config.model_type!r}, which transformers computes, is "
        f"read in 16 or 32 bits only: {cure}"
    )


def gguf_matrices(
    config: EngineConfig, source: ModelSource, model_config: ModelConfig, platform: Platform
) -> GgufMatrices | None:
    """The matrices that are kept in a GGUF file's own formats; None: they become numbers. Raises ModelLoadError."""
    is_asked = config.quantization == "gguf"
    if is_asked and source.format != "gguf":
        raise ModelLoadError(f"quantization='gguf': {source.path} is no .gguf file: leave it at 'auto'")
    compiled = platform.compiled_types if config.dtype in COMPILED_DTYPES else ()
    is_coded = platform.is_accelerator or compiled
    by_default = is_coded and config.dtype == config.quantization == "auto" and model_config.implementation == "native"
    if source.format != "gguf" or not (is_asked or by_default):
        return None
    types = CODED_TYPES if platform.is_accelerator else compiled or None
    activations: Literal["codes", "float32"] | None = None
    if compiled:
        activations = "codes" if config.dtype == "auto" else "float32"
    has_stacks = platform.is_accelerator or bool(compiled)
    return GgufMatrices.of_file(source.path, gguf_names(model_config), types, activations, has_stacks)


def _budget(config: EngineConfig, platform: Platform, weight_bytes: int) -> tuple[int, int]:
    """Bytes for KV, and those that are free for it and the weights."""
    if not platform.is_accelerator:
        free = free_memory()
        left = max(0, free - weight_bytes)
        return cpu_budget(config, free=left, weights=weight_bytes, num_processes=config.num_ranks), free
    memory = platform.memory()
    room = int(memory.total * config.gpu_memory_utilization) - (memory.total - memory.free)
    return config.kv_cache_memory_bytes or room - weight_bytes, room
