"""Heads that draft, in plain torch, of their papers' formulas: what ours are compared with, and what is trained.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840), P-EAGLE (Hui et al. 2026, arXiv:2602.01469) and multi-token prediction
(DeepSeek-AI 2024, arXiv:2412.19437, as MiMo's checkpoints spell it, arXiv:2505.07608) read a pair at position i: what
the target knows after token i, and the embedding of token i + 1; they predict token i + 2. The next draft reads the
pair of the head's own last state, and the token that it predicted; P-EAGLE's that of a state that was learned, and the
mask's. Row i of all tensors here belongs to the text that ends with token i + 1, so that the drafts behind each prefix
of a text are computed at once:

    step 0    a query at i sees the keys of step 0 at 0..i
    step j    it sees those, and the keys that row i itself has made in steps 1..j, at positions i + 1..i + j

DFlash (z-lab 2026, arXiv:2602.06036) has a block behind each prefix: token i + 1 and masks, all of which see what the
target knows of 0..i, and each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


Kept = list[tuple[Tensor, Tensor]]
"""Keys and values of a layer, of each step."""


class _Attention(nn.Module):
    """Grouped queries, rotary halves; reads rows of ``in_size``. Head by head q and k may be normalised."""

    def __init__(self, config: dict[str, Any], in_size: int, out_bias: bool, *, normed: bool = False) -> None:
        super().__init__()
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._dim, self._theta = config["head_dim"], config["rope_theta"]
        bias = config.get("attention_bias", False)
        self.q_proj = nn.Linear(in_size, self._heads * self._dim, bias)
        self.k_proj = nn.Linear(in_size, self._kv_heads * self._dim, bias)
        self.v_proj = nn.Linear(in_size, self._kv_heads * self._dim, bias)
        self.o_proj = nn.Linear(self._heads * self._dim, config["hidden_size"], out_bias)
        if normed:
            self.q_norm, self.k_norm = (_Norm(self._dim, config["rms_norm_eps"]) for _ in range(2))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        powers = torch.arange(0, self._dim, 2, device=x.device) / self._dim
        angles = positions[:, None] / self._theta**powers
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def _split(self, y: Tensor, count: int) -> Tensor:
        return y.unflatten(-1, (count, self._dim)).transpose(-2, -3)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._split(self.k_proj(x), self._kv_heads), self._split(self.v_proj(x), self._kv_heads)
        return self._rotated(self.k_norm(k) if hasattr(self, "k_norm") else k, positions), v

    def attended(self, x: Tensor, positions: Tensor, kept: Kept, mask: Tensor) -> Tensor:
        """Return the outputs for x [..., rows, in_size]; ``mask`` [rows, keys]: what each sees of ``kept``."""
        q = self._split(self.q_proj(x), self._heads)
        q = self._rotated(self.q_norm(q) if hasattr(self, "q_norm") else q, positions)
        keys, values = (torch.cat(parts, -2) for parts in zip(*kept, strict=True))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(-2, -3).flatten(-2))

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        """Return the outputs of step len(kept), whose keys and values are added to ``kept``. x: [..., rows, in_size]"""
        step, rows = len(kept), x.shape[-2]
        positions = torch.arange(step, step + rows, device=x.device)
        kept.append(self.keys_and_values(x, positions))
        own = torch.eye(rows, dtype=torch.bool, device=x.device)
        mask = torch.cat((torch.ones_like(own).tril(), *(own for _ in range(step))), 1)
        return self.attended(x, positions, kept, mask)


class _MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(size, inner, False), nn.Linear(size, inner, False)
        self.down_proj = nn.Linear(inner, size, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], **options: Any) -> None:
        super().__init__()
        size, eps, bias = config["hidden_size"], config["rms_norm_eps"], config.get("attention_bias", False)
        self.input_layernorm, self.post_attention_layernorm = _Norm(size, eps), _Norm(size, eps)
        self.self_attn = _Attention(config, options.pop("in_size", size), bias, **options)
        self.mlp = _MLP(config)

    def forward(self, residual: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        residual = residual + attend(self.input_layernorm(residual))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class DraftHead(nn.Module):
    """What all have in common. Parameters have the names of published checkpoints below `prefix`.

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

    def step(self, state: Tensor, token_ids: Tensor, kept: list[Kept]) -> tuple[Tensor, Tensor]:
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
        state, tokens = self.entered(captured), next_ids
        kept = [Kept() for _ in range(self.config.get("num_hidden_layers", 1))]
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
        layer = _Layer(config, in_size=2 * size)
        layer.hidden_norm = _Norm(size, eps)
        self._add_layers(layer)
        self.norm = _Norm(size, eps)
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    def _add_layers(self, first: nn.Module) -> None:
        self.midlayer = first

    def eagle_layers(self) -> list[Any]:
        return [self.midlayer]

    def entered(self, captured: Tensor) -> Tensor:
        return self.fc(captured)

    def step(self, state: Tensor, token_ids: Tensor, kept: list[Kept]) -> tuple[Tensor, Tensor]:
        layer, *others = self.eagle_layers()
        embedded = F.embedding(token_ids, self._embedding[0])
        normed = layer.hidden_norm(state)
        x = torch.cat((layer.input_layernorm(embedded), normed), -1)
        residual = (normed if self.config.get("norm_before_residual") else state) + layer.self_attn(x, kept[0])
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        for other, own in zip(others, kept[1:], strict=True):
            residual = other(residual, partial(other.self_attn, kept=own))
        return residual, self.lm_head(self.norm(residual))

    def ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]


class PEagle(Eagle3):
    """EAGLE-3's, with layers behind it; the steps behind the first read nothing of the one before them."""

    def _add_layers(self, first: nn.Module) -> None:
        others = [_Layer(self.config) for _ in range(self.config["num_hidden_layers"] - 1)]
        self.layers = nn.ModuleList([first, *others])
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def eagle_layers(self) -> list[Any]:
        return list(self.layers)

    def step(self, state: Tensor, token_ids: Tensor, kept: list[Kept]) -> tuple[Tensor, Tensor]:
        if kept[0]:
            state = self.fc(self.mask_hidden.flatten()).expand_as(state)
            token_ids = torch.full_like(token_ids, int(self.config["ptd_token_id"]))
        return super().step(state, token_ids, kept)


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

    def step(self, state: Tensor, token_ids: Tensor, kept: list[Kept]) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(token_ids, self._embedding[0])
        if not kept[0]:  # MiMo's heads see nothing of the token behind position 0
            embedded = embedded * (torch.arange(embedded.shape[-2], device=embedded.device) > 0)[:, None]
        residual = self.input_proj(torch.cat((self.hidden_layernorm(state), self.token_layernorm(embedded)), -1))
        residual = residual + self.self_attn(self.input_layernorm(residual), kept[0])
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        state = self.final_layernorm(residual)
        return state, F.linear(state, self._output[0])


class DFlash(DraftHead):
    """Layers of Qwen3's kind over a block: a token, and masks in place of those that follow it. What the target knows
    of the text before the block comes to each layer as keys and values."""

    def __init__(self, config: dict[str, Any], embedding: Tensor, output: Tensor) -> None:
        super().__init__(config, embedding, output)
        size, eps, own = config["hidden_size"], config["rms_norm_eps"], config["dflash_config"]
        self.mask_id = own["mask_token_id"]
        self.fc = nn.Linear(len(own["target_layer_ids"]) * size, size, False)
        self.hidden_norm, self.norm = _Norm(size, eps), _Norm(size, eps)
        self.layers = nn.ModuleList([_Layer(config, normed=True) for _ in range(config["num_hidden_layers"])])

    def roll_out(
        self,
        captured: Tensor,
        next_ids: Tensor,
        steps: int,
        forced: Sequence[Tensor] = (),
        at: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See `DraftHead`. ``at``: the rows behind which there are blocks, int64 [blocks]; None: all of them."""
        rows, device = next_ids.shape[-1], next_ids.device
        context, context_positions = self.hidden_norm(self.fc(captured)), torch.arange(rows, device=device)
        at = context_positions if at is None else at
        first = next_ids[..., at, None]
        ids = torch.cat((first, first.new_full((*first.shape[:-1], steps), self.mask_id)), -1).flatten(-2)
        row = at.repeat_interleave(steps + 1)
        positions = row + 1 + torch.arange(steps + 1, device=device).repeat(len(at))
        mask = torch.cat((row[:, None] >= context_positions, row[:, None] == row), 1)
        residual = F.embedding(ids, self._embedding[0])
        for layer in self.layers:

            def attend(x: Tensor, attention: _Attention = layer.self_attn) -> Tensor:
                kept = [attention.keys_and_values(context, context_positions), attention.keys_and_values(x, positions)]
                return attention.attended(x, positions, kept, mask)

            residual = layer(residual, attend)
        drafted = self.norm(residual).unflatten(-2, (len(at), steps + 1))[..., 1:, :]
        logits = [F.linear(one, self._output[0]) for one in drafted.unbind(-2)]
        return logits, [one.argmax(-1) for one in logits]
