"""An encoder whose layers run as one tape of compiled ops, on a CPU, see graphs/tape_model.py: a third of the step of a
short text would be the launching of ops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.cpu.tape import NotRecorded, record
from ..models.encoders.encoder import Encoder
from .batch import EncoderBatch

logger = logging.getLogger("aengine.runner")


class _Texts:
    """What the ops of a tape read of an `EncoderBatch`: memory of one address for all steps."""

    is_compiled = True

    def __init__(self, max_tokens: int) -> None:
        self.positions = torch.zeros(max_tokens, dtype=torch.int64)
        self.texts = torch.zeros(max_tokens, dtype=torch.int64)
        self.begins = torch.zeros(max_tokens, 1, dtype=torch.int32)
        self.token_counts = torch.zeros(max_tokens, dtype=torch.int64)

    def fill(self, batch: EncoderBatch) -> None:
        for name in ("positions", "texts", "begins", "token_counts"):
            own: Tensor = getattr(batch, name)
            getattr(self, name)[: len(own)] = own

    @property
    def groups(self) -> Any:
        raise NotRecorded("attention of heads whose size 16 does not divide")

    def biases(self, make: Callable[[Tensor], Tensor]) -> Any:
        raise NotRecorded("attention with biases of distances")


class EncoderTape:
    """The layers of an encoder, recorded over memory of its own."""

    def __init__(self, model: Encoder[Any], max_tokens: int) -> None:
        """``max_tokens``: most of a step. Raises NotRecorded: an op of the layers can't be on a tape."""
        self._model = model
        self._texts = _Texts(max_tokens)
        texts: Any = self._texts
        self._x = torch.zeros(max_tokens, model.config.hidden_size)
        with record(max_tokens) as self._layers:
            self._hidden = model.run_layers(self._x, texts)

    @property
    def num_ops(self) -> int:
        return len(self._layers)

    def forward(self, batch: EncoderBatch) -> Tensor:
        """See `Encoder`. The next step overwrites the result."""
        n = len(batch.positions)
        self._x[:n] = self._model.embed(batch)
        self._texts.fill(batch)
        self._layers.run(n)
        return self._hidden[:n]


def forward_of(model: Encoder[Any], max_tokens: int) -> Callable[[EncoderBatch], Tensor]:
    """The forward of the model as a tape, or, with a line in the log, as it is."""
    begun = time.perf_counter()
    try:
        tape = EncoderTape(model, max_tokens)
    except NotRecorded as why:
        logger.info("the encoder runs op by op: %s is not compiled", why)
        return model.forward
    logger.info("the encoder runs as a tape of %d ops, made in %.2f s", tape.num_ops, time.perf_counter() - begun)
    return tape.forward
