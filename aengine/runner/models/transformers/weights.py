"""Weights of transformers' modules through our loader: which tensor of the checkpoint becomes which parameter.

transformers keeps many models in another form than their checkpoints: tensors have other names, experts are stacked,
parts are joined or split. Its conversion mapping says how; here the rules are applied as the tensors come. What becomes
of a rule is made on the host, one parameter at a time: on the device there are only the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from ....checkpoint.safetensors_files import text_name
from ....errors import ModelLoadError
from ...weights.scope import WeightScope


class CheckpointWeights:
    """The places of a model's tensors, which depend on the names that the checkpoint has."""

    def __init__(self, model: Any, weights: WeightScope, check: Callable[[], None]) -> None:
        """``check`` is called when the model is complete."""
        self._check = check
        self._model = model
        self._weights = weights
        plan = {} if weights.formats.dtype == torch.float32 else model._get_dtype_plan(weights.formats.dtype)
        self._kept_in_float32 = tuple(name for name, dtype in plan.items() if dtype == torch.float32)
        self._empty: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}) or {})

    def choose(self, stored: Mapping[str, tuple[int, ...]] | None) -> None:
        """Request tensors of those ``stored``, by name and shape; None: each parameter as it is.

        Raises ModelLoadError if the checkpoint lacks some.
        """
        if stored is None:
            for name, empty in self._empty.items():
                if name not in self._tied and empty.is_floating_point():
                    self._want(name, name, tuple(empty.shape))
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        joined: dict[str, _Conversion] = {}
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = self._target_of(name, renamings, converters)
            if target not in self._empty or target in self._tied:
                continue
            if pattern is None:
                self._want(name, target, tuple(self._empty[target].shape))
                continue
            if target not in joined:
                joined[target] = _Conversion(deepcopy(by_pattern[pattern]), target, self)
            put = joined[target].expect(name, pattern)
            self._weights.want(name, stored[name], self._dtype_of(target), put, on_host=True)

    def _target_of(self, name: str, renamings: Any, converters: Any) -> tuple[str, str | None]:
        """Return the parameter for the tensor ``name``, and the pattern of the rule that it is a part of, if there is
        one."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, self._empty)
        if target not in self._empty and name in self._empty:
            target, pattern = rename_source_key(name, [], [], prefix, self._empty)
        if target not in self._empty and text_name(name) != name:
            return self._target_of(text_name(name), renamings, converters)
        return target, pattern

    def _want(self, name: str, target: str, shape: tuple[int, ...]) -> None:
        self._weights.want(name, shape, self._dtype_of(target), partial(self.put, target))

    def _dtype_of(self, target: str) -> torch.dtype:
        dtype = self._empty[target].dtype
        if dtype.is_floating_point and any(part in target for part in self._kept_in_float32):
            return torch.float32
        return dtype

    def put(self, target: str, tensor: Tensor) -> None:
        """Make ``tensor`` the parameter or buffer ``target``. Raises ModelLoadError if it has another shape."""
        if target not in self._empty:
            return
        empty = self._empty[target]
        if tensor.shape != empty.shape:
            raise ModelLoadError(
                f"the tensors of the checkpoint that become {target} give the shape {list(tensor.shape)}, but by the "
                f"config it is {list(empty.shape)}"
            )
        owner, _, name = target.rpartition(".")
        module = self._model.get_submodule(owner)
        tensor = tensor.to(self._dtype_of(target)).to(self._weights.formats.device)
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[name] = tensor

    def finish(self, device: torch.device) -> None:
        """See `CheckpointNames`."""
        self._model.tie_weights()
        ignored = self._model._keys_to_ignore_on_load_missing or ()
        missing = [name for name, tensor in self._model.state_dict().items() if tensor.is_meta]
        missing = [name for name in missing if not any(pattern in name for pattern in ignored)]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors of the model: {shown}")
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
        self._check()


_ONE_AT_A_TIME = Lock()
"""While tensors are joined on the host: their copies take some times the room of one parameter."""


class _Conversion:
    """Tensors of the checkpoint that make one parameter or several, by a rule of transformers."""

    def __init__(self, rule: Any, target: str, weights: CheckpointWeights) -> None:
        self._rule = rule
        self._target = target
        self._weights = weights
        self._parts: list[tuple[str, str, Tensor | None]] = []  # names, patterns, tensors: in the order of names
        self._num_missing = 0
        self._lock = Lock()  # several threads may load

    def expect(self, name: str, pattern: str) -> Any:
        """Return what takes the tensor ``name``."""
        self._parts.append((name, pattern, None))
        self._num_missing += 1
        return partial(self._put, len(self._parts) - 1)

    def _put(self, index: int, tensor: Tensor) -> None:
        with self._lock:
            self._parts[index] = (*self._parts[index][:2], tensor)
            self._num_missing -= 1
            is_last = self._num_missing == 0
        if not is_last:
            return
        with _ONE_AT_A_TIME:
            for name, pattern, part in self._parts:
                self._rule.add_tensor(self._target, name, pattern, part)
            self._parts.clear()
            try:
                made = self._rule.convert(self._target, model=self._weights._model, config=self._weights._model.config)
            except Exception as error:
                raise ModelLoadError(
                    f"the tensors of the checkpoint that become {self._target} can't be joined: {error}"
                ) from error
            for target, value in made.items():
                self._weights.put(target, value[0] if isinstance(value, list) else value)
