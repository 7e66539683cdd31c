"""Survey of a model: it is run once over meta tensors, and what its attention modules are called with says what each
layer keeps of a sequence. Nothing is read from settings whose names differ from family to family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModelLoadError
from ...kv_spec import FullKV, LayerKV, SharedKV, StateKV, StateTensor, WindowKV
from .attention import listen
from .library import ModelFiles, build_skeleton
from .mixers import Run, StepCache, source_of, wrap_mixers
from .ropes import fix_ropes

_TOKENS = 3  # one is a special case in some models
_META = torch.device("meta")
_DTYPE = torch.bfloat16
"""The survey's dtype: not float32, so that what a model always computes in float32 shows."""


@dataclass(frozen=True, slots=True)
class SurveyedLayer:
    """One call of an attention module."""

    num_heads: int
    value_dim: int
    scale: float
    softcap: float
    has_sinks: bool
    kv: LayerKV
    num_kv_heads: int
    head_dim: int  # elements of a kept key or value, whichever is wider


@dataclass(frozen=True, slots=True)
class SurveyedMixer:
    """One call of a mixer."""

    kv: StateKV
    follows_dtype: tuple[bool, ...]  # for each tensor of the state: it is computed in the model's dtype, not in float32


@dataclass(slots=True)
class _Recorder:
    """A listener that answers with tensors of the right shape."""

    layers: list[SurveyedLayer | SurveyedMixer] = field(default_factory=list)
    is_mixing: bool = False
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of each

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        name = type(module).__name__
        if self.is_mixing:
            raise ModelLoadError(f"{name} keeps a state beside keys and values")
        if options.get("attention_mask") is not None or options.get("position_bias") is not None:
            raise ModelLoadError(f"{name} adds a bias or a mask of its own to the scores of its attention")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ModelLoadError(f"{name} attends to later tokens: it is no decoder's")
        if len(k) != len(q) or v.shape[:2] != k.shape[:2] or q.shape[2] != k.shape[2]:
            raise ModelLoadError(f"{name} attends to something else than the tokens of its own sequence")
        head_dim = max(k.shape[2], v.shape[2])
        window = options.get("sliding_window")
        kv: LayerKV = WindowKV(k.shape[1], head_dim, window) if window else FullKV(k.shape[1], head_dim)
        own = _root(k), _root(v)
        earlier = [i for i, (key, value) in enumerate(self.kept) if key is own[0] and value is own[1]]
        if earlier and own[0] is not own[1]:
            kv = SharedKV(earlier[0])
        self.kept.append(own)
        scale = options.get("scaling")
        self.layers.append(
            SurveyedLayer(
                num_heads=q.shape[1],
                value_dim=v.shape[2],
                scale=float(q.shape[2] ** -0.5 if scale is None else scale),
                softcap=float(options.get("softcap") or 0.0),
                has_sinks=options.get("s_aux") is not None,
                kv=kv,
                num_kv_heads=k.shape[1],
                head_dim=head_dim,
            )
        )
        return q.new_empty((len(q), q.shape[1], v.shape[2]))

    def first_lens(self) -> None:
        """See `AttentionCall`: nothing is long here."""

    def mix(self, run: Run, num_tokens: int) -> Tensor:
        cache = StepCache()
        self.is_mixing = True
        out = run(0, num_tokens, False, cache)
        self.is_mixing = False
        named = sorted(cache.states.items())
        tensors = tuple(StateTensor(name, tuple(state.shape[1:])) for name, state in named)
        follows = tuple(state.dtype == _DTYPE for _, state in named)
        self.kept.append((out, out))  # no layer uses these as keys
        self.layers.append(SurveyedMixer(StateKV(tensors), follows))
        return out


def _root(tensor: Tensor) -> Tensor:
    """Return the tensor of which ``tensor`` is a view."""
    return tensor if tensor._base is None else tensor._base


def survey(files: ModelFiles) -> tuple[list[SurveyedLayer | SurveyedMixer], Any, type[nn.Module]]:
    """Return the attention layers in the order of their calls; transformers' config and its class.

    Raises ModelLoadError saying what of the model can't be served.
    """
    model, config = build_skeleton(files, _DTYPE, buffers=_META)
    fix_ropes(model)
    wrap_mixers(model)
    recorder = _Recorder()
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device=_META)
    name = type(model).__name__
    try:
        with torch.no_grad():
            listen(model, None)
            trunk = find_trunk(model)
            listen(model, recorder)
            trunk(**trunk_inputs(trunk, ids, ids))
    except ModelLoadError as error:
        raise ModelLoadError(f"{name} of transformers can't be served: {error}") from error
    except Exception as error:
        raise ModelLoadError(
            f"{name} of transformers can't be served: its computation depends on values of the tokens, or needs more "
            f"than ids and positions ({type(error).__name__}: {str(error)[:300]})"
        ) from error
    if not recorder.layers:
        raise ModelLoadError(
            f"{name} of transformers can't be served: its attention does not go through AttentionInterface"
        )
    window = _window_of_masks(trunk, config)
    full = [layer for layer in recorder.layers if isinstance(layer, SurveyedLayer) and isinstance(layer.kv, FullKV)]
    if window is not None and len(full) == len(recorder.layers):
        kinds = [WindowKV(layer.num_kv_heads, layer.head_dim, window) for layer in full]
        recorder.layers = [replace(layer, kv=kind) for layer, kind in zip(full, kinds, strict=True)]
    return recorder.layers, config, type(model)


def _window_of_masks(trunk: nn.Module, config: Any) -> int | None:
    """Return the window of all layers where a model's masks alone have it, and attention functions are not told of it
    (Phi-3.5-MoE's). A guess from its code, which the check of the loaded model judges."""
    text = config.get_text_config(decoder=True)
    window, has_kinds = getattr(text, "sliding_window", None), hasattr(text, "layer_types")
    if not isinstance(window, int) or has_kinds or window >= text.max_position_embeddings:
        return None
    return window if "create_sliding_window_causal_mask" in source_of(type(trunk)) else None


def trunk_inputs(trunk: nn.Module, input_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a model's body for int64 [1, num_tokens] ids and positions. Some have no positions:
    states and windows tell them where they are; of others that count for themselves the check of the loaded model finds
    it."""
    inputs = {"input_ids": input_ids, "use_cache": False}
    takes = inspect.signature(type(trunk).forward).parameters
    return inputs | {"position_ids": positions} if "position_ids" in takes else inputs


def find_trunk(model: Any) -> nn.Module:
    """Return the part of a causal language model between ids and final hidden states. What comes after it, its head, is
    run by itself here, to see that it can be.

    Raises ModelLoadError.
    """
    base = model.base_model
    for trunk in (base, getattr(base, "decoder", None), getattr(model, "model", None)):
        if not isinstance(trunk, nn.Module) or trunk is model:
            continue
        width = model.config.get_text_config(decoder=True).hidden_size
        device = next(model.parameters()).device
        head = Head(model, trunk)
        try:
            head(torch.empty((1, _width_of_head(model, width)), device=device, dtype=next(model.parameters()).dtype))
        except Exception:
            if head.was_used:
                raise
            continue  # its own body ran, without what it needs
        finally:
            head.remove()
        if head.was_used:
            return trunk
    raise ModelLoadError(f"{type(model).__name__} does not compute its logits from its base model's hidden states")


def _width_of_head(model: Any, hidden_size: int) -> int:
    head = model.get_output_embeddings()
    return int(getattr(head, "in_features", hidden_size))


class _BodyOutput:
    """The output of a model's body: hidden states, and none of whatever else it may have."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key] if isinstance(key, int | slice) else getattr(self, key)

    def __getattr__(self, name: str) -> None:
        return None


class Head:
    """What a causal language model does after its body, by its own ``forward``: so nothing of it (scales, caps, biases)
    has to be known here. Meanwhile the body gives the hidden states at hand."""

    def __init__(self, model: nn.Module, trunk: nn.Module) -> None:
        self._model = model
        self._trunk = trunk
        self._body: Callable[..., Any] = trunk.forward
        self._hidden: Tensor | None = None
        self.was_used = False
        self._ids = torch.zeros((1, 1), dtype=torch.int64)
        trunk.forward = self._forward

    def remove(self) -> None:
        """Restore the model as it was."""
        del self._trunk.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._hidden is None:
            return self._body(*args, **kwargs)
        self.was_used = True
        return _BodyOutput(self._hidden)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return float32 [n, vocab_size] for hidden [n, hidden_size]."""
        if self._ids.device != hidden.device:
            self._ids = self._ids.to(hidden.device)
        self._hidden = hidden[None]
        try:
            logits: Tensor = self._model(input_ids=self._ids, use_cache=False).logits
        finally:
            self._hidden = None
        return logits[0].float()
