"""Llama and Qwen3 as a trainer may have them: a module of plain torch over the package's kernels, without an engine.

Its log-probabilities have the bits of an engine's with ``batch_invariant=True``: a row has one result, in whatever way
it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aengine.kernels.expert_types import InputNorm
from aengine.kernels.invariant_attention import attend_to_prompts, plan_prompts
from aengine.kernels.logprobs import keep_logits, token_logprobs
from aengine.kernels.ordered_linear import add_ordered_linear, ordered_linear
from aengine.kernels.paged_attention import Scores
from aengine.kernels.rms_norm import rms_norm
from aengine.kernels.rotary import HeadNorms
from aengine.kernels.write_qkv import apply_rope_and_write_kv
from aengine.runner.models import read_config
from aengine.runner.rope import rope_tables

_BLOCK_SIZE = 16


class PlainLlama(nn.Module):
    def __init__(self, hf_config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """``weights``: by transformers' names, on the module's device."""
        super().__init__()
        self.config = read_config(hf_config)
        self._names = {name: name.replace(".", "_") for name in weights}
        for name, tensor in weights.items():
            self.register_buffer(self._names[name], tensor)

    def of(self, *names: str) -> Tensor:
        """These tensors, below each other."""
        return torch.cat([getattr(self, self._names[name]) for name in names])

    def _linear(self, *names: str) -> tuple[Tensor, Tensor | None]:
        """The matrices of these names below each other, and their biases, if they have any."""
        has_bias = f"{names[0]}.bias" in self._names
        return self.of(*(f"{name}.weight" for name in names)), (
            self.of(*(f"{name}.bias" for name in names)) if has_bias else None
        )

    def _norm(self, name: str) -> InputNorm:
        return InputNorm(self.of(f"{name}.weight"), self.config.rms_norm_eps)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> Tensor:
        """The logits after each token, float32 [n, vocab_size]."""
        table, config, n = self.of("model.embed_tokens.weight"), self.config, len(ids)
        heads, kv_heads, size, device = config.num_heads, config.num_kv_heads, config.head_dim, table.device
        residual = table[torch.tensor(ids, device=device)]
        positions = torch.arange(n, device=device)
        blocks = torch.arange(-(-n // _BLOCK_SIZE), dtype=torch.int32, device=device)[None]
        cache = residual.new_zeros((blocks.shape[1], _BLOCK_SIZE, 2, kv_heads, size))
        rope = rope_tables(config.ropes[0], n, device)
        row, lens = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([0, n], device=device).int()
        assert n > 1, "a single token is no prompt to the plan"
        plan = plan_prompts(row, lens, lens[1:], n, heads // kv_heads, size)
        for i in range(config.num_layers):
            layer = f"model.layers.{i}"
            x = rms_norm(residual, *self._norm(f"{layer}.input_layernorm"))
            qkv = ordered_linear(x, *self._linear(*(f"{layer}.self_attn.{name}_proj" for name in "qkv")))
            norms = None
            if f"{layer}.self_attn.q_norm.weight" in self._names:
                q, k = (self._norm(f"{layer}.self_attn.{name}_norm") for name in "qk")
                norms = HeadNorms(q.weight, k.weight, q.eps)
            apply_rope_and_write_kv(qkv, positions, positions, rope, norms, heads, cache)
            q_heads = qkv.view(n, -1, size)[:, :heads]
            out = attend_to_prompts(q_heads, cache, blocks, plan, Scores(size**-0.5))
            add_ordered_linear(residual, out, *self._linear(f"{layer}.self_attn.o_proj"))
            x = rms_norm(residual, *self._norm(f"{layer}.post_attention_layernorm"))
            gate_up = self._linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
            hidden = ordered_linear(x, *gate_up, activation="silu")
            add_ordered_linear(residual, hidden, *self._linear(f"{layer}.mlp.down_proj"))
        head = "lm_head.weight" if "lm_head.weight" in self._names else "model.embed_tokens.weight"
        return ordered_linear(rms_norm(residual, *self._norm("model.norm")), self.of(head), None, torch.float32)

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], begin: int) -> list[float]:
        """The log-probabilities of the tokens ``ids[begin:]``, each after those before it."""
        logits = self(ids)[begin - 1 : -1].contiguous()
        n, device = len(logits), logits.device
        asked, slot = torch.ones(n, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        out = torch.zeros((1, n, 1), dtype=torch.int32, device=device)
        targets = torch.tensor(ids[begin:], device=device)
        token_logprobs(keep_logits(logits, asked), targets, asked, out, slot)
        return out[0, :, 0].view(torch.float32).tolist()
