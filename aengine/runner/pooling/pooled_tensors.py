"""`PooledTensors`: the vectors that a step yields, on their way into its answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ...ipc.messages import ModelRunnerOutput, RowError
from ..async_output import HostOutput, SideOutput, add_results
from ..input_batch import Rows


class PooledTensors(SideOutput):
    """The vectors of m requests, float32 [sum of their sizes]. ``places``: positions in the SchedulerOutput, and the
    sizes; host int64 [2, m]."""

    def __init__(self, places: Rows, vectors: Tensor) -> None:
        self._places = places
        self.tensors: Mapping[str, Tensor] = {"side": vectors}

    def add_to(self, output: ModelRunnerOutput, host: HostOutput, errors: dict[int, RowError]) -> None:
        """Add the vectors; of one that has NaN or infinities an error instead."""
        values = host.side
        assert values is not None, "it was copied"
        batch_idx, sizes = self._places
        begins = np.cumsum(sizes) - sizes
        is_good = np.logical_and.reduceat(np.isfinite(values), begins)
        if not is_good.all():
            for i in map(int, batch_idx[~is_good]):
                errors[i] = RowError(i, "InternalError", "the model's vector for this request holds NaN or infinity")
            values = values[np.repeat(is_good, sizes)]
            batch_idx, sizes = batch_idx[is_good], sizes[is_good]
        add_results(output, batch_idx.tolist(), sizes.tolist(), values)
