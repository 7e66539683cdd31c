"""Torch without its kernels for the device "meta", until somebody needs them.

As it is imported, torch registers a thousand functions of Python that say what shape an op's result has, for tensors
that have no memory: a quarter of the import's time. A model of ours has no such tensors on a CPU; transformers' models,
torch's compiler and another package's platform may.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULES = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Modules that torch imports for what they register. A version without one of them does not ask for it."""


class _Postponed(ModuleType):
    """Is executed when something of it is asked for, or by `register_meta_kernels`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's import system looks at the module
            raise AttributeError(name)
        _execute(self)
        return getattr(self, name)


class _Postponing(Loader, MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Postponed(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def meta_kernels_postponed() -> Iterator[None]:
    """Have an import of torch within, if it is the process' first, register no kernels for "meta"."""
    postponing = _Postponing()
    sys.meta_path.insert(0, postponing)
    try:
        yield
    finally:
        sys.meta_path.remove(postponing)


def register_meta_kernels() -> None:
    """Register what was postponed, for code that may have tensors on "meta". Takes 0.3 s, the first time."""
    for name in _MODULES:
        module = sys.modules.get(name)
        if isinstance(module, _Postponed):
            _execute(module)


def _execute(module: ModuleType) -> None:
    package = sys.modules[module.__name__.rpartition(".")[0]]
    spec = PathFinder.find_spec(module.__name__, package.__path__)
    assert spec is not None and spec.loader is not None
    module.__class__ = ModuleType
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    spec.loader.exec_module(module)
