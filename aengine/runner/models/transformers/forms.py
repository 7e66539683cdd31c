"""Code of transformers that was read: which of its functions compute what our layers do.

A function is known by a digest of its source without annotations, decorators and docstring: transformers writes the
same text into many of its files. One whose text is another, in a later version for example, is not known, and its
module stays as it is. tests/stress/transformers_forms.py shows the texts, and who has them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms; "": there is none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


_BEFORE = LayerNorms("input_layernorm", "", "post_attention_layernorm", "")

LAYERS = {
    "81d96d2d9d086aa7": _BEFORE,  # LlamaDecoderLayer
    "beedea11a992e100": _BEFORE,  # MiniMaxM2DecoderLayer
    "0d1b2b7d99bbbfed": LayerNorms(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),  # Glm4DecoderLayer
    "018b0367be6e4bb1": LayerNorms(
        "", "post_attention_layernorm", "", "post_feedforward_layernorm"
    ),  # FlexOlmoDecoderLayer
}
"""Norm, attention, norm, sum; norm, feed-forward, norm, sum."""


def _always(attention: Any) -> bool:
    return True


def _where_it_says(attention: Any) -> bool:
    return bool(attention.use_rope)


def _unless_it_sees_all(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


ATTENTION: dict[str, Callable[[Any], bool]] = {
    "7d221b620ce4c2a0": _always,  # LlamaAttention
    "a2a77751780781f9": _always,  # Qwen2Attention
    "ce17728492601495": _always,  # MistralAttention
    "730d283d9776132b": _always,  # SeedOssAttention
    "eb3892cb2b7181e7": _where_it_says,  # SmolLM3Attention
}
"""Products, rotary embedding, the call of `AttentionInterface`, product; and whether a module of it turns q and k."""

NORMED_ATTENTION: dict[str, Callable[[Any], bool]] = {
    "9b8e69f64c3f4fe0": _always,  # Qwen3Attention
    "1286fc96bb221fac": _always,  # HYV3Attention
    "6ed29933695363b6": _always,  # Glm4MoeAttention
    "b5fd5346d133ff18": _always,  # MiniMaxM2Attention
    "b60043818ebb866c": _unless_it_sees_all,  # ExaoneMoeAttention
    "4d62a8e741c17bcc": _always,  # OlmoeAttention
}
"""As ``ATTENTION``, with norms of q and k behind the products, unless ``use_qk_norm`` is false. That of OLMoE clips
what comes out of them, if ``clip_qkv`` of the config is not None."""

GATED = ("4a9e0f851f1aaf4d", "fc4734bcd62345ae")
"""Feed-forward layers: down_proj(act_fn(gate_proj(x)) * up_proj(x))"""
PACKED = ("4fcc0ee7ccb0722a",)
"""Feed-forward layers as ``GATED``, with one ``gate_up_proj`` for two products, and ``activation_fn``."""

RMS_NORMS = ("5cf66a5b73d6af8e", "3ed8ab84cba5dfc5", "6f6c68e4a6b293e9")
"""x * weight / sqrt(mean(x^2) + variance_epsilon). Some round before they multiply, some after."""

ROPES = ("55f78b1eb844eb45", "457f60193ae43c7b", "264fad4ef438f5fc")
"""Cosines and sines of positions * ``inv_freq``, times ``attention_scaling``; of those that get a ``layer_type``, both
have it before their names."""

_HALVES, _NEIGHBOURS = "b59dbfffe0eeb84b", "eb271da2b19125c7"
"""Forms of ``rotate_half``: it pairs a head's first half with its second, or each number with the next."""
_TURNS = {
    "d7bb227c70940011": _HALVES,  # llama
    "77eea4c6025fa824": _HALVES,  # flex_olmo
    "5b52c0dc5bb2de02": _HALVES,  # glm4_moe
    "d8916d059fee4f72": _NEIGHBOURS,  # glm
    "a731554aacbc6ce1": _NEIGHBOURS,  # ernie4_5
    "f7d702aa5f79165c": _NEIGHBOURS,  # helium
}
"""Forms of ``apply_rotary_pos_emb``, which turns a part of each head or all of it, and the ``rotate_half`` of each."""


def form_of(function: Callable[..., Any]) -> str:
    """Return the digest of a function's text; "": there is no text."""
    function = inspect.unwrap(function)
    return _form_of(getattr(function, "__func__", function))


@lru_cache(maxsize=1024)
def _form_of(function: Callable[..., Any]) -> str:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns, node.name = [], None, "f"
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def turns_neighbours(attention: nn.Module) -> bool | None:
    """Return whether the module's rotary embedding turns elements 2i and 2i + 1 together, not i and i + size / 2; None:
    it is not known."""
    names = getattr(inspect.unwrap(attention.forward), "__globals__", {})
    apply, rotate = names.get("apply_rotary_pos_emb"), names.get("rotate_half")
    if apply is None or rotate is None or apply.__globals__.get("rotate_half") is not rotate:
        return None
    known = _TURNS.get(form_of(apply))
    return None if known is None or form_of(rotate) != known else known == _NEIGHBOURS
