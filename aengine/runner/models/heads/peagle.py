"""P-EAGLE (Hui et al. 2026, arXiv:2602.01469): EAGLE-3's layer and some behind it, which draft all tokens in one pass.

    position    ...  n - 2      n - 1       n         n + 1       of a text with the tokens x_0 .. x_n
    state       ...  target's   target's    learned   learned     the same one for all masks
    token       ...  x_{n-1}    x_n         mask      mask
    predicts                    draft 1     draft 2   draft 3     each sees what is before it, masks too

So the pairs of the text are EAGLE-3's, and their keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ...layers.attention import AttentionCall
from ...layers.decoder import Decoder
from ...model_config import ModelConfig
from ...weights.scope import WeightScope
from ...weights.weight import put_into
from .draft_head import OnePassHead, mask_of
from .eagle3 import Eagle3, Eagle3Config, eagle3_fields, eagle3_keys
from .parts import Stored, lacks

MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
"""Keys of config.json that may name the mask token, in the order in which vLLM looks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    mask_token_id: int

    @classmethod
    def for_target(cls, hf: Mapping[str, Any], target: ModelConfig) -> Self:
        """Read a config.json, in the form that vLLM reads or in that of speculators. Raises ModelLoadError."""
        keys = eagle3_keys(hf)
        return cls(**eagle3_fields(keys, target), mask_token_id=mask_of(keys, MASK_KEYS, target.vocab_size))


class PEagle(Eagle3, OnePassHead):
    config_class: ClassVar[type[ModelConfig]] = PEagleConfig
    predicts_itself = False
    sees_masks = False
    most_drafts = 16  # config.json does not say

    def __init__(self, config: PEagleConfig, weights: WeightScope, target: Decoder[Any], stored: Stored | None) -> None:
        super().__init__(config, weights, target, stored)
        self.mask_token_id = config.mask_token_id
        self._streams_of_masks: Tensor  # [1, len(captured) * their size]
        width = len(config.captured) * target.config.hidden_size
        shape = (1, width) if stored is None else stored.get("mask_hidden")
        if shape is None:
            raise lacks("mask_hidden", "the state that its masks hold")
        ones = (1,) * min(2, len(shape) - 1)  # it is published with one of them, and with two
        weights.want("mask_hidden", (*ones, width), weights.formats.dtype, self._put_mask)

    def _put_mask(self, streams: Tensor) -> None:
        if not streams.isfinite().all():
            raise ModelLoadError("the head's mask_hidden holds NaN or infinity: the file is damaged, get it again")
        put_into(self, "_streams_of_masks", streams.to(self.weights.formats.dtype).view(1, -1))

    def draft(
        self, input_ids: Tensor, positions: Tensor, attn: AttentionCall, received: Tensor, are_drafted: Tensor
    ) -> Tensor:
        mask = self.combine(self._streams_of_masks)
        return self.forward(input_ids, positions, attn, torch.where(are_drafted[:, None], mask, received))
