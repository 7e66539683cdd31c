"""Triton's interpreter, quick enough for tests."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def quicken_interpreter() -> None:
    """Leave out what Triton's interpreter computes in vain, and keep what it computes anew for each value.

    Values, types and checks of the kernels are the same, in a fraction of the time.
    """
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(core.tensor.__init__, "quick"):
        return
    # Each sum, difference and product of integers is computed a second time in 64 bits, for an assert that is made
    # with the option `debug` alone.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    _patch_once(core, interpreter)
    _keep_types(core, interpreter)


def _patch_once(core: Any, interpreter: Any) -> None:
    """Builtins are replaced once a launch: not again at each call of a jitted function by another, by looking at all
    members of Triton's modules."""
    names: dict[Any, list[str]] = {}
    modules: dict[Any, frozenset[str]] = {}
    replaced: set[str] = set()
    patch_lang = interpreter._patch_lang

    def patch_builtin(package: Any, *context: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *context)

    nothing = interpreter._LangPatchScope

    class Scope(nothing):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_lang_once(function: Any) -> Any:
        if function not in modules:
            values = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            modules[function] = frozenset(value.__name__ for value in values if value in (interpreter.tl, core))
        if modules[function] and modules[function] <= replaced:
            return nothing()
        scope = patch_lang(function)
        replaced.update(modules[function])
        return scope

    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_lang_once


def _keep_types(core: Any, interpreter: Any) -> None:
    """What a tensor knows of its shape, and a block of its type, is computed once for each shape."""
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
    types: dict[str, Any] = {}
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}
    init_tensor, init_block, np_dtype = core.tensor.__init__, core.block_type.__init__, interpreter._get_np_dtype
    semantic, unwrap_constexpr = type(interpreter.interpreter_semantic), core._unwrap_if_constexpr
    broadcast_values = semantic.broadcast_impl_value

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            init_tensor(self, handle, type)
            shapes[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[sizes]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([unwrap(size) for size in unwrap(shape)])
        known = blocks.get((element_ty.name, sizes))
        if known is None:
            init_block(self, element_ty, shape)
            known = blocks[element_ty.name, sizes] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known

    def get_np_dtype(type: Any) -> Any:
        if type.name not in types:
            types[type.name] = np_dtype(type)
        return types[type.name]

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else unwrap_constexpr(value)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast_values(self, lhs, rhs)

    tensor.quick = True  # type: ignore[attr-defined]
    core.tensor.__init__, core.block_type.__init__ = tensor, block_type
    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap, get_np_dtype
    semantic.broadcast_impl_value = broadcast
