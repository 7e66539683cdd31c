"""The gated delta rule: linear attention whose state forgets, and corrects what it holds about a key.

    S <- a S;   S <- S + beta k (v - S^T k)^T;   o = S^T q          Yang et al. 2024, arXiv:2412.06464

for each token, with S [key_dim, value_dim] of each head, a = exp(decay) <= 1 and 0 < beta < 1. q and k are normalised
to length 1 first, and q divided by sqrt(key_dim). What is returned is the output normalised and gated (`gated_output`).

Prompts are computed in chunks of 64 tokens, in which the rule is a triangular system. With cumulated decays G of a
chunk and L[i, j] = exp(G[i] - G[j]) for j <= i:

    (I + strictly lower(beta K K^T * L)) [U, W] = beta [V, exp(G) K]
    D = U - W S;   O = exp(G) Q S + (Q K^T * L) D;   S <- exp(G[-1]) S + (exp(G[-1] - G) K)^T D
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .delta_memory import DeltaGates, DeltaInputs, DeltaRule, gated_output
from .dispatch import uses_triton
from .sequences import CHUNK, Sequences

_EPS = 1e-6


def gated_delta_of_tokens(
    inputs: DeltaInputs, gates: DeltaGates, memory: Tensor, pages: Tensor, begins: Tensor
) -> Tensor:
    """Compute one token of each of n sequences, whose states are updated in place. Returns [n, values] in the inputs'
    dtype.

    Args:
        memory: float32 [num_pages, num_value_heads, key_dim, value_dim], any stride from page to page
        pages: int64 [n]
        begins: bool [n]: the sequence has no state yet, whatever its page holds
    """
    assert memory.dtype == torch.float32 and pages.dtype == torch.int64 and begins.dtype == torch.bool
    if uses_triton(memory):
        from .triton import gated_delta as triton_op

        out = inputs.new_output()
        triton_op.gated_delta_of_tokens(inputs, gates, memory, pages, begins, out)
        return out
    q, k, v, decay, beta = DeltaRule.of_inputs(inputs, gates)
    state = memory.index_select(0, pages).masked_fill_(begins[:, None, None, None], 0)
    read = advance(state, q, k, v, decay, beta)
    memory.index_copy_(0, pages, state)
    return gated_output(read, inputs, gates)


def gated_delta_of_prompts(inputs: DeltaInputs, gates: DeltaGates, memory: Tensor, sequences: Sequences) -> Tensor:
    """Compute the next tokens of several sequences, whose states are updated in place, and kept at cuts: n counts the
    tokens of all. See `gated_delta_of_tokens`."""
    assert memory.dtype == torch.float32 and len(inputs.mixed) == len(sequences.owners)
    if uses_triton(memory):
        from .triton import delta_chunks as triton_op

        return triton_op.gated_delta_of_prompts(inputs, gates, memory, sequences)
    n = len(sequences.singles)
    where = memory, sequences.singles, sequences.begins[:n] > 0
    parts = [gated_delta_of_tokens(inputs.of(slice(n)), gates, *where)] if n else []
    begin = n
    for i, length in enumerate(sequences.lens[n:], n):
        page, own = int(sequences.pages[i]), inputs.of(slice(begin, begin + length))
        q, k, v, decay, beta = DeltaRule.of_inputs(own, gates)
        q, k = normalised(q, k, v.shape[1])
        state, read, done = memory[page], torch.empty_like(v), 0
        if sequences.begins[i]:
            state.zero_()
        for cut in (*(cut for cut in sequences.cuts if cut.sequence == i), None):
            part = slice(done, cut.num_tokens if cut else length)
            read[part] = _in_chunks(q[part], k[part], v[part], decay[part], beta[part], state)
            if cut:
                memory[cut.page], done = state, cut.num_tokens
        parts.append(gated_output(read, own, gates))
        begin += length
    return torch.cat(parts)


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Move states [m, num_value_heads, key_dim, value_dim] on by a token each, in place. Returns what q reads."""
    q, k = normalised(q, k, v.shape[1])
    state.mul_(decay.exp()[..., None, None])
    known = (k[:, :, None] @ state).squeeze(2)
    correction = (v.float() - known) * beta[..., None]
    state.addcmul_(k[..., None], correction[:, :, None])
    return (q[:, :, None] @ state).squeeze(2)


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Compute the next tokens of one sequence, for float32 q and k of each value head, normalised; ``state``
    [num_heads, key_dim, value_dim] is updated in place."""
    num_tokens = len(v)
    padding = -num_tokens % CHUNK

    def cut(x: Tensor) -> Tensor:
        """Return [num_heads, num_chunks, CHUNK, ...] of [num_tokens, num_heads, ...]: zeros beyond its end change
        nothing."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding))
        return x.unflatten(0, (-1, CHUNK)).movedim(2, 0)

    q, k, v, decay, beta = cut(q), cut(k), cut(v), cut(decay), cut(beta)[..., None]
    total = decay.cumsum(2)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    grown = total.exp()[..., None]
    k_t = k.transpose(2, 3)
    system = beta * (k @ k_t) * between
    right = torch.cat((v, grown * k), 3) * beta
    new, read = (_inverse(system) @ right).split([v.shape[3], k.shape[3]], 3)
    attending = (q @ k_t) * between
    q = grown * q
    last = total[:, :, -1:]
    k_t = k_t * (last - total).exp()[:, :, None]
    last = last.exp()[..., None]
    out = torch.empty_like(v)
    current: Tensor = state
    for i in range(v.shape[1]):
        correction = new[:, i] - read[:, i] @ current
        out[:, i] = q[:, i] @ current + attending[:, i] @ correction
        current = last[:, i] * current + k_t[:, i] @ correction
    state.copy_(current)
    return out.movedim(0, 2).flatten(0, 1)[:num_tokens]


def _inverse(system: Tensor) -> Tensor:
    """Return the inverse of I + strictly lower(``system``), row by row: [..., CHUNK, CHUNK]. With torch's triangular
    solver 512 tokens of 16 heads of 128 took 4.1 s on two busy threads, in place of 1.1 s."""
    inverse = torch.eye(CHUNK, device=system.device).expand(system.shape).contiguous()
    for i in range(1, CHUNK):
        inverse[..., i : i + 1, :i] = -(system[..., i : i + 1, :i] @ inverse[..., :i, :i])
    return inverse


def normalised(q: Tensor, k: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return normalised q and k, repeated for each value head, float32 [n, num_heads, key_dim]."""
    q, k = q.float(), k.float()
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + _EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + _EPS)
    times = num_heads // q.shape[1]
    return q.repeat_interleave(times, 1), k.repeat_interleave(times, 1)
