"""Heads that draft for a target: layers that read what the target has computed, and predict further tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ....errors import ModelLoadError
from ...distributed.group import ALONE, TensorGroup
from ...layers.decoder import Decoder
from ...weights.formats import WeightFormats
from ...weights.scope import WeightScope
from ..causal_lm import CausalLM
from .dflash import DFlash, DFlashConfig
from .draft_head import DraftHead, OnePassHead, WholeModel
from .eagle3 import Eagle3, Eagle3Config
from .mtp import DeepseekMtp, Glm4MoeMtp, MimoMtp, Qwen3NextMtp, Qwen35Mtp
from .parts import Stored
from .peagle import MASK_KEYS, PEagle, PEagleConfig

__all__ = ["DraftHead", "OnePassHead", "WholeModel", "build_head", "method_of"]

_MTP: Mapping[str, Any] = {
    "deepseek_v3": DeepseekMtp,
    "glm4_moe": Glm4MoeMtp,
    "glm4_moe_lite": DeepseekMtp,
    "mimo": MimoMtp,
    "mimo_mtp": MimoMtp,
    "qwen3_5_moe_text": Qwen35Mtp,
    "qwen3_5_text": Qwen35Mtp,
    "qwen3_next": Qwen3NextMtp,
}
"""The class of heads for each ``model_type``, of the target's own checkpoint or of a head's that is apart."""
_APART: Mapping[str, Any] = {
    "dflash": (DFlash, DFlashConfig),
    "eagle3": (Eagle3, Eagle3Config),
    "peagle": (PEagle, PEagleConfig),
}
"""Heads whose checkpoints are always apart, by method of speculation."""


def build_head(
    hf_config: Mapping[str, Any],
    stored: Stored | None,
    target: CausalLM,
    formats: WeightFormats,
    group: TensorGroup = ALONE,
) -> DraftHead:
    """Return the head that a config.json describes, whose weights are yet to be loaded.

    Args:
        stored: names and shapes of the tensors of its checkpoint; None: it has those that such heads are published with
        target: loaded or not; what the head has in common with it is the target's
        group: the ranks among which the target's layers are divided, and the head's

    Raises ModelLoadError: there is no such head; its checkpoint, or the target, has not what it needs.
    """
    if not isinstance(target, Decoder):
        raise ModelLoadError(f"a head drafts for models of a native family, and {target.config.model_type!r} has none")
    method, scope, head = method_of(hf_config, stored or ()), WeightScope(formats, group=group), None
    if method in _APART:
        family, config_class = _APART[method]
        config = config_class.for_target(hf_config, target.config).of_rank(group.size)
        head = family(config, scope, target, stored)
    else:
        family = _MTP[str(hf_config["model_type"])]
        head = family(family.read_config(hf_config, target.config).of_rank(group.size), scope, target)
    assert isinstance(head, DraftHead)
    return head


def method_of(hf_config: Mapping[str, Any], names: Collection[str] = ()) -> str:
    """Return the method of a head with this config.json and tensors of these names. Raises ModelLoadError: it is none
    that is known."""
    given = hf_config.get("architectures")
    said = " ".join(map(str, given)).lower() if isinstance(given, list) else ""
    kind = hf_config.get("speculators_model_type")
    is_other = any(name in said for name in ("dflash2", "dspark")) or kind not in (None, *_APART)
    if not is_other:
        if kind == "dflash" or "dflash" in said or "dflash_config" in hf_config:
            return "dflash"
        is_eagle = kind == "eagle3" or "eagle3" in said or "draft_vocab_size" in hf_config
        if kind == "peagle" or "peagle" in said or (is_eagle and _has_masks(hf_config, names)):
            return "peagle"
        if is_eagle:
            return "eagle3"
        if hf_config.get("model_type") in _MTP:
            return "mtp"
    raise ModelLoadError(
        f"config.json: {kind or hf_config.get('model_type')!r:.80} names no head that drafts: these are DFlash's, "
        f"EAGLE-3's, P-EAGLE's, and the MTP layers of {', '.join(_MTP)}"
    )


def _has_masks(hf_config: Mapping[str, Any], names: Collection[str]) -> bool:
    return "mask_hidden" in names or any(hf_config.get(key) is not None for key in MASK_KEYS[:2])
