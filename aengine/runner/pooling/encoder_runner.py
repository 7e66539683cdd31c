"""The runner of an encoder: a request is a text that is computed in one step, and gets a vector.

Nothing of it is kept on the device between steps, so that there are no rows and no KV. In a step with several texts,
those of like length are neighbours (`EncoderBatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import InternalError
from ...ipc.messages import GrammarOutput, MessageError, NewRequest, RowError, SchedulerOutput
from ..async_output import NO_SIDE_OUTPUT, AsyncOutput, OutputCopier, SideOutput
from ..input_batch import NO_ROWS
from ..models.encoders.encoder import Encoder
from ..platforms.platform import Platform
from .asked import EXTRA, AskedPooling
from .batch import EncoderBatch
from .pooled_tensors import PooledTensors
from .vectors import VectorLayers

_TOLERANCE_ON_A_GPU = 0.75
"""Texts of so much of the longest's length are padded to it there, as a launch costs more than what it computes."""


class EncoderRunner:
    """A `Runner` (workers/loaded.py). ``vectors``: how a text gets its embedding; None: it gets the head's logits.
    ``forward``: what runs in place of the model's."""

    prepares_after = None

    def __init__(
        self,
        model: Encoder[Any],
        vectors: VectorLayers | None,
        platform: Platform,
        forward: Callable[[EncoderBatch], Tensor] | None = None,
    ) -> None:
        self._model = model
        self._forward = forward or model.forward
        self._vectors = vectors
        self._platform = platform
        self._copy_out = OutputCopier(platform)
        self._texts: dict[int, NewRequest] = {}  # the texts under way, by row
        self._answer: AsyncOutput | None = None

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> None:
        """Compute the step's vectors. Raises InternalError if the step before has not been asked for its answer."""
        if self._answer is not None:
            raise InternalError(f"step {out.step_id} came before the one before it was answered")
        for row in out.removed:
            del self._texts[row]
        for request in out.new_requests:
            self._texts[request.req_idx] = request
        requests = [self._texts[row] for row in out.req_idx]
        for request, count in zip(requests, out.num_scheduled_tokens, strict=True):
            if count != len(request.token_ids):
                raise InternalError(f"row {request.req_idx} computes {count} of its {len(request.token_ids)} tokens")
        errors = {i: error for i, request in enumerate(requests) if (error := self._check(i, request)) is not None}
        order = sorted((i for i in range(len(requests)) if i not in errors), key=lambda i: -len(requests[i].token_ids))
        side: SideOutput = NO_SIDE_OUTPUT
        source = None
        if order:
            vectors = self._compute([requests[i] for i in order])
            side = PooledTensors(np.stack((np.array(order), np.full(len(order), vectors.shape[1]))), vectors.flatten())
            source = self._copy_out(side.tensors)
        self._answer = AsyncOutput(out.step_id, len(requests), NO_ROWS, source, errors, side=side)

    def _compute(self, requests: list[NewRequest]) -> Tensor:
        """Return float32 [n, size]."""
        batch = EncoderBatch(
            [request.token_ids for request in requests],
            [AskedPooling.of(request).num_first_tokens for request in requests],
            self._platform.device,
            _TOLERANCE_ON_A_GPU if self._platform.is_accelerator else 1.0,
            is_compiled=self._model.weights.formats.is_compiled,
        )
        hidden = self._forward(batch)
        if self._vectors is None:
            return self._model.classify(hidden, batch).float()
        pooled = {"mean": batch.mean, "cls": batch.first, "last": batch.last}[self._vectors.mode](hidden)
        return self._vectors.finish(pooled)

    def _check(self, i: int, request: NewRequest) -> RowError | None:
        if EXTRA not in request.extras:
            return RowError(i, "InvalidRequestError", "an encoder generates no text: ask it for embeddings or scores")
        try:
            AskedPooling.of(request)
        except MessageError as error:
            return RowError(i, "InternalError", f"what the request asks of the encoder can't be read: {error}")
        vocab_size = self._model.config.vocab_size
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
            return RowError(i, "InvalidRequestError", f"the prompt has a token id outside 0 to {vocab_size - 1}")
        return None

    def sample_tokens(self, grammar: GrammarOutput | None) -> AsyncOutput:
        """Return the answer of the step before. Raises InternalError if there is none."""
        answer, self._answer = self._answer, None
        if answer is None:
            raise InternalError("there is no step to answer: execute_model comes first")
        return answer

    def prepare_more(self) -> None:
        """See `Runner`."""
