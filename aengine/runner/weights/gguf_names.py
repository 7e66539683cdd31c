"""llama.cpp's names of a dense decoder's tensors, and transformers'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_LAYER_NAME = re.compile(r"blk\.(?P<layer>\d{1,9})\.(?P<part>.+)", re.ASCII)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

EXPERT_NAMES = {
    **_LAYER,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Those of a layer with experts. A name with braces is a stack of matrices, one an expert, whose numbers go there."""

PACKED_LAYER = {**_LAYER, "ffn_up": "mlp.gate_up_proj"}
"""Names of a layer whose gate and up are one tensor."""


@dataclass(frozen=True, slots=True)
class GgufNames:
    """Tensor names of a family's GGUF files, and how the tensors differ from transformers'."""

    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)  # behind "blk.N." and the layer's own prefix
    layers: str = "model.layers"  # prefix of a layer's names, before its number
    interleaved: tuple[str, ...] = ()
    """Matrices in which llama.cpp's converter puts the two elements of each rotary pair side by side, head by head;
    names as transformers' end. Elsewhere the first halves of a head come first."""

    norms_plus_one: bool = False
    """Whether llama.cpp's converter adds one to the weights of norms."""

    def renamed(self, layer: Mapping[str, str]) -> GgufNames:
        """Replace names of a layer's tensors, or add some."""
        return replace(self, layer={**self.layer, **layer})

    def hf_name(self, name: str) -> str | tuple[str, str]:
        """Return transformers' name of a GGUF tensor; names that have none are returned as they are.

        Of a stack of experts it is what goes before and after the number of each.
        """
        stem, _, kind = name.rpartition(".")
        if (found := _LAYER_NAME.fullmatch(stem)) is None:
            return f"{self.top[stem]}.{kind}" if stem in self.top else name
        known = self.layer.get(found["part"])
        if known is None:
            return name
        before, stack, after = known.partition("{}")
        before = f"{self.layers}.{found['layer']}.{before}"
        return (before, f"{after}.{kind}") if stack else f"{before}.{kind}"

    def name_in_file(self, hf_name: str) -> str:
        """Return the name in the file of a tensor of transformers' name; of an expert's matrix, that of its stack."""
        stem, _, kind = hf_name.rpartition(".")
        layer = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", stem)
        known, part = (self.top, stem) if layer is None else (self.layer, _EXPERT.sub(".experts.{}.", layer[2]))
        found = next((own for own, theirs in known.items() if theirs == part), None)
        if found is None:
            return hf_name
        return f"{found}.{kind}" if layer is None else f"blk.{layer[1]}.{found}.{kind}"

    def is_less_one(self, hf_name: str) -> bool:
        """Return whether the checkpoint of transformers has the tensor less one."""
        return self.norms_plus_one and hf_name.endswith("norm.weight")

    def is_interleaved(self, hf_name: str) -> bool:
        return hf_name.rpartition(".")[0].rpartition(".")[2] in self.interleaved
