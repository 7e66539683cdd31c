"""Rotary embeddings of transformers whose frequencies depend on the longest sequence of the batch, so that they depend
on each request alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModelLoadError


def fix_ropes(model: nn.Module) -> None:
    """Replace the ``forward`` of all such modules. Raises ModelLoadError if one is of an unknown kind."""
    dtype = next(model.parameters()).dtype
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        types = list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]
        if "longrope" in types:
            _LongRopeTables(module, dtype).install()
        elif any(isinstance(kind, str) and "dynamic" in kind for kind in types):
            # "dynamic" changes frequencies only beyond the model's context, which no request reaches.
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)


class _LongRopeTables:
    """What a module of type longrope returns for each position, once as of a short sequence, once as of a long one.

    A table has the first ``border`` positions of short sequences, then all positions of long ones.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """``dtype``: in which the model computes. Raises ModelLoadError."""
        self._module = module
        self._original: Callable[..., Any] = module.forward
        try:
            self._border = int(module.config.rope_parameters["original_max_position_embeddings"])
            on_cpu = _copy_on_cpu(module)
            longest = int(module.config.max_position_embeddings)
            if module.inv_freq.is_meta:  # a module without values: only shapes are wanted
                longest = min(longest, self._border + 1)
            short = _values(on_cpu, min(self._border, longest))
            long = _values(on_cpu, longest) if longest > self._border else tuple(table[:0] for table in short)
        except Exception as error:
            raise ModelLoadError(
                f"its rotary embedding (longrope) can't be computed ahead: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        for i, tables in enumerate(zip(short, long, strict=True)):
            table = torch.cat(tables).to(module.inv_freq.device, dtype)
            module.register_buffer(f"aengine_table_{i}", table, persistent=False)
        self._names = [f"aengine_table_{i}" for i in range(len(short))]

    def install(self) -> None:
        self._module.forward = self._forward

    def _forward(self, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        """Return [1, num_tokens, size] each, for int64 [1, num_tokens] positions."""
        listener = self._module.aengine_listener
        if listener is None:
            return self._original(x, position_ids, *args, **options)
        lens = listener.first_lens()
        if lens is not None:
            position_ids = position_ids + torch.where(lens > self._border, self._border, 0)
        return tuple(getattr(self._module, name)[position_ids].to(x.dtype) for name in self._names)


def _copy_on_cpu(module: Any) -> Any:
    with torch.device("cpu"):
        return type(module)(config=module.config)


def _values(module: Any, length: int) -> tuple[Tensor, ...]:
    """Return float32 [length, size] each, for the positions of a sequence of so many tokens."""
    values = module(torch.zeros(1, 1), torch.arange(length)[None])
    if not isinstance(values, tuple) or any(value.shape[:2] != (1, length) for value in values):
        raise ValueError("it returns something else than a value for each position")
    return tuple(value[0] for value in values)
