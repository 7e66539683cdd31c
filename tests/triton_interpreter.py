"""Triton's interpreter, quick enough for tests, and strict about memory."""

from __future__ import annotations

import dataclasses
import inspect
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np


def quicken_interpreter() -> None:
    """Leave out what Triton's interpreter computes in vain, and keep what it computes anew for each value.

    Values, types and checks of the kernels are the same, in a fraction of the time; and a kernel may neither read nor
    write what lies outside of all tensors that it was given.
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
    _keep_operands(core, interpreter)
    _convert_at_once(core, interpreter)
    _check_bounds(interpreter)


def _patch_once(core: Any, interpreter: Any) -> None:
    """Builtins are replaced once a launch: not again at each call of a jitted function by another, by looking at all
    members of Triton's modules."""
    names: dict[Any, list[str]] = {}
    modules: dict[Any, frozenset[str]] = {}
    replaced: set[str] = set()
    patch_lang = interpreter._patch_lang

    def given(member: Any) -> Any:
        """A builtin without the function around it, which asks whether the argument that is given here is given."""
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_builtin(package: Any, _builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):
                scope.set_attr(package, name, given(member))

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
    """What a tensor knows of its shape, a block of its type and a type of itself is computed once for each."""
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
    others: dict[tuple[str, tuple[int, ...]], Any] = {}
    irs: dict[str, Any] = {}
    types: dict[str, Any] = {}
    sizes_of: dict[str, float] = {}
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    is_equal, with_element_ty = core.dtype.__eq__, core.block_type.with_element_ty
    block_to_ir, checked = core.block_type.to_ir, interpreter.TensorHandle.__post_init__
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}
    init_tensor, init_block, np_dtype = core.tensor.__init__, core.block_type.__init__, interpreter._get_np_dtype
    semantic, unwrap_constexpr = type(interpreter.interpreter_semantic), core._unwrap_if_constexpr
    broadcast_values = semantic.broadcast_impl_value
    meetings: dict[tuple[str, str], tuple[Any, Any]] = {}

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
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in meetings:
            left, right = broadcast_values(self, lhs, rhs)
            meetings[key] = left.type, right.type
            return left, right
        return widen(lhs, meetings[key][0]), widen(rhs, meetings[key][1])

    def widen(value: Any, type: Any) -> Any:
        if value.type.name == type.name:
            return value
        data = np.empty(type.shape, value.handle.data.dtype)
        data[...] = value.handle.data
        return core.tensor(interpreter.TensorHandle(data, value.handle.dtype.scalar), type)

    def to_ir(self: Any, builder: Any) -> Any:
        if type(builder) is not interpreter.InterpreterBuilder:
            return block_to_ir(self, builder)
        if self.name not in irs:
            irs[self.name] = block_to_ir(self, builder)
        return irs[self.name]

    def with_elements(self: Any, element_ty: Any) -> Any:
        key = element_ty.name, self.shape
        if key not in others:
            others[key] = with_element_ty(self, element_ty)
        return others[key]

    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else is_equal(self, other)

    def check_size(self: Any) -> None:
        """Numbers of the type are as large as the array's."""
        name = self.dtype.name
        if self.data.itemsize > sizes_of.get(name, 0):
            checked(self)
            sizes_of[name] = float("inf") if isinstance(self.dtype, core.pointer_type) else self.data.itemsize

    tensor.quick = True  # type: ignore[attr-defined]
    core.dtype.__eq__, core.dtype.is_int = equal, lambda self: self.name in integers
    core.block_type.with_element_ty, core.block_type.to_ir = with_elements, to_ir
    interpreter.TensorHandle.__post_init__ = check_size
    core.tensor.__init__, core.block_type.__init__ = tensor, block_type
    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap, get_np_dtype
    semantic.broadcast_impl_value = broadcast


def _keep_operands(core: Any, interpreter: Any) -> None:
    """Two types are looked at once, for whether an operation takes them as they are; and a Python number becomes a
    block once for each type and shape that it meets."""
    semantic = type(interpreter.interpreter_semantic)
    operands_of = semantic.binary_op_type_checking_impl
    kept: set[tuple[Any, ...]] = set()
    blocks: dict[tuple[Any, ...], Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *how: bool, **named: bool) -> tuple[Any, Any]:
        if named or type(lhs) is not core.tensor:
            return operands_of(self, lhs, rhs, *how, **named)
        if type(rhs) is core.tensor:
            types = lhs.dtype.name, rhs.dtype.name, how
            if types in kept:
                return self.broadcast_impl_value(lhs, rhs)
            left, right = operands_of(self, lhs, rhs, *how)
            if left.dtype == lhs.dtype and right.dtype == rhs.dtype:
                kept.add(types)
            return left, right
        if type(rhs) not in (int, float, bool) or rhs != rhs:
            return operands_of(self, lhs, rhs, *how)
        key = type(rhs), rhs, lhs.type.name, how
        if key not in blocks:
            left, right = operands_of(self, lhs, rhs, *how)
            if left is not lhs:
                return left, right
            if len(blocks) > 5000:
                blocks.clear()
            right.handle.data.flags.writeable = False
            blocks[key] = right
        return lhs, blocks[key]

    semantic.binary_op_type_checking_impl = operands


def _convert_at_once(core: Any, interpreter: Any) -> None:
    """Numbers of 8 and 16 bits are converted by a table, float32 to bfloat16 by a shift, and products are of one type,
    for which there is a library."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast_plainly, cast_floats, create_dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot
    tables: dict[tuple[Any, ...], Any] = {}

    def looked_up(convert: Any, self: Any, source: Any, target: Any, *rounding: Any) -> Any:
        bits = f"uint{source.dtype.scalar.primitive_bitwidth}"
        key = convert, source.dtype.scalar.name, target.scalar.name, rounding
        if key not in tables:
            every = np.arange(np.iinfo(bits).max + 1, dtype=bits).view(source.data.dtype)
            tables[key] = convert(self, handle(every, source.dtype.scalar), target, *rounding).data
        return handle(tables[key][np.ascontiguousarray(source.data).view(bits)], target.scalar)

    def cast(self: Any, source: Any, target: Any) -> Any:
        names = source.dtype.scalar.name, target.scalar.name
        if names == ("bf16", "fp32"):
            return looked_up(cast_plainly, self, source, target)
        if names == ("fp32", "bf16"):
            bits = np.ascontiguousarray(source.data).view(np.uint32)
            size = bits & 0x7FFFFFFF
            if not ((size < 0x00800000) & (size > 0)).any():  # no number without a leading one
                return handle((bits >> 16).astype(np.uint16), target.scalar)
        return cast_plainly(self, source, target)

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar.primitive_bitwidth <= 16:
            return looked_up(cast_floats, self, source, target, rounding)
        return cast_floats(self, source, target, rounding)

    def as_float32(self: Any, value: Any) -> Any:
        if value.dtype.is_fp8():  # what is multiplied there, too
            value = convert(self, value, core.float16, None)
        return handle(value.data.astype(np.float32), core.float32) if value.dtype.is_fp16() else value

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if d.data.dtype == np.float32:
            a, b = as_float32(self, a), as_float32(self, b)
        return create_dot(self, a, b, d, *how)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, convert, dot


def _check_bounds(interpreter: Any) -> None:
    """Raise where a kernel reads or writes outside of the tensors that it was given: as wide as they are seen, so rows
    of a larger matrix without those around them. A kernel that makes pointers of numbers may then access anything."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    execute, make_pointer = executor.__call__, builder.create_int_to_ptr
    spans: list[tuple[int, int]] = []  # where the tensors begin and end, in order
    begins: list[int] = []
    ends: list[int] = []  # of all spans up to each

    def add_span(begin: int, end: int) -> None:
        spans.append((begin, end))
        spans.sort()
        begins[:] = [begin for begin, _ in spans]
        ends[:] = accumulate((end for _, end in spans), max)

    def add_spans(args: Iterable[Any]) -> None:
        for arg in args:
            arg = getattr(arg, "base", arg)  # of a descriptor
            if isinstance(arg, tuple):
                add_spans(arg)
            elif hasattr(arg, "data_ptr") and arg.numel():
                last = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
                add_span(arg.data_ptr(), arg.data_ptr() + (last + 1) * arg.element_size())

    def execute_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        spans.clear()
        add_spans((*args, *kwargs.values()))
        return execute(self, *args, **kwargs)

    def make_any_pointer(self: Any, *args: Any) -> Any:
        add_span(0, 1 << 64)
        return make_pointer(self, *args)

    def is_outside(first: int, last: int, size: int) -> bool:
        at = bisect_right(begins, first) - 1
        return at < 0 or last + size > ends[at]

    def check(pointers: Any, mask: Any) -> None:
        places, size = pointers.data, pointers.get_element_ty().primitive_bitwidth // 8
        if not is_outside(int(places.min()), int(places.max()), size):
            return
        for place in places[np.broadcast_to(np.asarray(mask.data, bool), places.shape)].tolist():
            if is_outside(place, place, size):
                raise IndexError(f"{place:#x} is in none of {[(hex(begin), hex(end)) for begin, end in spans]}")

    def checked(access: Any, place: int, place_of_mask: int) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(args[place], args[place_of_mask])
            return access(self, *args, **kwargs)

        return call

    builder.create_masked_load = checked(builder.create_masked_load, 0, 1)
    builder.create_masked_store = checked(builder.create_masked_store, 0, 2)
    builder.create_atomic_rmw = checked(builder.create_atomic_rmw, 1, 3)
    builder.create_int_to_ptr, executor.__call__ = make_any_pointer, execute_checked


def add_in_order(monkeypatch: Any) -> None:
    """Let products add up column by column, as a matrix instruction has one order whatever the tile: numpy's library
    chooses one by the shapes."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        rows, columns, out = a.data.astype(np.float32), b.data.astype(np.float32), d.data.copy()
        for i in range(rows.shape[1]):
            out += rows[:, i : i + 1] * columns[i : i + 1]
        return interpreter.TensorHandle(out, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
