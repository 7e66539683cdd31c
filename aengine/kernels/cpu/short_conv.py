"""The causal convolution of each channel over the last few tokens, between two gates: kernels/short_conv.py is the
reference. A chunk is some channels of all tokens, one after another, so that a state is read and written once."""

from __future__ import annotations

from .compiler.emit import F32, I32, I64, Function, Value
from .compiler.target import Target, WriteKernel
from .rows import LANES

CHANNELS = 4 * LANES
"""Channels of a chunk."""
_FLOATS = F32 * LANES


def _gated_conv(f: Function, target: Target, width: str) -> None:
    """words: as `gated_conv` in ops.py lays them down."""
    channels, begin = f.word(f.words, 2), f.chunk * CHANNELS
    kept = int(width) - 1  # inputs of a state
    masks = [f.lane_mask(channels - begin - i, LANES) for i in range(0, CHANNELS, LANES)]
    states = [[f.variable(_FLOATS, 0.0) for _ in range(kept)] for _ in masks]
    positions, table_rows, table, kept_pages = (f.address(f.words, i) for i in (8, 9, 10, 13))
    is_ring, length = f.word(f.words, 12) > 0, f.larger(f.word(f.words, 12), 1)

    def load(place: Value, part: int) -> Value:
        """16 channels of a row that begins at a place."""
        return f.load_lanes(_FLOATS, place + (begin + part * LANES) * 4, masks[part])

    with f.loop(0, f.rows) as token:
        own = f.word(table_rows + token * 8, 0)
        page = f.widened(f.load(I32, table + own * f.word(f.words, 11)), I64)
        state, size = f.address(f.words, 5) + page * f.word(f.words, 6), f.word(f.words, 7)
        position = f.word(positions + token * 8, 0)
        before, after = f.larger(token - 1, 0), f.smaller(token + 1, f.rows - 1)
        with f.when(token.equals(0) | f.word(table_rows + before * 8, 0).differs(own)):
            for i in range(kept):
                before_it = position - (kept - i)
                is_there = f.choose(is_ring, before_it + 1, position) > 0
                place = state + size * f.choose(is_ring, (before_it + length) % length, f.like(position, i))
                for part, inputs in enumerate(states):
                    inputs[i].set(f.choose(is_there, load(place, part), 0.0))
        for part, inputs in enumerate(states):
            b, c, x = (load(f.address(f.words, 0) + (token * 3 + i) * channels * 4, part) for i in range(3))
            past = [*(variable.get() for variable in inputs), b * x]
            y = f.like(x, 0.0)
            for i, one in enumerate(past):
                y = f.fma(one, load(f.address(f.words, 3) + channels * (4 * i), part), y)
            bias = f.variable(_FLOATS, 0.0)
            with f.when(f.word(f.words, 4).differs(0)):
                bias.set(load(f.address(f.words, 4), part))
            out = f.address(f.words, 1) + (token * channels + begin + part * LANES) * 4
            f.store_lanes(c * (y + bias.get()), out, masks[part])
            for variable, one in zip(inputs, past[1:], strict=True):
                variable.set(one)
            with f.when(is_ring):
                place = state + size * (position % length) + (begin + part * LANES) * 4
                f.store_lanes(past[-1], place, masks[part])
        # A ring gets the places that the next token reads, another state all of it.
        keeper = f.word(kept_pages + token * 8, 0)
        with f.when(keeper.differs(0)):
            kept_state = f.address(f.words, 5) + (keeper - 1) * f.word(f.words, 6)
            for part, inputs in enumerate(states):
                for i, variable in enumerate(inputs):
                    ring_place = (position + (length + 1 - kept + i)) % length
                    place = kept_state + size * f.choose(is_ring, ring_place, f.like(position, i))
                    f.store_lanes(variable.get(), place + (begin + part * LANES) * 4, masks[part])
        is_last = after.equals(token) | f.word(table_rows + after * 8, 0).differs(own)
        with f.when(is_last & f.word(f.words, 12).equals(0)):
            for part, inputs in enumerate(states):
                for i, variable in enumerate(inputs):
                    place = state + size * i + (begin + part * LANES) * 4
                    f.store_lanes(variable.get(), place, masks[part])


KERNELS: dict[str, WriteKernel] = {"gated_conv": _gated_conv}
