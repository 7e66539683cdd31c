"""`PipelineStage`: which layers of a model are on a rank. A value that is passed in, as a `TensorGroup` is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage's place among ``size``: which layers are its own."""

    index: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head, and samples."""
        return self.index == self.size - 1

    def layers(self, num_layers: int) -> range:
        """Return the stage's layers, of ``num_layers``. Where they do not divide, stages in the middle have one more,
        since the first has the embedding and the last the head."""
        least, more = divmod(num_layers, self.size)
        begin = (self.size - more) // 2  # the first stage with one more
        first = self.index * least + min(max(self.index - begin, 0), more)
        return range(first, first + least + (begin <= self.index < begin + more))


WHOLE = PipelineStage()
"""The one stage of a model that is not divided by layers."""
