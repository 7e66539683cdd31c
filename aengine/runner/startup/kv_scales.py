"""The scales of keys and values in FP8: those of the checkpoint, or measured by a run of the model, or 1.

Measured, a scale is a power of two: the largest key (or value) that a head had for `_TOKENS` fixed tokens is 112 to 224
scales, so that one of up to twice as large is kept too, and smaller ones keep three bits of mantissa down to 2^-13 of
it. They are measured with keys and values in the dtype of the computation, by a step over a small cache of its own. The
tokens follow from the size of the vocabulary alone, so that each rank measures its heads, each replica and each worker
that takes the place of another the same ones.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.source import ModelSource
from ...config import EngineConfig
from ...errors import ModelLoadError
from ...ipc.messages import NewRequest, SchedulerOutput, int32
from ...kernels.kv_codes import LARGEST
from ..attention.kv_format import KVFormat, ScaledKV, kv_format_of
from ..kv_spec import FullKV, LatentKV, LayerKV, WindowKV
from ..model_config import ModelConfig
from ..weights.sources.safetensors_source import read_matching
from .setup import RunnerSetup

logger = logging.getLogger("aengine.runner")

_TOKENS = 256
_STRIDE = 7919  # a prime: the fixed tokens are its multiples
_NAME = re.compile(
    r"^(?:(?:model|language_model)\.)*layers\.(\d{1,9})\.\w+\.(?:(?:k_proj|v_proj|qkv_proj|attn)\.)?(k|v|kv)_scale$"
)
"""Names of scales: compressed-tensors has them beside the matrices of an attention, ModelOpt in those of k and v. Other
modules (mtp, a vision tower) have layers of their own."""
_LEAST, _MOST = 2.0**-24, 2.0**12
"""Scales that a checkpoint may have. By the least no number beyond 3e-5 is kept, by the most none below 8: what a model
has for keys and values lies far between, but in heads of zeros, to which writers give a scale of some 1e-7."""
_CURE = "give kv_cache_scales='calibrated', or leave kv_cache_dtype at 'auto'"


def choose_kv_format(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, source: ModelSource, rank: int
) -> KVFormat:
    """What keys and values are kept as, where the model computes in ``dtype``; `measured` makes it complete.

    ``rank``: of those that divide the layers. Raises ModelLoadError: the checkpoint's scales can't be used.
    """
    kept = kv_format_of(config.kv_cache_dtype, dtype)
    if kept.origin and any(isinstance(kv, LatentKV) for kv in model_config.kv_layers):
        raise ModelLoadError(
            f"kv_cache_dtype={config.kv_cache_dtype!r}: keys and values of {model_config.model_type!r} are made of "
            f"latents, which are kept as numbers of 16 or 32 bits: leave it at 'auto'"
        )
    if config.kv_cache_dtype == "auto" and _asks_for_fp8(source.hf_config):
        logger.info(
            "the checkpoint is made for keys and values in FP8: kv_cache_dtype='fp8' keeps them so, by its scales; "
            "'auto' keeps them in %s, nearer to the model that it was made from",
            kept.name,
        )
    if not kept.origin or config.kv_cache_scales == "one":
        return kept
    stored: Mapping[str, Tensor] = {}
    if config.kv_cache_scales == "auto" and source.format == "safetensors":
        stored = read_matching(Path(source.path), _NAME)
    if not stored:
        return ScaledKV(source="calibrated")
    try:
        return ScaledKV(by_layer=_of_checkpoint(stored, model_config, rank), source="checkpoint")
    except ValueError as error:
        raise ModelLoadError(f"{source.path}: {error}: {_CURE}") from error


def _asks_for_fp8(hf_config: Mapping[str, Any]) -> bool:
    asked = hf_config.get("quantization_config") or hf_config.get("compression_config")
    if not isinstance(asked, Mapping):
        return False
    return asked.get("kv_cache_scheme") is not None or asked.get("kv_cache_quant_algo") == "FP8"


def _of_checkpoint(stored: Mapping[str, Tensor], config: ModelConfig, rank: int) -> dict[int, Tensor]:
    """Raises ValueError: they can't be used."""
    heads = {i: kv.num_kv_heads for i, kv in enumerate(config.kv_layers) if isinstance(kv, FullKV | WindowKV)}
    pieces, piece = config.num_ranks // config.kv_copies, rank // config.kv_copies
    found = {i: torch.zeros(2, count) for i, count in heads.items()}
    for name, tensor in stored.items():
        parts = _NAME.search(name)
        assert parts is not None
        layer, which = int(parts[1]), parts[2]
        if layer not in heads:
            raise ValueError(f"{name}: layer {layer} keeps no keys and values of its own")
        if tensor.numel() not in (1, heads[layer] * pieces):
            raise ValueError(
                f"{name} has {tensor.numel()} scales, and the layer {heads[layer] * pieces} key-value heads"
            )
        scales = tensor.float().flatten()
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ValueError(f"{name} has a scale that is no finite number above 0")
        if not bool(((scales >= _LEAST) & (scales <= _MOST)).all()):
            raise ValueError(
                f"{name} has a scale of {float(scales.min()):.2g} to {float(scales.max()):.2g}, by which no keys or "
                f"values would be left: those from {_LEAST:.2g} to {_MOST:g} are read"
            )
        own = scales if len(scales) == 1 else scales[piece * heads[layer] :][: heads[layer]]
        for row in {"k": (0,), "v": (1,), "kv": (0, 1)}[which]:
            if found[layer][row].any() and not (found[layer][row] == own).all():
                raise ValueError(f"{name} is another scale than the one that layer {layer} has as well")
            found[layer][row] = own
    for layer, scales in found.items():
        for which, row in zip(("k_scale", "v_scale"), scales, strict=True):
            if not row.all():
                raise ValueError(f"it has scales of keys and values, but no {which} of layer {layer}")
    return found


def measured(setup: RunnerSetup) -> RunnerSetup:
    """``setup`` with scales that are measured, if they are to be. All ranks that compute a step together call it
    together."""
    kept = setup.kv_format
    if kept.origin != "calibrated":
        return setup
    layers: tuple[LayerKV, ...] = setup.model_config.kv_layers
    if not any(isinstance(kv, FullKV | WindowKV) for kv in layers):
        return setup
    how: dict[str, Any] = {"enforce_eager": True, "cudagraph_mode": "auto", "cudagraph_capture_sizes": None}
    config = setup.config.replace(swap_space_bytes=0, speculation="none", max_num_seqs=1, **how)
    plain = replace(setup, config=config, kv_format=KVFormat(setup.model.weights.formats.dtype))
    return replace(setup, kv_format=ScaledKV(by_layer=_measure(plain), source="calibrated"))


def _measure(setup: RunnerSetup) -> dict[int, Tensor]:
    groups, vocab_size = setup.kv_layout.groups, setup.model_config.vocab_size
    length = min(_TOKENS, setup.max_batched, setup.model_config.max_position_embeddings - 1)
    counts = [-(-length // group.block_size) for group in groups]
    spans = int32(n for count in counts for n in (0, count))
    cache = setup.make_cache(sum(counts), length + 1)
    runner = setup.make_runner(sum(counts), length + 1, cache=cache)
    # The prompt has one token more, so that nothing is sampled: the first pipeline stage would get it with later steps.
    tokens, blocks = int32(i * _STRIDE % vocab_size for i in range(length + 1)), int32(range(sum(counts)))
    new = NewRequest(0, tokens, length + 1, 0, blocks, block_spans=spans)
    rows = int32([0])
    step = SchedulerOutput(0, new_requests=[new], req_idx=rows, num_scheduled_tokens=int32([length]))
    for out in (step, SchedulerOutput(1, removed=rows)):
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        if answer.errors:
            raise ModelLoadError(
                f"kv_cache_dtype='fp8': scales could not be measured: {answer.errors[0].message}; give 'auto'"
            )
    setup.platform.synchronize()
    scales = {}
    for index, kept in cache.layers.items():
        first = sum(counts[: kept.group])
        own = kept.cache[first : first + counts[kept.group]]
        scales[index] = _scale_of(own.float().abs().amax((0, 1, 4)))
    del runner, cache
    gc.collect()
    setup.platform.release_cached()
    return scales


def _scale_of(largest: Tensor) -> Tensor:
    """The power of two that ``largest`` is 112 to 224 times of; 1 where that is 0, infinite or NaN."""
    _, exponent = torch.frexp(largest * (2 / LARGEST))
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return torch.where(largest.isfinite() & (largest > 0), scale, 1.0)
