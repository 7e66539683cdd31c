"""What a request asks of pooling, as the extra of that name in its message says."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from ...ipc.messages import MessageError, NewRequest, int32_of

EXTRA = "pooling"


class AskedPooling(NamedTuple):
    token_ids: array[int]  # the vector is the logits of these, if there are any
    num_first_tokens: int  # leading tokens that belong to the first of two texts; 0: there is one text

    @classmethod
    def of(cls, request: NewRequest) -> AskedPooling:
        """Return what a request asks for that has this extra. Raises MessageError."""
        token_ids, numbers = int32_of(request.extras[EXTRA], 2)
        if len(numbers) != 1:
            raise MessageError(f"pooling has {len(numbers)} numbers instead of 1")
        return cls(token_ids, numbers[0])
