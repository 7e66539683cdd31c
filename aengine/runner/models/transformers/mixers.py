"""Layers that keep a state of fixed size (a linear attention, a convolution), as transformers computes them.

Such a module takes one sequence after the other, or a batch of sequences of one token each, and asks a cache for the
state. So the flat batch is cut here: requests of one token each are one call, every other request is a call of its own,
and the cache is `StepCache`, over the request's page.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kv_spec import StateTensor
from ...layers.states import LayerStates

Run = Callable[[int, int, bool, "StepCache"], Tensor]
"""Computes tokens begin to end of a step, as one sequence or (True) each as a sequence of its own."""
_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "past_key_value", "cache")


class MixerListener(Protocol):
    """Receiver of the calls of a model's mixers."""

    def mix(self, run: Run, num_tokens: int) -> Tensor:
        """Return [1, num_tokens, size] for the tokens of a step, which ``run`` computes part by part."""


class _States:
    """States of one kind, by number."""

    def __init__(self, states: dict[str, Tensor], kind: str) -> None:
        self._states = states
        self._kind = kind

    def __getitem__(self, index: int) -> Tensor:
        return self._states[f"{self._kind}{index}"]


class _Layers:
    """The layers of a cache as transformers 5.17 looks at them, each of which is the one at hand."""

    record_past = False

    def __init__(self, states: dict[str, Tensor]) -> None:
        self.conv_states = _States(states, "conv")
        self.recurrent_states = _States(states, "recurrent")

    def __getitem__(self, layer_idx: int) -> Self:
        return self


class StepCache:
    """The states of one layer for one call, by the methods that transformers' mixers have for it."""

    def __init__(self, states: dict[str, Tensor] | None = None) -> None:
        """``states``: [n, ...] by name, which may be changed in place; None: the sequences begin."""
        self.states: dict[str, Tensor] = states or {}
        self._has_previous = states is not None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._has_previous

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def layers(self) -> _Layers:
        """What transformers 5.17 looks at in place of `is_recording_past` and the states' methods."""
        return _Layers(self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1 if self._has_previous else 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states[f"conv{state_idx}"] if self._has_previous else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states[f"recurrent{state_idx}"] if self._has_previous else None

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **unused: Any,
    ) -> Tensor:
        """Keep the last inputs [n, channels, size] of a convolution; returns them behind those kept before."""
        name = f"conv{state_idx}"
        size = conv_kernel_size or (self.states[name] if self._has_previous else conv_states).shape[-1]
        if self._has_previous:
            conv_states = torch.cat((self.states[name].to(conv_states.dtype), conv_states), -1)
        elif conv_states.shape[-1] < size:
            conv_states = F.pad(conv_states, (size - conv_states.shape[-1], 0))
        self.states[name] = conv_states[..., -size:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        self.states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states


def _read_source(code: Any) -> str:
    """Return the source text of a class or a module, "" if it has none."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


# inspect parses the whole file for each class, and a model has hundreds of modules of a few classes.
source_of: Callable[[Any], str] = functools.cache(_read_source)


def is_mixer(module: nn.Module) -> bool:
    """Tell whether the module keeps a state of its own in transformers' cache."""
    if type(module).__module__.startswith("torch."):
        return False
    source = source_of(type(module))
    return ".update_conv_state(" in source or ".update_recurrent_state(" in source


def wrap_mixers(model: nn.Module) -> None:
    """Send the calls of all mixers to the listener of the model's attention."""
    for module in model.modules():
        if is_mixer(module):
            _wrap(module)


def _wrap(module: nn.Module) -> None:
    original = module.forward
    takes = inspect.signature(type(module).forward).parameters
    argument = next(name for name in _CACHE_ARGUMENTS if name in takes)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        listener: MixerListener | None = module.aengine_listener  # type: ignore[assignment]
        if listener is None:
            return original(hidden_states, *args, **kwargs)
        num_tokens, extras = hidden_states.shape[1], None

        def run(begin: int, end: int, are_apart: bool, cache: StepCache) -> Tensor:
            nonlocal extras
            given = {key: _cut(value, num_tokens, begin, end, are_apart) for key, value in kwargs.items()}
            part = _cut(hidden_states, num_tokens, begin, end, are_apart)
            out = original(part, *args, **{**given, argument: cache})
            if isinstance(out, tuple):
                out, extras = out[0], out[1:]
            return out.transpose(0, 1) if are_apart else out

        mixed = listener.mix(run, num_tokens)
        return mixed if extras is None else (mixed, *extras)

    module.forward = forward


def _cut(value: Any, num_tokens: int, begin: int, end: int, are_apart: bool) -> Any:
    """Return the part of a value that has a row for each token, [1, num_tokens, ...]; others as they are."""
    if isinstance(value, tuple):
        return tuple(_cut(item, num_tokens, begin, end, are_apart) for item in value)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, num_tokens):
        return value
    return value[0, begin:end, None] if are_apart else value[:, begin:end]


def mix_batch(
    run: Run,
    num_tokens: int,
    states: LayerStates,
    tensors: tuple[StateTensor, ...],
    dtypes: tuple[torch.dtype, ...],
    takes_chunks: bool,
) -> Tensor:
    """Compute a step of ``num_tokens`` of a mixer whose states are ``tensors``, computed in ``dtypes``.

    ``takes_chunks``: it goes on from a state with several tokens at once, which some of transformers' do not: those get
    a chunk that does not begin its sequence token by token.
    """
    parts: list[Tensor] = []
    n = states.num_decodes
    if n:
        cache = StepCache({t.name: states.read(t.name).to(dtype) for t, dtype in zip(tensors, dtypes, strict=True)})
        parts.append(run(0, n, True, cache))
        for tensor in tensors:
            states.write(tensor.name, cache.states[tensor.name])
    begun = -1  # the first token of a request that begins with the span at hand, or with the one before
    for span in states.spans:
        own = {tensor.name: states.of(span, tensor.name) for tensor in tensors}
        before = {t.name: own[t.name][None].to(dtype, copy=True) for t, dtype in zip(tensors, dtypes, strict=True)}
        begun = span.start if span.begins else begun
        if begun >= 0 and not takes_chunks:  # once more from its first token rather than token by token
            cache = StepCache()
            parts.append(run(begun, span.stop, False, cache)[:, span.start - begun :])
        else:
            cache = StepCache(None if span.begins else before)
            size = span.stop - span.start if takes_chunks else 1
            for begin in range(span.start, span.stop, size):
                parts.append(run(begin, begin + size, False, cache))
                cache = StepCache(cache.states)
        begun = begun if span.kept >= 0 else -1
        for tensor in tensors:
            own[tensor.name].copy_(cache.states[tensor.name][0])
        states.keep(span)
    if not parts:  # The walk that compiles kernels runs tokens that belong to no request.
        return run(0, num_tokens, False, StepCache())
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
