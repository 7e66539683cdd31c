"""Counters by which the queues of two GPUs of one machine wait for each other; nothing goes through the host.

    signal     the counter, another GPU's say, becomes this number when all that was queued before has been done
    wait       what is queued next begins when this GPU's counter has come to this number

A counter is named by its address, int64 [1] on the device: the memory is mapped, and not torch's. Only one GPU writes
it, ever greater numbers. A wait has no end of its own.
"""

from __future__ import annotations

from torch import Tensor


def signal(counter: Tensor, number: int) -> None:
    """Set the counter. What this GPU wrote before, also to the other one, is there when the number is."""
    from .triton import signal as triton_op

    triton_op.signal(counter, number)


def wait(counter: Tensor, number: int) -> None:
    """Wait for the counter to be ``number`` or more; then all is there that was written before it was set."""
    from .triton import signal as triton_op

    triton_op.wait(counter, number)
