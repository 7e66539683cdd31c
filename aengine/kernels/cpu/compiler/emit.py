"""Writes functions in LLVM's intermediate representation, with Python's operators on vectors.

    module = Module(target)
    with module.function("scale", n=I64, x=POINTER) as f:
        with f.loop(0, f.n, target.lanes) as i:
            place = f.x + i * 4
            f.store(f.load(F32 * target.lanes, place) * 2.0, place)

What Python computes while a function is written is unrolled: a Python loop over 8 rows writes 8 copies. Integers are
signed. Nothing is reassociated or fused: a sum has the order in which it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from llvmlite import ir


class Type:
    """A number's type; ``type * n``: a vector of n."""

    def __init__(self, llvm: ir.Type, size: int) -> None:
        self.llvm, self.size = llvm, size

    def __mul__(self, lanes: int) -> Type:
        return Type(ir.VectorType(self.llvm, lanes), self.size * lanes)


I8, I16, I32, I64 = (Type(ir.IntType(bits), bits // 8) for bits in (8, 16, 32, 64))
F16, F32 = Type(ir.HalfType(), 2), Type(ir.FloatType(), 4)
BF16 = I16
"""The bits of a bfloat16: `Function.wide` makes a float32 of them."""
POINTER = Type(ir.PointerType(), 8)


def _is_float(type_: ir.Type) -> bool:
    return isinstance(_scalar(type_), ir.FloatType | ir.HalfType)


def _scalar(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def _lanes(type_: ir.Type) -> int:
    return type_.count if isinstance(type_, ir.VectorType) else 0


def _name(type_: ir.Type) -> str:
    """A type in the names of LLVM's functions."""
    scalar = {"half": "f16", "float": "f32"}.get(str(_scalar(type_)), str(_scalar(type_)))
    return f"v{_lanes(type_)}{scalar}" if _lanes(type_) else scalar


def _operator(of_ints: str, of_floats: str = "") -> Callable[[Value, Value | float], Value]:
    """Return the method of an operator, by the names of LLVM's instructions."""
    return lambda self, other: self._with(other, of_ints, of_floats or of_ints)


class Value:
    """A number, vector or address that a function computes."""

    __slots__ = ("f", "llvm")

    def __init__(self, f: _Casts, llvm: ir.Value) -> None:
        self.f, self.llvm = f, llvm

    def _with(self, other: Value | float, of_ints: str, of_floats: str) -> Value:
        other = self.f.like(self, other)
        op = of_floats if _is_float(self.llvm.type) else of_ints
        return Value(self.f, getattr(self.f.builder, op)(self.llvm, other.llvm))

    def __add__(self, other: Value | float) -> Value:
        if isinstance(self.llvm.type, ir.PointerType):
            offset = self.f.number(I64, other) if isinstance(other, int) else other
            assert isinstance(offset, Value)
            return Value(self.f, self.f.builder.gep(self.llvm, [offset.llvm], source_etype=I8.llvm))
        return self._with(other, "add", "fadd")

    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator("sdiv", "fdiv")
    __floordiv__ = __truediv__  # integers are rounded to zero by both
    __mod__ = _operator("srem", "frem")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")  # fills with zeros

    def _compare(self, op: str, other: Value | float) -> Value:
        other = self.f.like(self, other)
        builder = self.f.builder
        compare = builder.fcmp_ordered if _is_float(self.llvm.type) else builder.icmp_signed
        return Value(self.f, compare(op, self.llvm, other.llvm))

    __lt__ = partialmethod(_compare, "<")
    __le__ = partialmethod(_compare, "<=")
    __gt__ = partialmethod(_compare, ">")
    __ge__ = partialmethod(_compare, ">=")
    equals = partialmethod(_compare, "==")
    differs = partialmethod(_compare, "!=")

    def __getitem__(self, lane: int) -> Value:
        return Value(self.f, self.f.builder.extract_element(self.llvm, I32.llvm(lane)))


class Variable:
    """A number or vector that changes: a register, once compiled."""

    def __init__(self, f: Function, type_: Type, value: Value | float) -> None:
        self._f = f
        with f.builder.goto_entry_block():
            self._place = f.builder.alloca(type_.llvm)
        self._type = type_
        self.set(value)

    def get(self) -> Value:
        return Value(self._f, self._f.builder.load(self._place, typ=self._type.llvm))

    def set(self, value: Value | float) -> None:
        number = value if isinstance(value, Value) else self._f.number(self._type, value)
        self._f.builder.store(number.llvm, self._place)

    def add(self, value: Value) -> None:
        self.set(self.get() + value)


class _Casts:
    """Constants, conversions, and calls of other functions."""

    builder: ir.IRBuilder
    module: Module

    def number(self, type_: Type, value: float) -> Value:
        """A constant; of a vector, in all lanes."""
        scalar = _scalar(type_.llvm)
        number = float(value) if _is_float(scalar) else int(value)
        lanes = _lanes(type_.llvm)
        return Value(self, ir.Constant(type_.llvm, [number] * lanes if lanes else number))

    def numbers(self, type_: Type, values: Sequence[float]) -> Value:
        """A constant vector."""
        return Value(self, ir.Constant(type_.llvm, list(values)))

    def lane(self, value: Value, index: Value) -> Value:
        """The lane of a vector at an index that is computed."""
        return Value(self, self.builder.extract_element(value.llvm, index.llvm))

    def null(self) -> Value:
        """The address that is none."""
        return Value(self, ir.Constant(POINTER.llvm, None))

    def like(self, value: Value, other: Value | float) -> Value:
        """``other`` as an operand beside ``value``: Python's numbers become constants, numbers vectors."""
        lanes = _lanes(value.llvm.type)
        if not isinstance(other, Value):
            return self.number(Type(value.llvm.type, 0), other)
        if lanes and not _lanes(other.llvm.type):
            return self.splat(other, lanes)
        return other

    def splat(self, value: Value, lanes: int) -> Value:
        """A vector with the same number in all lanes."""
        undefined = ir.Constant(ir.VectorType(value.llvm.type, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, value.llvm, I32.llvm(0))
        return self.shuffle(Value(self, one), Value(self, undefined), [0] * lanes)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """A vector of lanes of two: those of ``b`` are counted on from those of ``a``."""
        mask = ir.Constant(ir.VectorType(I32.llvm, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(a.llvm, b.llvm, mask))

    def cast(self, value: Value, type_: Type) -> Value:
        """The bits of a number or vector as those of another type of as many bytes."""
        return Value(self, self.builder.bitcast(value.llvm, type_.llvm))

    def float32(self, value: Value) -> Value:
        """float32 of integers or float16."""
        lanes = _lanes(value.llvm.type)
        type_ = (F32 * lanes if lanes else F32).llvm
        op = self.builder.fpext if _is_float(value.llvm.type) else self.builder.sitofp
        return Value(self, op(value.llvm, type_))

    def wide(self, value: Value) -> Value:
        """float32 of bfloat16's bits."""
        lanes = _lanes(value.llvm.type)
        bits = self.widened(value, I32 * lanes if lanes else I32, signed=False) << 16
        return self.cast(bits, F32 * lanes if lanes else F32)

    def to_int(self, value: Value, type_: Type) -> Value:
        return Value(self, self.builder.fptosi(value.llvm, type_.llvm))

    def to_half(self, value: Value, type_: Type) -> Value:
        return Value(self, self.builder.fptrunc(value.llvm, type_.llvm))

    def widened(self, value: Value, type_: Type, *, signed: bool = True) -> Value:
        op = self.builder.sext if signed else self.builder.zext
        return Value(self, op(value.llvm, type_.llvm))

    def narrowed(self, value: Value, type_: Type) -> Value:
        return Value(self, self.builder.trunc(value.llvm, type_.llvm))

    def intrinsic(self, name: str, *values: Value) -> Value:
        """One of LLVM's that is named by the type of its first operand, which is that of all and of the result."""
        type_ = values[0].llvm.type
        return self.call(f"{name}.{_name(type_)}", Type(type_, 0), *values)

    def call(self, name: str, result: Type | None, *values: Value | ir.Value) -> Value:
        """Call another function, which is declared here if it is not yet."""
        operands = [value.llvm if isinstance(value, Value) else value for value in values]
        kind = ir.FunctionType(result.llvm if result else ir.VoidType(), [operand.type for operand in operands])
        return Value(self, self.builder.call(self.module.declared(name, kind), operands))

    def call_at(self, address: Value, *values: Value) -> None:
        """Call the function at an address (int64), which returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [value.llvm.type for value in values])
        own = self.builder.inttoptr(address.llvm, kind.as_pointer())
        self.builder.call(own, [value.llvm for value in values])


class _Maths(_Casts):
    """Functions of numbers and vectors."""

    def choose(self, condition: Value, a: Value, b: Value | float) -> Value:
        return Value(self, self.builder.select(condition.llvm, a.llvm, self.like(a, b).llvm))

    def smaller(self, a: Value, b: Value | float) -> Value:
        """The smaller of two; ``a`` if one is NaN: a bound leaves NaN what it is."""
        return self.choose(a > b, self.like(a, b), a)

    def larger(self, a: Value, b: Value | float) -> Value:
        """See `smaller`."""
        return self.choose(a < b, self.like(a, b), a)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        if not _lanes(b.llvm.type) and _lanes(a.llvm.type):
            b = self.like(a, b)
        return self.intrinsic("llvm.fma", a, b, c)

    def absolute(self, value: Value) -> Value:
        return self.intrinsic("llvm.fabs", value)

    def magnitude(self, value: Value) -> Value:
        """The absolute value of integers."""
        return self.choose(value < 0, self.like(value, 0) - value, value)

    def sqrt(self, value: Value) -> Value:
        return self.intrinsic("llvm.sqrt", value)

    def nearest(self, value: Value) -> Value:
        """The nearest integer, ties to even."""
        return self.intrinsic("llvm.nearbyint", value)

    def sum_lanes(self, value: Value) -> Value:
        """The sum of a vector's lanes, by halves."""
        return self._by_halves(value, lambda a, b: a + b)

    def max_lanes(self, value: Value) -> Value:
        return self._by_halves(value, self.larger)

    def any_lane(self, mask: Value) -> Value:
        """Whether a lane of a mask is true."""
        bits = ir.IntType(_lanes(mask.llvm.type))
        return Value(self, self.builder.bitcast(mask.llvm, bits)).differs(0)

    def _by_halves(self, value: Value, join: Any) -> Value:
        lanes = _lanes(value.llvm.type)
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(value, value, range(lanes))
            value = join(low, self.shuffle(value, value, range(lanes, 2 * lanes)))
        return value[0]

    def exp(self, x: Value) -> Value:
        """e^x of float32, off by at most 2 units in the last place; 0 below -87, infinite beyond 88.7.

        By 2^n * e^r with |r| <= ln(2) / 2, and Cephes' polynomial of degree 6 for e^r.
        """
        x = self.smaller(self.larger(x, -87.3), 88.8)
        n = self.nearest(x * 1.44269504088896341)
        r = self.fma(n, self.like(n, -0.693359375), x)
        r = self.fma(n, self.like(n, 2.12194440e-4), r)
        p = self.like(r, 1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, self.like(r, coefficient))
        p = self.fma(p, r * r, r) + 1.0
        lanes = _lanes(x.llvm.type)
        ints, floats = (I32 * lanes, F32 * lanes) if lanes else (I32, F32)
        half = self.to_int(n, ints)
        first = half // 2 if not lanes else self.signed_shift(half, 1)
        second = half - first
        power = [self.cast((part + 127) << 23, floats) for part in (first, second)]
        return p * power[0] * power[1]

    def signed_shift(self, value: Value, bits: int) -> Value:
        """Integers shifted to the right; bits that come are the sign."""
        return Value(self, self.builder.ashr(value.llvm, self.like(value, bits).llvm))

    def tanh(self, x: Value) -> Value:
        """tanh of float32, off by some units in the last place: Cephes' polynomial up to 0.625, by e^2x beyond."""
        square = x * x
        p = self.like(x, -5.70498872745e-3)
        for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
            p = self.fma(p, square, self.like(x, coefficient))
        small = self.fma(p * square, x, x)
        size = self.absolute(x)
        large = self.like(x, 1.0) - self.like(x, 2.0) / (self.exp(self.smaller(size, 10.0) * 2.0) + 1.0)
        large = self.intrinsic("llvm.copysign", large, x)
        return self.choose(size < 0.625, small, large)


class _Memory(_Maths):
    """Loads, stores and atomic operations."""

    def load(self, type_: Type, place: Value, align: int = 1) -> Value:
        return Value(self, self.builder.load(place.llvm, align=align, typ=type_.llvm))

    def store(self, value: Value, place: Value, align: int = 1) -> None:
        self.builder.store(value.llvm, place.llvm, align=align)

    def word(self, place: Value, index: int) -> Value:
        """The int64 at an index of an array."""
        return self.load(I64, place + 8 * index)

    def address(self, place: Value, index: int) -> Value:
        """The address at an index of an array."""
        return self.load(POINTER, place + 8 * index)

    def lane_mask(self, count: Value, lanes: int) -> Value:
        """A mask of the first ``count`` (int64) lanes."""
        return self.numbers(I32 * lanes, range(lanes)) < self.splat(self.narrowed(count, I32), lanes)

    def load_lanes(self, type_: Type, place: Value, mask: Value) -> Value:
        """A vector whose lanes outside of the mask are 0, and are not read."""
        name = f"llvm.masked.load.{_name(type_.llvm)}.p0"
        return self.call(name, type_, place, I32.llvm(1), mask, self.number(type_, 0))

    def store_lanes(self, value: Value, place: Value, mask: Value) -> None:
        name = f"llvm.masked.store.{_name(value.llvm.type)}.p0"
        self.call(name, None, value, place, I32.llvm(1), mask)

    def prefetch(self, place: Value, level: int = 1) -> None:
        """Fetch the cache line of an address, to be read, into the cache of a level (1 to 3). The second has room for
        twice as many that are on their way."""
        self.call("llvm.prefetch.p0", None, place, I32.llvm(0), I32.llvm(4 - level), I32.llvm(1))

    def fetch_add(self, place: Value, value: Value | int, type_: Type = I64) -> Value:
        """Add to a number in memory; returns what it was."""
        number = self.number(type_, value) if isinstance(value, int) else value
        return Value(self, self.builder.atomic_rmw("add", place.llvm, number.llvm, "acq_rel"))

    def exchange(self, place: Value, expected: Value, value: Value) -> Value:
        """Set an int64 in memory if it is what is expected; returns whether it was."""
        pair = self.builder.cmpxchg(place.llvm, expected.llvm, value.llvm, "acq_rel", "acquire")
        return Value(self, self.builder.extract_value(pair, 1))

    def atomic_load(self, place: Value, type_: Type = I64) -> Value:
        loaded = self.builder.load_atomic(place.llvm, "acquire", type_.size, typ=type_.llvm)
        return Value(self, loaded)

    def atomic_store(self, value: Value, place: Value) -> None:
        self.builder.atomic_rmw("xchg", place.llvm, value.llvm, "acq_rel")


class Function(_Memory):
    """A function that is being written. Its arguments are attributes."""

    def __init__(self, module: Module, name: str, arguments: dict[str, Type]) -> None:
        self.module = module
        kind = ir.FunctionType(ir.VoidType(), [a.llvm for a in arguments.values()])
        self._function = ir.Function(module.llvm, kind, name)
        self._arguments = {}
        for own, (argument, type_) in zip(self._function.args, arguments.items(), strict=True):
            own.name = argument
            self._arguments[argument] = type_
            setattr(self, argument, Value(self, own))
        self.builder = ir.IRBuilder(self._function.append_basic_block("entry"))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the function has no argument {name!r}")

    def variable(self, type_: Type, value: Value | float) -> Variable:
        return Variable(self, type_, value)

    def scratch(self, size: int) -> Value:
        """The address of ``size`` bytes of the stack, at a cache line, which are not cleared."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(I8.llvm, size))
        place.align, place.type = 64, POINTER.llvm
        return Value(self, place)

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Run the body for int64 from ``start`` below ``stop``."""
        begin, end = (self.number(I64, x) if isinstance(x, int) else x for x in (start, stop))
        before = self.builder.block
        head, body, after = (self._function.append_basic_block(name) for name in ("head", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        i = self.builder.phi(I64.llvm)
        i.add_incoming(begin.llvm, before)
        self.builder.cbranch(self.builder.icmp_signed("<", i, end.llvm), body, after)
        self.builder.position_at_end(body)
        yield Value(self, i)
        i.add_incoming(self.builder.add(i, I64.llvm(step)), self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.llvm):
            yield

    @contextmanager
    def repeat(self) -> Iterator[ir.Block]:
        """Run the body again and again; `leave` ends it."""
        body, after = (self._function.append_basic_block(name) for name in ("again", "after"))
        self.builder.branch(body)
        self.builder.position_at_end(body)
        yield after
        self.builder.branch(body)
        self.builder.position_at_end(after)

    def leave(self, after: ir.Block, condition: Value) -> None:
        """Go to the end of a `repeat` if the condition holds."""
        go_on = self._function.append_basic_block("go_on")
        self.builder.cbranch(condition.llvm, after, go_on)
        self.builder.position_at_end(go_on)

    def finish(self) -> None:
        """Return from the function."""
        self.builder.ret_void()


class Module:
    """Functions that are compiled together."""

    def __init__(self, name: str) -> None:
        self.llvm = ir.Module(name)

    @contextmanager
    def function(self, name: str, **arguments: Type) -> Iterator[Function]:
        """Write a function that returns nothing."""
        f = Function(self, name, arguments)
        yield f
        f.finish()

    def shared(self, name: str, write: Callable[[Function], None], **arguments: Type) -> None:
        """Write a function that others of this module call, unless it is there. It is not inlined."""
        if name not in self.llvm.globals:
            with self.function(name, **arguments) as f:
                self.llvm.globals[name].linkage = "internal"
                self.llvm.globals[name].attributes.add("noinline")
                write(f)

    def declared(self, name: str, kind: ir.FunctionType) -> ir.Function:
        if name in self.llvm.globals:
            return self.llvm.globals[name]
        return ir.Function(self.llvm, kind, name)
