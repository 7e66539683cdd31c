"""Decoder layers of the usual shapes, computed by our layers in place of transformers' modules: five launches on a GPU
instead of some fifty.

    input_layernorm, q_proj, k_proj, v_proj                one product (`Weight.after_norm`)
    q_norm, k_norm, rotary embedding, KV, attention        `AttentionCall.forward`
    o_proj, residual                                       one product (`Weight.add_to`)
    post_attention_layernorm, gate_proj, up_proj, act_fn   one product (`Weight.gated_after_norm`)
    down_proj, residual                                    one product

The norms may also follow the products, and the halves of a layer may be parallel (`_KINDS`): then what is no part of a
product is a launch of its own. A feed-forward layer of another kind, such as experts, is called as it is.

Which modules have such a shape follows from their names and types; what they compute is compared: each norm and
activation on random numbers, each layer on what it got in a run of the model over some tokens; then once more in
float32, where a factor near one is no rounding, and with norms and inputs many times as large, which reach limits that
some models have. A layer that differs from what is made of its parts stays transformers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ....kernels.activation import act_and_mul
from ...kv_spec import SharedKV
from ...layers.attention import AttentionLayer
from ...layers.norm import RMSNorm
from ...weights.plain import PlainWeight
from .attention import listen
from .layer_parts import MOST, CentredNorm, Unusual, difference, pack, read_attention_matrices, read_gated, read_norm
from .survey import SurveyedLayer, SurveyedMixer

__all__ = ["CallCounter", "FusedLayer", "fuse_layers"]

logger = logging.getLogger("aengine.runner")

_Norm = RMSNorm | CentredNorm | None


@dataclass(frozen=True, slots=True)
class _Norms:
    """The names of a layer's norms; "": there is none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


_PARALLEL = _Norms("input_layernorm", "", "input_layernorm", "")
"""Both halves take the layer's input, and are added to it."""
_KINDS = (
    _Norms("input_layernorm", "", "post_attention_layernorm", ""),
    _Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    _Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    _Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    _PARALLEL,
)


class CallCounter(Protocol):
    """A listener of attention calls that counts them."""

    next_call: int
    rounds_rotary_to: torch.dtype | None  # cosines and sines of `attend_to_qkv`, as modules may get them

    def attend_to_qkv(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """See `AttentionCall.forward`."""


class FusedLayer:
    """A decoder layer by our layers, over the parameters of ``module``."""

    def __init__(self, module: nn.Module, layer: AttentionLayer) -> None:
        """Read the parts of ``module``. Raises `Unusual` if one of them computes something else than our layers do."""
        attention: Any = module.self_attn
        kind, matrices = _kind_of(module), read_attention_matrices(attention)
        assert kind is not None and matrices is not None, "see `_is_plain`"
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if norm is None else _rms_norm(norm) for norm in norms)
        widths = [0 if norm is None else len(norm.weight) for norm in (q_norm, k_norm)]
        self._q_and_k: tuple[RMSNorm, RMSNorm] | None = None  # norms of all heads of a token together
        if q_norm is not None and k_norm is not None and widths != [layer.head_dim] * 2:
            if widths != [layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim]:
                raise Unusual("norms of q and k")
            self._q_and_k, q_norm, k_norm = (q_norm, k_norm), None, None
        self._module = module
        self.layer = replace(layer, q_norm=q_norm, k_norm=k_norm)
        self._is_parallel = kind == _PARALLEL
        self._norms: list[_Norm] = [read_norm(getattr(module, name)) if name else None for name in astuple(kind)]
        self._qkv = pack(matrices[0])
        self._o = pack([matrices[1]])
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
        if self._is_parallel:
            fed = self._feed(x, norm)
            _add(self._o, residual, attended, None)
        else:
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
        """The feed-forward layer for norm(x), but for the last product of one that is fused."""
        if self._gated is None:
            mlp: Any = self._module.mlp
            out: Tensor = mlp((x if norm is None else norm(x))[None])[0]
            return out
        if norm is None:
            return act_and_mul(self._gated.gate_up.multiply(x), self._gated.activation)
        return self._gated.gate_up.gated_after_norm(x, norm, self._gated.activation)

    def install(self) -> None:
        self._module.forward = self.forward

    def remove(self) -> None:
        del self._module.forward


def _apply(norm: _Norm, x: Tensor) -> tuple[Tensor, RMSNorm | None]:
    """What a product is to multiply: norm(x), or x and the norm if it can be a part of the product."""
    if norm is None or isinstance(norm, RMSNorm):
        return x, norm
    return norm(x), None


def _add(weight: PlainWeight, residual: Tensor, x: Tensor, norm: _Norm) -> None:
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
            except Unusual as error:
                reason = str(error)
        logger.info("a layer stays transformers' %s: %s", type(module).__name__, reason)
    for layer in fused:
        layer.install()
    off = difference(run(), before)
    if off > 5 * MOST[next(model.parameters()).dtype]:  # rounding adds up; else something reads what layers kept
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
    others: dict[str, Any] = field(default_factory=dict)  # arguments beside the hidden states


@contextmanager
def _recording(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, _Record]]:
    """Within, what the modules get and return is kept, if it is one tensor each, and they call attention once."""
    records: dict[nn.Module, _Record] = {}

    def before(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = args[0] if args else options.get("hidden_states")
        if isinstance(hidden, Tensor):
            others = options if args else {key: value for key, value in options.items() if key != "hidden_states"}
            records[module] = _Record(hidden.clone(), _listener(module).next_call, None, others)

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
    listen_at: Callable[[], None],
) -> FusedLayer:
    """Make a fused layer, with the rotary embedding that comes nearest. Raises `Unusual` if it computes something
    else."""
    seen = surveyed[record.call]
    if not isinstance(seen, SurveyedLayer) or isinstance(seen.kv, SharedKV) or seen.has_sinks:
        raise Unusual("its attention")
    matrices = read_attention_matrices(module.self_attn)
    assert matrices is not None
    widths = [seen.num_heads * seen.head_dim, *[seen.num_kv_heads * seen.head_dim] * 2]
    found = [matrix.out_features for matrix in matrices[0]]
    if seen.value_dim != seen.head_dim or found not in (widths, [sum(widths)]):
        raise Unusual("its heads")
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
        listen_at()
        try:
            out = fused.forward(record.hidden.clone())
        except Exception as error:  # the parts are not put together as they are here
            raise Unusual(f"{type(error).__name__}: {error}") from error
        offs.append(difference(out - record.hidden, record.out - record.hidden))
    fused.layer = layers[offs.index(min(offs))]
    if min(offs) > MOST[record.hidden.dtype]:
        raise Unusual(f"its output differs by {min(offs):.2g} from that of its parts")
    try:
        _compare_in_float32(module, fused.layer, record, listen_at)
    except torch.OutOfMemoryError as error:
        raise Unusual("there is no memory to compare it in float32") from error
    return fused


_LARGER = 30.0
"""Times which norms and inputs are as large, for a comparison that reaches limits of values."""


def _compare_in_float32(
    module: nn.Module, layer: AttentionLayer, record: _Record, listen_at: Callable[[], None]
) -> None:
    """Raises `Unusual` if a copy of the layer in float32 differs from its parts, as it is or with larger numbers."""
    memo: dict[int, Any] = {id(_listener(module)): None}
    mlp: Any = module.mlp
    if read_gated(mlp) is None:  # the feed-forward is called as it is, so only the rest is compared
        memo[id(mlp)] = _InItsDtype(mlp, record.hidden.dtype)
    copy = deepcopy(module, memo).float()
    others = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, record.others)
    kind = _kind_of(copy)
    assert kind is not None

    def change(forward: Callable[[Tensor], Tensor], hidden: Tensor, rotary: torch.dtype | None = None) -> Tensor:
        listen_at()
        listener: Any = _listener(module)
        listener.rounds_rotary_to = rotary
        listen(copy, listener)
        return forward(hidden.clone()) - hidden

    for larger in (False, True):
        hidden = record.hidden.float()
        if larger:
            hidden *= _LARGER
            for name in {kind.before_attention, kind.before_mlp} - {""}:
                getattr(copy, name).weight.data.mul_(_LARGER)
        fused = FusedLayer(copy, layer)
        wanted = change(partial(copy, **others), hidden)
        # Some modules get cosines and sines in the model's dtype, some in float32.
        outs = [change(fused.forward, hidden, dtype) for dtype in (None, record.hidden.dtype)]
        off = min(difference(out, wanted) for out in outs)
        if not off <= (_MOST_OF_LARGER if larger else MOST[torch.float32]):
            raise Unusual(f"in float32{', with larger numbers,' * larger} it differs by {off:.2g} from its parts")


_MOST_OF_LARGER = 2e-2


class _InItsDtype(nn.Module):
    """Calls a module of another dtype than its caller's."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._call = module.forward  # no submodule: its parameters stay as they are
        self._dtype = dtype

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        out = self._call(x.to(self._dtype), *args, **options)
        return tree_map(lambda y: y.float() if isinstance(y, Tensor) and y.is_floating_point() else y, out)


def _listener(module: nn.Module) -> CallCounter:
    found: CallCounter = module.aengine_listener  # type: ignore[assignment]
    return found


def _is_plain(module: nn.Module) -> bool:
    return _kind_of(module) is not None and read_attention_matrices(module.self_attn) is not None


def _kind_of(module: nn.Module) -> _Norms | None:
    """The kind of a decoder layer; None: it is none that is known."""
    children = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    return next((kind for kind in _KINDS if children == {"self_attn", "mlp", *filter(None, astuple(kind))}), None)


def _rms_norm(module: Any) -> RMSNorm:
    norm = read_norm(module)
    if not isinstance(norm, RMSNorm):
        raise Unusual("norms of q and k")
    return norm
