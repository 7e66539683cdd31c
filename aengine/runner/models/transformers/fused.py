"""Decoder layers of the usual shape, computed by our layers in place of transformers' modules: five launches on a GPU
instead of some fifty.

    input_layernorm, q_proj, k_proj, v_proj                one product (`Weight.after_norm`)
    q_norm, k_norm, rotary embedding, KV, attention        `AttentionCall.forward`
    o_proj, residual                                       one product (`Weight.add_to`)
    post_attention_layernorm, gate_proj, up_proj, act_fn   one product (`Weight.gated_after_norm`)
    down_proj, residual                                    one product

Which modules have that shape follows from their names and types; what they compute is compared: each norm and
activation on random numbers, each layer on what it got in a run of the model over some tokens. A layer that differs
from what is made of its parts, in whatever way, stays transformers'. A feed-forward layer of another kind, such as
experts, is called as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from ....kernels.activation import Activation, act_and_mul
from ...kv_spec import SharedKV
from ...layers.attention import AttentionLayer
from ...layers.norm import RMSNorm
from ...weights.plain import PlainWeight
from .survey import SurveyedLayer, SurveyedMixer

__all__ = ["CallCounter", "FusedLayer", "fuse_layers"]

logger = logging.getLogger("aengine.runner")

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_MOST = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""By how much, of its size, the output of a layer may differ."""


class CallCounter(Protocol):
    """A listener of attention calls that counts them."""

    next_call: int

    def attend_to_qkv(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall.forward`."""


@dataclass(frozen=True, slots=True)
class _GatedParts:
    gate_up: PlainWeight
    down: PlainWeight
    activation: Activation


class FusedLayer:
    """A decoder layer by our layers, over the parameters of ``module``."""

    def __init__(self, module: nn.Module, layer: AttentionLayer) -> None:
        """Raises `_Unusual` if a part computes something else."""
        attention: Any = module.self_attn
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else _read_norm(norm) for norm in norms)
        if any(norm is not None and len(norm.weight) != layer.head_dim for norm in (q_norm, k_norm)):
            raise _Unusual("norms of the whole of q and k")
        self._module = module
        self.layer = replace(layer, q_norm=q_norm, k_norm=k_norm)
        self._input_norm = _read_norm(module.input_layernorm)
        self._mlp_norm = _read_norm(module.post_attention_layernorm)
        self._qkv = _pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._o = _pack([attention.o_proj])
        self._gated = _read_gated(module.mlp)

    @property
    def has_feed_forward(self) -> bool:
        return self._gated is not None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Change ``hidden_states`` [1, num_tokens, hidden_size] in place, and return them."""
        residual, module = hidden_states[0], self._module
        qkv = self._qkv.after_norm(residual, self._input_norm)
        self._o.add_to(residual, _listener(module).attend_to_qkv(self.layer, qkv))
        if self._gated is None:
            mlp: Any = module.mlp
            residual.add_(mlp(self._mlp_norm(residual)[None])[0])
        else:
            hidden = self._gated.gate_up.gated_after_norm(residual, self._mlp_norm, self._gated.activation)
            self._gated.down.add_to(residual, hidden)
        return hidden_states

    def install(self) -> None:
        self._module.forward = self.forward

    def remove(self) -> None:
        del self._module.forward


class _Unusual(Exception):
    """A part of a layer is not as our layers have it."""


def fuse_layers(
    model: nn.Module,
    surveyed: tuple[SurveyedLayer | SurveyedMixer, ...],
    ropes: Sequence[int],
    listen_at: Callable[[int], Any],
    run: Callable[[], Tensor],
) -> list[FusedLayer]:
    """Replace the layers of ``model`` that can be, and return what they are computed by now.

    Args:
        ropes: those of the rotary embeddings of the step's attention that the layers may have
        listen_at: makes the model's calls go to a listener whose next call is that of this layer of the survey
        run: runs the model over some tokens; the logits
    """
    found = [module for module in model.modules() if _is_plain(module)]
    if not found:
        return []
    with _recording(found) as records:
        before = run()
    fused: list[FusedLayer] = []
    for module in found:
        record, reason = records.get(module), "it was not called"
        if record is not None:
            try:
                fused.append(_fuse(module, surveyed, ropes, record, partial(listen_at, record.call)))
                continue
            except _Unusual as error:
                reason = str(error)
        logger.info("a layer stays transformers' %s: %s", type(module).__name__, reason)
    for layer in fused:
        layer.install()
    off = _difference(run(), before)
    if off > 5 * _MOST[next(model.parameters()).dtype]:  # rounding adds up; else something reads what layers kept
        name = type(model).__name__
        logger.warning("layers of %s stay transformers': with fused ones its logits differ by %.2g", name, off)
        for layer in fused:
            layer.remove()
        return []
    return fused


@dataclass(slots=True)
class _Record:
    """One call of a decoder layer."""

    hidden: Tensor
    call: int  # its attention's place among all calls
    out: Tensor | None = None


@contextmanager
def _recording(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, _Record]]:
    """Within, what the modules get and return is kept, if it is one tensor each, and they call attention once."""
    records: dict[nn.Module, _Record] = {}

    def before(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = args[0] if args else options.get("hidden_states")
        if isinstance(hidden, Tensor):
            records[module] = _Record(hidden.clone(), _listener(module).next_call)

    def after(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        record = records.pop(module, None)
        is_one = record is not None and _listener(module).next_call == record.call + 1
        if record is not None and isinstance(out, Tensor) and is_one:
            record.out = out.clone()
            records[module] = record

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(after, with_kwargs=True) for module in modules]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _fuse(
    module: nn.Module,
    surveyed: tuple[SurveyedLayer | SurveyedMixer, ...],
    ropes: Sequence[int],
    record: _Record,
    listen: Callable[[], None],
) -> FusedLayer:
    """The rotary embedding is the one that comes nearest. Raises `_Unusual`."""
    seen = surveyed[record.call]
    if not isinstance(seen, SurveyedLayer) or isinstance(seen.kv, SharedKV) or seen.has_sinks:
        raise _Unusual("its attention")
    widths = [seen.num_heads * seen.head_dim, *[seen.num_kv_heads * seen.head_dim] * 2]
    attention: Any = module.self_attn
    if seen.value_dim != seen.head_dim or widths != [getattr(attention, n).out_features for n in _ATTENTION[:3]]:
        raise _Unusual("its heads")
    plain = AttentionLayer(
        index=record.call,
        num_heads=seen.num_heads,
        num_kv_heads=seen.num_kv_heads,
        head_dim=seen.head_dim,
        scale=seen.scale,
        softcap=seen.softcap,
    )
    fused = FusedLayer(module, plain)
    layers = [replace(fused.layer, rope=rope) for rope in (*ropes, None)]
    assert record.out is not None
    offs: list[float] = []
    for fused.layer in layers:
        listen()
        offs.append(_difference(fused.forward(record.hidden.clone()) - record.hidden, record.out - record.hidden))
    fused.layer = layers[offs.index(min(offs))]
    if min(offs) > _MOST[record.hidden.dtype]:
        raise _Unusual(f"its output differs by {min(offs):.2g} from that of its parts")
    return fused


def _listener(module: nn.Module) -> CallCounter:
    found: CallCounter = module.aengine_listener  # type: ignore[assignment]
    return found


def _is_plain(module: nn.Module) -> bool:
    if {name for name, _ in module.named_children()} != _LAYER:
        return False
    attention: Any = module.self_attn
    matrices = [getattr(attention, name, None) for name in _ATTENTION]
    return all(type(matrix) is nn.Linear for matrix in matrices)


def _read_norm(module: Any) -> RMSNorm:
    """Raises `_Unusual` if it is no RMS norm."""
    names = [name for name, _ in module.named_parameters()]
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None)
    if names != ["weight"] or module.weight.dim() != 1 or not isinstance(eps, float):
        raise _Unusual(f"{type(module).__name__}")
    weight: Tensor = module.weight.detach()
    x = _random((4, len(weight)), weight)
    wanted = module(x)
    for norm in (RMSNorm.of(weight, eps), RMSNorm.of(weight.float() + 1.0, eps)):
        if _difference(norm(x), wanted) <= _MOST[x.dtype] / 5:
            return norm
    raise _Unusual(f"{type(module).__name__}")


def _read_gated(module: Any) -> _GatedParts | None:
    """None: it is not down(activation(gate(x)) * up(x))."""
    matrices = [getattr(module, name, None) for name in _GATED]
    if any(type(matrix) is not nn.Linear for matrix in matrices) or not isinstance(
        getattr(module, "act_fn", None), nn.Module
    ):
        return None
    gate, up, down = matrices
    assert gate is not None and up is not None and down is not None
    x = _random((4, 64), gate.weight).float()  # in 16 bits rounding would hide which one it is
    wanted = module.act_fn(x[:, :32]) * x[:, 32:]
    for activation in get_args(Activation):
        if _difference(act_and_mul(x, activation), wanted) <= 1e-5:
            return _GatedParts(_pack([gate, up]), _pack([down]), activation)
    return None


def _pack(matrices: list[nn.Linear]) -> PlainWeight:
    """One weight of them, below each other; theirs become parts of it."""
    if len({matrix.bias is None for matrix in matrices}) > 1:
        raise _Unusual("biases of some matrices")
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


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _difference(x: Tensor, wanted: Tensor) -> float:
    """The norm of ``x - wanted``, as a share of that of ``wanted``."""
    return float((x.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))
