"""Our attention and our experts, as transformers' modules call them.

Each attention module calls the function that its config names, with q, k and v of all tokens of the step. Which layer
of the KV cache is its own follows from the order of the calls, which is that of the survey: a module may be called
several times, and then has as many layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kv_spec import StateTensor
from ...layers.attention import AttentionCall, AttentionLayer
from ...layers.module_experts import can_run_experts, run_experts
from .mixers import MixerListener, Run, mix_batch

ATTENTION = "aengine"
"""Name under which our attention, and our experts, are registered with transformers."""


class Listener(MixerListener, Protocol):
    """Receiver of the calls of a model's attention modules and mixers."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Return [num_tokens, num_heads, value_dim] for q, k, v [num_tokens, heads, size]."""

    def first_lens(self) -> Tensor | None:
        """See `AttentionCall`."""


def listen(model: nn.Module, listener: Listener | None) -> None:
    """Send the calls of all attention modules and mixers of ``model`` to ``listener``; None: to nobody."""
    for module in model.modules():
        module.aengine_listener = listener  # type: ignore[assignment]


def register() -> None:
    """Register the attention and the experts' function with transformers. Idempotent."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(ATTENTION, _attention)
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION, _experts)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it. query, key, value: [1, heads, num_tokens, size]; returns [1,
    num_tokens, num_heads, value_dim]."""
    listener: Listener = module.aengine_listener  # type: ignore[assignment]
    assert listener is not None, "nobody listens to the model's attention"
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    out = listener.attend(module, q, k, v, {**options, "attention_mask": attention_mask})
    return out.contiguous().unsqueeze(0), None  # some modules view it in another shape


class CallSinks:
    """`Sinks` whose values the model passes with each call."""

    def __init__(self) -> None:
        self.weight: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSlot:
    """An attention layer of the model."""

    layer: AttentionLayer
    value_dim: int


@dataclass(frozen=True, slots=True)
class MixerSlot:
    """A layer with a state: its tensors, and in which dtypes it computes with them."""

    tensors: tuple[StateTensor, ...]
    dtypes: tuple[torch.dtype, ...]


class LayerCalls:
    """Takes the calls of a step to the step's attention, layer by layer."""

    def __init__(self, slots: list[AttentionSlot | MixerSlot]) -> None:
        self._slots = slots
        self.states_take_chunks = True  # False: mixers go on from a state token by token
        self._attn: AttentionCall
        self.next_call = 0

    def begin(self, attn: AttentionCall) -> None:
        """Note that the next call is the first layer's of a step."""
        self._attn = attn
        self.next_call = 0

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        slot = self._slots[self.next_call]
        assert isinstance(slot, AttentionSlot), "the calls come in another order than in the survey"
        layer = slot.layer
        self.next_call += 1
        if isinstance(layer.sinks, CallSinks):
            layer.sinks.weight = options["s_aux"]
        if q.shape[2] < layer.head_dim:  # values are the wider ones
            q, k = (F.pad(t, (0, layer.head_dim - t.shape[2])) for t in (q, k))
        return self._attn.attend(layer, q, k, v).unflatten(1, (layer.num_heads, slot.value_dim))

    def attend_to_qkv(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall.forward`; the call of a layer that is fused (fused.py)."""
        self.next_call += 1
        return self._attn.forward(layer, qkv)

    def first_lens(self) -> Tensor | None:
        """See `AttentionCall`."""
        return self._attn.first_lens()

    def mix(self, run: Run, num_tokens: int) -> Tensor:
        """See `MixerListener`."""
        slot, index = self._slots[self.next_call], self.next_call
        assert isinstance(slot, MixerSlot), "the calls come in another order than in the survey"
        self.next_call += 1
        return mix_batch(run, num_tokens, self._attn.states(index), slot.tensors, slot.dtypes, self.states_take_chunks)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum over the chosen experts of each token.

    Args:
        hidden_states: [num_tokens, hidden_size]
        top_k_index, top_k_weights: [num_tokens, k]; an index may be the number of experts, which is none of them
    """
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    if can_run_experts(self):
        return run_experts(self, hidden_states, top_k_index, top_k_weights)
    if not hidden_states.is_cuda:
        return _experts_one_by_one(self, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    out: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    return out


def _experts_one_by_one(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute only experts that some token has chosen, over those tokens alone."""
    outs = hidden_states.new_zeros((*top_k_index.shape, hidden_states.shape[1]))
    first = self.gate_up_proj if self.has_gate else self.up_proj
    for expert in torch.unique(top_k_index).tolist():
        if expert >= len(first):
            continue
        tokens, places = torch.where(top_k_index == expert)
        x = _times(hidden_states[tokens], first[expert], self, "gate_up_proj" if self.has_gate else "up_proj", expert)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = _times(x, self.down_proj[expert], self, "down_proj", expert)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        outs[tokens, places] = x
    return (outs * top_k_weights[..., None].to(outs.dtype)).sum(1)


def _times(x: Tensor, matrix: Tensor, module: Any, name: str, expert: int) -> Tensor:
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if not module.is_transposed:
        return F.linear(x, matrix, bias)
    return x @ matrix if bias is None else x @ matrix + bias
