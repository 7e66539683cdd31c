"""Heads that draft, in plain torch, of their papers' formulas: what ours are compared with, and what is trained.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840) and multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, as MiMo's
checkpoints spell it, arXiv:2505.07608). Both read a pair at position i: what the target knows after token i, and the
embedding of token i + 1; they predict token i + 2. The next draft reads the pair of the head's own last state, and the
token that it predicted. Row i of all tensors here belongs to the text that ends with token i + 1, so that the drafts
behind each prefix of a text are computed at once:

    step 0    a query at i sees the keys of step 0 at 0..i
    step j    it sees those, and the keys that row i itself has made in steps 1..j, at positions i + 1..i + j
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight.float()).to(x.dtype)


class _Attention(nn.Module):
    """Grouped queries, rotary halves; reads rows of ``in_size``."""

    def __init__(self, config: dict[str, Any], in_size: int, out_bias: bool) -> None:
        super().__init__()
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._dim, self._theta = config["head_dim"], config["rope_theta"]
        bias = config.get("attention_bias", False)
        self.q_proj = nn.Linear(in_size, self._heads * self._dim, bias)
        self.k_proj = nn.Linear(in_size, self._kv_heads * self._dim, bias)
        self.v_proj = nn.Linear(in_size, self._kv_heads * self._dim, bias)
        self.o_proj = nn.Linear(self._heads * self._dim, config["hidden_size"], out_bias)

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + x.shape[-2], device=x.device)
        powers = torch.arange(0, self._dim, 2, device=x.device) / self._dim
        angles = positions[:, None] / self._theta**powers
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def forward(self, x: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the outputs of step len(kept), whose keys and values are added to ``kept``. x: [..., rows, in_size]"""
        step, rows = len(kept), x.shape[-2]

        def heads(y: Tensor, count: int) -> Tensor:
            return y.unflatten(-1, (count, self._dim)).transpose(-2, -3)

        q = self._rotated(heads(self.q_proj(x), self._heads), step)
        kept.append((self._rotated(heads(self.k_proj(x), self._kv_heads), step), heads(self.v_proj(x), self._kv_heads)))
        keys, values = (torch.cat(parts, -2) for parts in zip(*kept, strict=True))
        own = torch.eye(rows, dtype=torch.bool, device=x.device)
        mask = torch.cat((torch.ones_like(own).tril(), *(own for _ in range(step))), 1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(-2, -3).flatten(-2))


class _MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(size, inner, False), nn.Linear(size, inner, False)
        self.down_proj = nn.Linear(inner, size, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftHead(nn.Module):
    """What both have in common. Parameters have the names of published checkpoints below `prefix`.

    ``embedding`` [vocab_size, hidden_size] and ``output`` [vocab_size, hidden_size]: the target's.
    """

    prefix = ""

    def __init__(self, config: dict[str, Any], embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.config = config
        self._embedding, self._output = [embedding], [output]  # no parameters of the head

    def entered(self, captured: Tensor) -> Tensor:
        """Return the states of step 0, for the target's [..., rows, captured_size]."""
        raise NotImplementedError

    def step(self, state: Tensor, token_ids: Tensor, kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the state that the next step takes, and the logits of this one, over the head's vocabulary."""
        raise NotImplementedError

    def ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of those of the head's vocabulary."""
        return draft_ids

    def roll_out(
        self, captured: Tensor, next_ids: Tensor, steps: int, forced: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logits and the drafted ids of each step, for every row.

        Args:
            captured: [..., rows, captured_size], of the target at each position
            next_ids: int64 [..., rows], the token behind each position
            forced: the tokens that the steps behind the first read, in place of their drafts
        """
        state, tokens, kept = self.entered(captured), next_ids, list[tuple[Tensor, Tensor]]()
        all_logits, drafts = list[Tensor](), list[Tensor]()
        for step in range(steps):
            state, logits = self.step(state, tokens, kept)
            all_logits.append(logits)
            drafts.append(self.ids(logits.argmax(-1)))
            tokens = forced[step] if step < len(forced) else drafts[-1]
        return all_logits, drafts


class Eagle3(DraftHead):
    """A layer whose attention reads the embedding beside the state; the residual stream is the state's."""

    def __init__(self, config: dict[str, Any], embedding: Tensor, output: Tensor) -> None:
        super().__init__(config, embedding, output)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = nn.Linear(3 * config.get("target_hidden_size", size), size, False)
        self.midlayer = nn.Module()
        self.midlayer.hidden_norm, self.midlayer.input_layernorm = _Norm(size, eps), _Norm(size, eps)
        self.midlayer.self_attn = _Attention(config, 2 * size, config.get("attention_bias", False))
        self.midlayer.post_attention_layernorm = _Norm(size, eps)
        self.midlayer.mlp = _MLP(config)
        self.norm = _Norm(size, eps)
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    def entered(self, captured: Tensor) -> Tensor:
        return self.fc(captured)

    def step(self, state: Tensor, token_ids: Tensor, kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        embedded = F.embedding(token_ids, self._embedding[0])
        normed = layer.hidden_norm(state)
        x = torch.cat((layer.input_layernorm(embedded), normed), -1)
        residual = (normed if self.config.get("norm_before_residual") else state) + layer.self_attn(x, kept)
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return residual, self.lm_head(self.norm(residual))

    def ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]


class Mtp(DraftHead):
    """A layer over a product of the state and the embedding; the target's last norm comes before it, and the head's
    own behind it, so what a step takes is normalised."""

    prefix = "model.mtp_layers.0."

    def __init__(self, config: dict[str, Any], embedding: Tensor, output: Tensor) -> None:
        super().__init__(config, embedding, output)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.token_layernorm, self.hidden_layernorm = _Norm(size, eps), _Norm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, False)
        self.input_layernorm, self.post_attention_layernorm = _Norm(size, eps), _Norm(size, eps)
        self.self_attn, self.mlp = _Attention(config, size, False), _MLP(config)
        self.final_layernorm = _Norm(size, eps)

    def entered(self, captured: Tensor) -> Tensor:
        return captured

    def step(self, state: Tensor, token_ids: Tensor, kept: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(token_ids, self._embedding[0])
        if not kept:  # MiMo's heads see nothing of the token behind position 0
            embedded = embedded * (torch.arange(embedded.shape[-2], device=embedded.device) > 0)[:, None]
        residual = self.input_proj(torch.cat((self.hidden_layernorm(state), self.token_layernorm(embedded)), -1))
        residual = residual + self.self_attn(self.input_layernorm(residual), kept)
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        state = self.final_layernorm(residual)
        return state, F.linear(state, self._output[0])
