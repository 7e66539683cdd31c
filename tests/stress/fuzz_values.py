"""Values that nobody should pass, and some that are just unusual."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import math
import random
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict


class HostileError(Exception):
    """Raised by the hostile objects themselves: a caller who passes one may get it back."""


class HostileKeyError(HostileError, KeyError):
    """What lookups expect."""


def _refuse(*args: object, **named: object) -> Any:
    raise HostileError("not with me")


class Untouchable:
    """Every question about it fails."""

    __slots__ = ()
    __bool__ = __len__ = __iter__ = __index__ = __int__ = __float__ = __getitem__ = __contains__ = __call__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __repr__ = __format__ = _refuse
    __hash__ = object.__hash__


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


class EndlessList(Sequence[int]):
    """Says that it is short, and never ends."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return 5

    def __iter__(self) -> Iterator[int]:
        for _ in range(10**6):  # as good as never, but a test ends
            yield 5
        raise HostileError("read for ever")


class LyingList(Sequence[int]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


class LyingDict(Mapping[str, Any]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        yield "role"
        yield "content"

    def __getitem__(self, key: str) -> Any:
        raise HostileKeyError(key)


class GrumpyDict(dict[str, Any]):
    def items(self) -> Any:
        raise HostileError("no items")

    def get(self, *args: Any) -> Any:
        raise HostileError("nothing to get")


class OddText(str):
    def encode(self, *args: Any, **named: Any) -> bytes:
        raise HostileError("not in bytes")

    def __len__(self) -> int:
        return 10**9


class OddNumber(int):
    def __index__(self) -> int:
        raise HostileError("no index")

    def __lt__(self, other: object) -> bool:
        raise HostileError("no order")

    __le__ = __gt__ = __ge__ = __lt__


class Indexed:
    def __index__(self) -> int:
        return 2**80


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Row(TypedDict):
    name: str


class Node(TypedDict):
    children: list[Node]


def recursive_list() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


def recursive_dict() -> dict[str, Any]:
    values: dict[str, Any] = {"type": "object"}
    values["properties"] = values
    return values


def deep(levels: int, of: Callable[[Any], Any]) -> Any:
    value: Any = of(None)
    for _ in range(levels):
        value = of(value)
    return value


def some_function(a: int, b: str = "x") -> str:
    """Adds things.

    Args:
        a: one.
    """
    return b * a


def strange_function(a: Untouchable, /, *args: int, b: Nowhere = None, **named: Any) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


async def async_function(where: str) -> str:
    return where


NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 7, 16, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63) - 1, 2**64, 10**400, -(10**400), 10**5000),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, True, False, 1j),
    *(decimal.Decimal("0.5"), decimal.Decimal("NaN"), fractions.Fraction(1, 3), Level.LOW, OddNumber(3), Indexed()),
]
TEXTS: list[Any] = [
    *("", " ", "a", "Hello", "\x00", "\ud800", "a\udfffb", "\u202e", "\U0010ffff", "é" * 300, "x" * 100_000, "null"),
    *("<|im_end|>", "{{ 1/0 }}", "{% for %}", "%s%n", "../../etc/passwd", "req-1", "auto", "required", OddText("odd")),
    *(b"bytes", bytearray(b"abc"), memoryview(b"abc"), b"\xff\xfe"),
]
LISTS: list[Any] = [
    *([None], [[]], [1, 2], [-1], [2**70], [10**400], ["a"], ["a", 1], [1, "a"], [1.5], [math.nan], [True], [{}]),
    *([{"a": 1}], [5, None], (1, 2, 3), {1, 2}, frozenset({"a"}), range(3), range(10**12), array.array("i", [1, 2])),
    *(array.array("d", [1.5]), [b"a"], ["\ud800"], [""], ["x"] * 2000, [5] * 2000, {"a": 1}, {1: 2}, {None: None}),
    *({"role": "user"}, {(1, 2): 3}, {1: math.nan}, {"1": "2"}, {"\ud800": 1}, [Untouchable()], [Indexed()]),
    *([OddNumber(2)], collections.deque([1]), collections.OrderedDict(a=1), types.MappingProxyType({"a": 1})),
    *(collections.UserList([1, 2]), recursive_list(), recursive_dict()),
    *(deep(levels, lambda v: [v]) for levels in (50, 5000)),
    *(deep(levels, lambda v: {"items": v}) for levels in (50, 5000)),
]
MADE_ANEW: list[Callable[[], Any]] = [
    *(list, tuple, set, dict, EndlessList, LyingList, LyingDict, GrumpyDict),
    *(lambda: iter([1, 2]), lambda: (x for x in [1, 2]), lambda: map(str, [1]), lambda: zip([1], [2])),
]
OBJECTS: list[Any] = [
    *(None, ..., NotImplemented, object(), object, type, int, str, print, len, some_function, strange_function),
    *(Untouchable(), Unhashable(), async_function, random, Colour.RED, Colour, Row, Node, uuid.UUID(int=5)),
    *(datetime.timedelta(seconds=1), HostileError("x"), HostileError, list[int], dict[str, int], int | str),
    *(Literal["a", "b"], Any, Callable[[int], str], slice(1, 2), staticmethod(print), property()),
    *(types.SimpleNamespace(a=1), (lambda: 0), (lambda *a, **k: 0)),
]


def shuffled_text(rng: random.Random) -> str:
    """Any characters, surrogates too."""
    ranges = ((32, 127), (0, 32), (0x80, 0x800), (0xD800, 0xE000), (0x10000, 0x110000))
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40)))


def anything(rng: random.Random) -> Any:
    """A new one each time, as far as it could be changed."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice(LISTS) if rng.random() < 0.75 else rng.choice(MADE_ANEW)()
    if kind == 3:
        return rng.choice(OBJECTS)
    if kind == 4:
        return rng.choice([rng.randrange(-100, 60_000), rng.uniform(-3, 3), shuffled_text(rng), rng.random() < 0.5])
    return nested(rng, 3)


def nested(rng: random.Random, levels: int) -> Any:
    """Lists and dicts of such values."""
    if levels == 0:
        return anything(rng) if rng.random() < 0.3 else rng.choice(["a", 1, None, "content", 2.5])
    if rng.random() < 0.5:
        return [nested(rng, levels - 1) for _ in range(rng.randrange(4))]
    keys = ["role", "content", "type", "name", "function", "parameters", "arguments", "tool_calls", "id", "text", "a"]
    return {rng.choice(keys): nested(rng, levels - 1) for _ in range(rng.randrange(4))}
