"""Parts of the exchanges between ranks.

The buffers have memory for two calls in turn. A rank may overwrite what a call used at the next call but one: at the
one between it has got something from every rank, and a rank sends that only when its own call before has ended
(`gdc_wait`, and the order of launches).
"""

from __future__ import annotations

import triton
import triton.language as tl


class Phase:
    """What of a call a launch does: all of it. In the interpreter one process plays all ranks, which send first, then
    add (in two shots), then take."""

    SEND = 1
    ADD = 2
    TAKE = 4
    ALL = 7


@triton.jit
def memories_of(addresses_ptr, SIZE: tl.constexpr, TYPE: tl.constexpr):
    """Return a pointer, to elements of TYPE, to the begin of each rank's memory."""
    memories = ()
    for r in tl.static_range(SIZE):
        memory = tl.load(addresses_ptr + r).to(tl.pointer_type(TYPE))
        memories = memories + (tl.multiple_of(memory, 16),)  # type: ignore[assignment]
    return memories


@triton.jit
def end_call(calls_ptr, call, COUNTERS: tl.constexpr):
    """Set the counters that are this program's: its own, and those of the programs that this launch does not have."""
    counter = tl.program_id(0) + tl.arange(0, COUNTERS) * tl.num_programs(0)
    tl.store(calls_ptr + counter, call, mask=counter < COUNTERS)
