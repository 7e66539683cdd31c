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
from .draft_head import DraftHead
from .eagle3 import Eagle3, Eagle3Config
from .mtp import MimoMtp, Qwen3NextMtp, Qwen35Mtp

__all__ = ["DraftHead", "build_head"]

_MTP: Mapping[str, Any] = {
    "mimo": MimoMtp,
    "mimo_mtp": MimoMtp,
    "qwen3_5_moe_text": Qwen35Mtp,
    "qwen3_5_text": Qwen35Mtp,
    "qwen3_next": Qwen3NextMtp,
}
"""By ``model_type``, of the target's own checkpoint or of a head's that is apart."""


def build_head(
    hf_config: Mapping[str, Any],
    stored: Collection[str] | None,
    target: CausalLM,
    formats: WeightFormats,
    group: TensorGroup = ALONE,
) -> DraftHead:
    """Return the head that a config.json describes, whose weights are yet to be loaded.

    Args:
        stored: names of the tensors of its checkpoint; None: it has those that such heads are published with
        target: loaded or not; what the head has in common with it is the target's
        group: the ranks among which the target's layers are divided, and the head's

    Raises ModelLoadError: there is no such head; its checkpoint, or the target, has not what it needs.
    """
    if not isinstance(target, Decoder):
        raise ModelLoadError(f"a head drafts for models of a native family, and {target.config.model_type!r} has none")
    if _is_eagle3(hf_config):
        config = Eagle3Config.for_target(hf_config, target.config).of_rank(group.size)
        return Eagle3(config, WeightScope(formats, group=group), target, stored)
    model_type = hf_config.get("model_type")
    if (family := _MTP.get(str(model_type))) is None:
        raise ModelLoadError(
            f"config.json: {model_type!r:.80} names no head that drafts: these are EAGLE-3's, and the MTP layers of "
            f"{', '.join(_MTP)}"
        )
    one_layer = family.read_config(hf_config, target.config).of_rank(group.size)
    head: DraftHead = family(one_layer, WeightScope(formats, group=group), target)
    return head


def _is_eagle3(hf_config: Mapping[str, Any]) -> bool:
    names = hf_config.get("architectures")
    is_named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return is_named or "draft_vocab_size" in hf_config or hf_config.get("speculators_model_type") == "eagle3"
