"""States with guessed tokens behind them: the gated delta rule and the causal convolution, out of which a token that
was rejected is taken again without a copy of a state.

A state has the tokens that are certain. What a step adds behind its first token may be rejected, so it is kept apart,
by position: the rule's inputs in ``pending``, the convolution's in its ring. The next step knows by the position of its
own first token how many were accepted:

    step at 7, of 4 tokens       state: ... 7 | pending: 8 9 10
    next at 9 (8 was accepted)   state: ... 7 8 9 | pending: 10 11 12        8 out of what is pending, 9 of its own

So a step reads and writes each state once, whatever is drafted, and a page has all that is needed to go on from it at
any position from that behind its state to that behind its last accepted token.

    ring        position p at p % its length, which is that of the filter and of a step's tokens together
    pending     position p at p % its length, twice a step's tokens: none is read and written in one step
    tags        of each place of ``pending`` its position, while it is not in the state; else another number
"""

from __future__ import annotations

import torch
from torch import Tensor

from .delta_memory import DeltaGates, DeltaInputs, DeltaMemory, DeltaRule, gated_output
from .dispatch import uses_triton
from .gated_delta import advance
from .short_conv import ungated


def gated_delta_of_drafts(
    inputs: DeltaInputs, gates: DeltaGates, memory: DeltaMemory, pages: Tensor, positions: Tensor
) -> Tensor:
    """Compute n tokens of several sequences, each of which has one or more, one after the other: the first is certain,
    those behind it may be rejected. Returns [n, values], see `gated_delta_of_tokens`.

    Args:
        pages: int64 [n], where the sequence of each token keeps its state; no two sequences have one, but at position 0
        positions: int64 [n]; of a sequence's tokens at most half of what ``pending`` has room for
    """
    assert memory.states.dtype == torch.float32 and pages.dtype == positions.dtype == torch.int64
    if uses_triton(memory.states):
        from .triton import drafted_states as triton_op

        return triton_op.gated_delta_of_drafts(inputs, gates, memory, pages, positions)
    continues = torch.zeros(len(pages), dtype=torch.bool)
    continues[1:] = (pages[1:] == pages[:-1]) & (positions[1:] == positions[:-1] + 1)
    first = (~continues).nonzero()[:, 0]
    counts = torch.diff(first, append=torch.tensor([len(pages)]))
    own, begin = pages[first], positions[first]
    state = _with_pending(memory, own, begin)
    rule = DeltaRule.of_inputs(inputs, gates)
    out = torch.empty(rule.v.shape, dtype=torch.float32)
    length = memory.tags.shape[1]
    for place in range(int(counts.max())):
        rows = (counts > place).nonzero()[:, 0]
        at = first[rows] + place
        here = rule.of(at)
        moved = state[rows]
        out[at] = advance(moved, *here)
        state[rows] = moved
        slots = (begin[rows] + place) % length
        if place == 0:
            memory.states.index_copy_(0, own, state)
            memory.tags[own, slots] = -1
        else:
            parts = (here.k.flatten(1), here.v.flatten(1), here.decay, here.beta)
            memory.pending[own[rows], slots] = torch.cat([part.float() for part in parts], 1)
            memory.tags[own[rows], slots] = (begin[rows] + place).int()
    return gated_output(out, inputs, gates)


def settle_drafts(memory: DeltaMemory, pages: Tensor, positions: Tensor, num_tokens: Tensor) -> None:
    """Put into the states what was accepted before ``positions`` (int64 [m]), from where so many tokens (int64 [m])
    that are all certain are computed next, by other means. ``pages``: int64 [m]."""
    if uses_triton(memory.states):
        from .triton import drafted_states as triton_op

        triton_op.settle_pending(memory, pages, positions)
    else:
        memory.states.index_copy_(0, pages, _with_pending(memory, pages, positions))
    nothing_pends_behind(memory, pages, positions + num_tokens - 1)


def nothing_pends_behind(memory: DeltaMemory, pages: Tensor, positions: Tensor) -> None:
    """Note that the states of ``pages`` have all tokens up to ``positions``, both int64 [m]."""
    last = positions % memory.tags.shape[1]
    memory.tags.index_put_((pages, last), torch.full_like(pages, -1, dtype=torch.int32))


def conv_of_drafts(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, pages: Tensor, positions: Tensor, num_kept: int
) -> Tensor:
    """Compute n tokens of several sequences, those of each one after the other. Returns y [n, channels] in x's dtype.

    Args:
        x, weight, bias: as of `conv_of_tokens`
        ring: float32 [num_pages, length, channels], any stride from page to page
        pages, positions: int64 [n]
        num_kept: leading tokens that are put into the rings; the others follow by `keep_last`
    """
    assert ring.dtype == torch.float32 and pages.dtype == positions.dtype == torch.int64
    if uses_triton(x):
        from .triton import drafted_states as triton_op

        return triton_op.conv_of_drafts(x, weight, bias, ring, pages, positions, num_kept)
    n, width, (own, gate) = len(x), len(weight), ungated(x, weight)
    y = own * weight[-1]
    if bias is not None:
        y += bias
    at = torch.arange(n)
    for tap in range(width - 1):
        back = width - 1 - tap
        source, place = (at - back).clamp(min=0), positions - back
        is_new = (at >= back) & (pages[source] == pages) & (positions[source] == place)
        kept = ring[pages, place % ring.shape[1]].masked_fill_((place < 0)[:, None], 0)
        y.addcmul_(torch.where(is_new[:, None], own[source], kept), weight[tap])
    ring[pages[:num_kept], positions[:num_kept] % ring.shape[1]] = own[:num_kept]
    return (y * gate).to(x.dtype)


def keep_last(x: Tensor, ring: Tensor, pages: Tensor, positions: Tensor) -> None:
    """Put x [n, channels], or b, c and x, into the rings of ``pages`` at ``positions``, int64 [n]."""
    ring.index_put_((pages, positions % ring.shape[1]), ungated(x, ring[0])[0])


def _with_pending(memory: DeltaMemory, pages: Tensor, positions: Tensor) -> Tensor:
    """Return the states [m, *] before ``positions``, with what was accepted; zero at position 0."""
    state = memory.states.index_select(0, pages).masked_fill_((positions == 0)[:, None, None, None], 0)
    length = memory.tags.shape[1]
    places = positions[:, None] - 1 - torch.arange(length)
    tags = memory.tags[pages[:, None], places % length]
    counts = ((tags == places) & (places >= 0)).int().cumprod(1).sum(1)  # those right before each position
    heads, key_dim, value_dim = state.shape[1:]
    keys = memory.pending.shape[2] - heads * (value_dim + 2)
    for back in range(int(counts.max()), 0, -1):
        rows = (counts >= back).nonzero()[:, 0]
        kept = memory.pending[pages[rows], (positions[rows] - back) % length]
        k, v, decay, beta = kept.split([keys, heads * value_dim, heads, heads], 1)
        k, moved = k.unflatten(1, (-1, key_dim)), state[rows]
        advance(moved, k, k, v.unflatten(1, (-1, value_dim)), decay, beta)
        state[rows] = moved
    return state
