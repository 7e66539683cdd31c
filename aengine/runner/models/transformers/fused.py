"""Decoder layers of the usual shapes, computed by our layers in place of transformers' modules: five launches on a GPU
instead of some fifty.

    input_layernorm, q_proj, k_proj, v_proj                one product (`Weight.after_norm`)
    q_norm, k_norm, rotary embedding, KV, attention        `AttentionCall.forward`
    o_proj, residual                                       one product (`Weight.add_to`)
    post_attention_layernorm, gate_proj, up_proj, act_fn   one product (`Weight.gated_after_norm`)
    down_proj, residual                                    one product

The norms may also follow the products (`forms.LAYERS`): then what is no part of a product is a launch of its own. A
feed-forward layer of another kind, such as experts, is called as it is.

Which modules compute what our layers do is known from their code (forms.py), their parameters and from the rotary
embedding that they are given, not from their numbers. Any other stays transformers'.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....kernels.activation import Activation, act_and_mul, computed
from ...kv_spec import SharedKV
from ...layers.attention import AttentionLayer
from ...layers.norm import RMSNorm
from ...model_config import ACTIVATIONS
from ...rope import RopeConfig
from ...weights.plain import PlainWeight
from ...weights.weight import Weight
from . import forms
from .survey import SurveyedLayer, SurveyedMixer

logger = logging.getLogger("aengine.runner")

_Norm = RMSNorm | nn.LayerNorm | None


class CallCounter(Protocol):
    """A listener of attention calls that counts them."""

    next_call: int

    def attend_to_qkv(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall.forward`."""


class Unusual(Exception):
    """Raised for a part of a layer that our layers can't compute."""


class FusedLayer:
    """A decoder layer by our layers, over the parameters of ``module``."""

    def __init__(self, module: nn.Module, layer: AttentionLayer) -> None:
        """Read the parts of ``module``. Raises `Unusual` if one of them computes something else than our layers do."""
        attention: Any = module.self_attn
        kind = forms.LAYERS[forms.form_of(module.forward)]
        matrices = _attention_matrices(attention, layer)
        has_norms = forms.form_of(attention.forward) in forms.NORMED_ATTENTION
        has_norms = has_norms and bool(getattr(attention, "use_qk_norm", True))
        q_norm, k_norm = map(_rms_norm, (attention.q_norm, attention.k_norm)) if has_norms else (None, None)
        widths = [0 if norm is None else len(norm.weight) for norm in (q_norm, k_norm)]
        self._q_and_k: tuple[RMSNorm, RMSNorm] | None = None  # norms of all heads of a token together
        if q_norm is not None and k_norm is not None and widths != [layer.head_dim] * 2:
            if widths != [layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim]:
                raise Unusual("norms of q and k")
            self._q_and_k, q_norm, k_norm = (q_norm, k_norm), None, None
        self._module = module
        self.layer = replace(layer, q_norm=q_norm, k_norm=k_norm)
        self._norms: list[_Norm] = [read_norm(getattr(module, name)) if name else None for name in astuple(kind)]
        self._matrices = matrices
        self._qkv: Weight = _pack(matrices[0])
        self._o: Weight = _pack([matrices[1]])
        self._gated = read_gated(module.mlp)

    @property
    def has_feed_forward(self) -> bool:
        return self._gated is not None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Change ``hidden_states`` [1, num_tokens, hidden_size] in place, and return them."""
        residual = hidden_states[0]
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        x, norm = _apply(before_attention, residual)
        qkv = self._qkv.multiply(x) if norm is None else self._qkv.after_norm(x, norm)
        attended = _listener(self._module).attend_to_qkv(self.layer, self._normalise(qkv))
        _add(self._o, residual, attended, after_attention)
        fed = self._feed(*_apply(before_mlp, residual))
        if self._gated is not None:
            _add(self._gated.down, residual, fed, after_mlp)
        else:
            residual.add_(fed if after_mlp is None else after_mlp(fed))
        return hidden_states

    def _normalise(self, qkv: Tensor) -> Tensor:
        if self._q_and_k is None:
            return qkv
        q, k, v = qkv.split([len(norm.weight) for norm in self._q_and_k] + [len(self._q_and_k[1].weight)], 1)
        return torch.cat((self._q_and_k[0](q), self._q_and_k[1](k), v), 1)

    def _feed(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Return the feed-forward layer for norm(x), but for the last product of one that is fused."""
        if self._gated is None:
            mlp: Any = self._module.mlp
            out: Tensor = mlp((x if norm is None else norm(x))[None])[0]
            return out
        if norm is None:
            return act_and_mul(self._gated.gate_up.multiply(x), self._gated.activation)
        return computed(self._gated.gate_up.gated_after_norm(x, norm, self._gated.activation))

    def wrap(self, wrapped: Callable[[Weight, Sequence[nn.Linear]], Weight]) -> None:
        """Multiply by what ``wrapped`` returns of each weight and the modules whose matrices it is made of."""
        self._qkv, self._o = wrapped(self._qkv, self._matrices[0]), wrapped(self._o, [self._matrices[1]])
        if self._gated is not None:
            gate_up, down = self._gated.matrices
            self._gated = replace(
                self._gated, gate_up=wrapped(self._gated.gate_up, gate_up), down=wrapped(self._gated.down, down)
            )

    def install(self) -> None:
        self._module.forward = self.forward

    def remove(self) -> None:
        del self._module.forward


def _apply(norm: _Norm, x: Tensor) -> tuple[Tensor, RMSNorm | None]:
    """Return what a product is to multiply: norm(x), or x and the norm if it can be a part of the product."""
    if norm is None or isinstance(norm, RMSNorm):
        return x, norm
    return norm(x), None


def _add(weight: Weight, residual: Tensor, x: Tensor, norm: _Norm) -> None:
    """Add norm(product by x) to ``residual``, in place."""
    if norm is None:
        weight.add_to(residual, x)
    elif isinstance(norm, RMSNorm):
        weight.add_normed_to(residual, x, norm)
    else:
        residual.add_(norm(weight.multiply(x)))


def fuse_layers(
    model: nn.Module,
    surveyed: tuple[SurveyedLayer | SurveyedMixer, ...],
    ropes: Sequence[RopeConfig],
    run: Callable[[], Tensor],
) -> list[FusedLayer]:
    """Replace the layers of ``model`` that can be, and return what they are computed by now.

    Args:
        ropes: the model's rotary embeddings
        run: runs the model over some tokens; the logits
    """
    found = [module for module in model.modules() if _is_known(module)]
    if not found:
        return []
    with _recording(model, found) as calls:
        before = run()
    fused: list[FusedLayer] = []
    for module in found:
        try:
            fused.append(FusedLayer(module, _attention_layer(module.self_attn, surveyed, ropes, calls.get(module))))
        except Unusual as error:
            logger.info("a layer stays transformers' %s: %s", type(module).__name__, error)
    for layer in fused:
        layer.install()
    off = float((run() - before).norm() / before.norm().clamp(min=1e-12))
    # The model around the layers is not read: one that keeps a layer's input finds it changed in place.
    if off > (5e-3 if next(model.parameters()).dtype == torch.float32 else 0.3):
        name = type(model).__name__
        logger.warning("layers of %s stay transformers': with fused ones its logits differ by %.2g", name, off)
        for layer in fused:
            layer.remove()
        return []
    return fused


def _is_known(module: nn.Module) -> bool:
    attention = getattr(module, "self_attn", None)
    if not isinstance(attention, nn.Module) or forms.form_of(module.forward) not in forms.LAYERS:
        return False
    return forms.form_of(attention.forward) in {*forms.ATTENTION, *forms.NORMED_ATTENTION}


@dataclass(slots=True)
class _Call:
    """The one call of a decoder layer in a run."""

    index: int  # its attention's place among all calls
    rope: tuple[nn.Module, str] | None  # the rotary embedding that it got, and its ``layer_type``; None: an unknown one
    is_only: bool = True


@contextmanager
def _recording(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[dict[nn.Module, _Call]]:
    """Note the calls of ``layers`` within the block."""
    calls: dict[nn.Module, _Call] = {}
    ropes: dict[int, tuple[Any, nn.Module, str]] = {}  # outcome (kept, as its id is the key), module, ``layer_type``

    def after_rope(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        ropes[id(out)] = out, module, str(options.get("layer_type") or (args[2] if len(args) > 2 else ""))

    def before_layer(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        rope = ropes.get(id(options.get("position_embeddings")))
        index = _listener(module).next_call
        calls[module] = _Call(index, None if rope is None else rope[1:], is_only=module not in calls)

    def after_layer(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        calls[module].is_only &= _listener(module).next_call == calls[module].index + 1

    known = [module for module in model.modules() if forms.form_of(module.forward) in forms.ROPES]
    handles = [module.register_forward_hook(after_rope, with_kwargs=True) for module in known]
    handles += [module.register_forward_pre_hook(before_layer, with_kwargs=True) for module in layers]
    handles += [module.register_forward_hook(after_layer) for module in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _attention_layer(
    attention: Any,
    surveyed: tuple[SurveyedLayer | SurveyedMixer, ...],
    ropes: Sequence[RopeConfig],
    call: _Call | None,
) -> AttentionLayer:
    """Return what the attention of a layer that is called so computes, but for its norms. Raises `Unusual`."""
    if call is None or not call.is_only:
        raise Unusual("it is not called once, with one attention")
    seen = surveyed[call.index]
    if not isinstance(seen, SurveyedLayer) or isinstance(seen.kv, SharedKV) or seen.has_sinks:
        raise Unusual("its attention")
    if seen.value_dim != seen.head_dim:
        raise Unusual("its heads")
    if getattr(getattr(attention, "config", None), "clip_qkv", None) is not None:
        raise Unusual("it clips q, k and v")
    form = forms.form_of(attention.forward)
    rotates = (forms.ATTENTION.get(form) or forms.NORMED_ATTENTION[form])(attention)
    return AttentionLayer(
        index=call.index,
        num_heads=seen.num_heads,
        num_kv_heads=seen.num_kv_heads,
        head_dim=seen.head_dim,
        scale=seen.scale,
        softcap=seen.softcap,
        rope=_rope_index(attention, ropes, call.rope) if rotates else None,
    )


def _rope_index(attention: nn.Module, ropes: Sequence[RopeConfig], given: tuple[nn.Module, str] | None) -> int:
    """Return the index of the layer's rotary embedding among ours. Raises `Unusual` if none is it."""
    neighbours = forms.turns_neighbours(attention)
    if given is None or neighbours is None:
        raise Unusual("its rotary embedding")
    module, kind = given
    prefix = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
    theirs, their_factor = getattr(module, f"{prefix}inv_freq"), float(getattr(module, f"{prefix}attention_scaling"))
    for i, rope in enumerate(ropes):
        ours, factor = rope.inv_freq()
        is_same = rope.interleaved == neighbours and ours.shape == theirs.shape and math.isclose(factor, their_factor)
        scales_queries = "llama_4_scaling_beta" in rope.scaling
        if is_same and not scales_queries and torch.allclose(ours, theirs.float().cpu(), rtol=1e-5, atol=0.0):
            return i
    raise Unusual("its rotary embedding has other frequencies")


def _attention_matrices(attention: Any, layer: AttentionLayer) -> tuple[list[nn.Linear], nn.Linear]:
    """Return the matrices of q, k and v, and that of the output. Raises `Unusual`."""
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    if any(type(matrix) is not nn.Linear for matrix in (*qkv, attention.o_proj)):
        raise Unusual("its matrices")
    kv_size = layer.num_kv_heads * layer.head_dim
    if [matrix.out_features for matrix in qkv] != [layer.num_heads * layer.head_dim, kv_size, kv_size]:
        raise Unusual("its heads")
    return qkv, attention.o_proj


def read_norm(module: Any) -> RMSNorm | nn.LayerNorm:
    """Return ``module`` as one of our norms. Raises `Unusual`."""
    if type(module) is nn.LayerNorm:
        return module
    if forms.form_of(module.forward) in forms.RMS_NORMS:
        return RMSNorm.of(module.weight.detach(), float(module.variance_epsilon))
    raise Unusual(type(module).__name__)


def _rms_norm(module: Any) -> RMSNorm:
    norm = read_norm(module)
    if not isinstance(norm, RMSNorm):
        raise Unusual("norms of q and k")
    return norm


@dataclass(frozen=True, slots=True)
class _GatedParts:
    """A feed-forward layer: down(activation(gate(x)) * up(x))."""

    gate_up: Weight
    down: Weight
    activation: Activation
    matrices: tuple[Sequence[nn.Linear], Sequence[nn.Linear]]  # modules of which the two weights are


def read_gated(module: Any) -> _GatedParts | None:
    """Return the parts of down(activation(gate(x)) * up(x)); None: the module is not of that form."""
    from transformers.activations import ACT2FN

    form = forms.form_of(module.forward)
    if form in forms.GATED:
        first, act_fn = [module.gate_proj, module.up_proj], module.act_fn
    elif form in forms.PACKED:
        first, act_fn = [module.gate_up_proj], module.activation_fn
    else:
        return None
    known = {type(ACT2FN[name]): activation for name, activation in ACTIVATIONS.items()}
    if any(type(matrix) is not nn.Linear for matrix in (*first, module.down_proj)) or type(act_fn) not in known:
        return None
    second = [module.down_proj]
    return _GatedParts(_pack(first), _pack(second), known[type(act_fn)], (first, second))


def _pack(matrices: list[Any]) -> PlainWeight:
    """Join the weights of several matrices to one, of which theirs become views. Raises `Unusual`."""
    if len({matrix.bias is None for matrix in matrices}) > 1:
        raise Unusual("biases of some matrices")
    if len(matrices) == 1:
        bias = matrices[0].bias
        return PlainWeight(matrices[0].weight.detach(), None if bias is None else bias.detach())
    joined = {}
    for name in ("weight", "bias"):
        tensors = [getattr(matrix, name) for matrix in matrices]
        if tensors[0] is None:
            continue
        joined[name] = torch.cat([tensor.detach() for tensor in tensors])
        for matrix, part in zip(matrices, joined[name].split([len(t) for t in tensors]), strict=True):
            setattr(matrix, name, nn.Parameter(part, requires_grad=False))
    return PlainWeight(joined["weight"], joined.get("bias"))


def _listener(module: nn.Module) -> CallCounter:
    found: CallCounter = module.aengine_listener  # type: ignore[assignment]
    return found
