"""Of which logits a sampled token's log-probability is: the setting ``logprobs_mode``.

raw_logprobs          log_softmax of the model's own logits
processed_logprobs    log_softmax of what the token was drawn from: logits after penalties, bias, processors and the
                      grammar's mask, divided by the temperature, without what top-k, top-p and min-p cut off.
                      A row of temperature 0 has temperature 1 here, and no cutoff but top-k 1.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels.logprobs import KeptLogits, keep_logits
from ..request_state import Scalars


class LogprobsMode(Protocol):
    """Keeps the logits that log-probabilities are of. The sampler calls `before` with the model's logits float32 [n,
    vocab_size], changes them in place, then calls `after`, whose answer counts."""

    def before(self, logits: Tensor, scalars: Scalars) -> KeptLogits: ...

    def after(self, kept: KeptLogits, logits: Tensor, scalars: Scalars, cutoff: Tensor) -> KeptLogits:
        """cutoff: float32 [n], see `find_cutoff`."""
        ...


class RawLogprobs:
    """Those of the model."""

    def before(self, logits: Tensor, scalars: Scalars) -> KeptLogits:
        return keep_logits(logits, scalars.logprobs_asked)

    def after(self, kept: KeptLogits, logits: Tensor, scalars: Scalars, cutoff: Tensor) -> KeptLogits:
        return kept


class ProcessedLogprobs:
    """Those of the distribution that tokens are drawn from."""

    def before(self, logits: Tensor, scalars: Scalars) -> KeptLogits:
        return KeptLogits(logits, None)

    def after(self, kept: KeptLogits, logits: Tensor, scalars: Scalars, cutoff: Tensor) -> KeptLogits:
        temperature = torch.where(scalars.temperature > 0, scalars.temperature, 1.0)
        cutoff = torch.where(scalars.top_k == 1, logits.amax(1), cutoff)  # such a row is greedy, and has no cutoff
        drawn_from = torch.where(logits >= cutoff[:, None], logits, -torch.inf) / temperature[:, None]
        return keep_logits(drawn_from, scalars.logprobs_asked)


RAW_LOGPROBS = RawLogprobs()
LOGPROBS_MODES: dict[str, LogprobsMode] = {
    "raw_logprobs": RAW_LOGPROBS,
    "processed_logprobs": ProcessedLogprobs(),
}
