"""Attention of a step's tokens over the paged KV cache: decodes and prompts alike; and to both sides, within the texts
of an encoder. A chunk is some tokens, a KV head, and, where a step has few tokens, a part of their keys.

As kernels/paged_attention.py, which is the reference, over float32 rows. Keys are taken by blocks of 16, counted from
position 0, with a softmax that goes on from block to block; each segment of 256 keys has one of its own, and these are
joined in order. So a token's sums have an order of their own, whatever is beside it in the batch and however many
chunks compute it. Consecutive tokens of a request are a tile: the chunk of its first token computes all of them, so
that keys and values are read once for the tile. Of several parts, the one that ends last joins the segments of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .compiler.dtypes import DTYPES
from .compiler.emit import F32, I32, I64, Function, Value, Variable
from .compiler.target import Target, WriteKernel

"""Bytes of an element of the cache."""
KEYS = 16
"""Keys of a block, which are the lanes of a vector."""
SEGMENT = 256
"""Keys of a segment, which has a softmax of its own."""
ROWS_OF_CHUNK = 4
MOST_SPLIT_ROWS = 16
"""Rows of a step, up to which the segments of a token's keys are divided among several chunks."""
COUNTER_BYTES = 64
_MOST_ROWS = 64
"""Query heads of a tile, those of all of its tokens together."""
_LOG2_E = 1.4426950408889634
_LOWEST = -1e30
"""Below all scores, where there is none yet."""


class _Attend:
    """The kernel for heads of a size, of which a KV head has so many. ``both_sides``: a token sees those behind it,
    too."""

    def __init__(
        self, f: Function, target: Target, head_dim: int, group: int, dtype: str, *, both_sides: bool = False
    ) -> None:
        self.f, self.head_dim, self.group, self.dtype, self.both_sides = f, head_dim, group, DTYPES[dtype], both_sides
        self.size = self.dtype.stored.size
        self.has_scales = dtype == "float8_e4m3fn"
        self.tokens = _power_of_2(min(KEYS, _MOST_ROWS // group))  # most of a tile
        wide = "+avx512f" in target.features
        self.most_sums = 24 if wide else 6  # vectors of KEYS in registers
        self.abreast = _power_of_2(max(1, self.most_sums // 2 // group))  # tokens whose products are computed together
        rows, size = self.tokens * group, 4 * head_dim
        self.queries = f.scratch(rows * size)  # [rows, head_dim]
        self.keys = f.scratch(KEYS * size)  # [head_dim, KEYS]
        self.scores = f.scratch(rows * 4 * KEYS)  # [rows, KEYS]
        # A state of a softmax is, for each row, a sum of values [head_dim], of weights [KEYS], and the largest score.
        self.weight_sums, self.largest = size, size + 4 * KEYS
        self.state_bytes = state_bytes(head_dim)
        self.total, self.own_state = f.scratch(rows * self.state_bytes), f.scratch(rows * self.state_bytes)
        self.places, self.next_places = f.scratch(KEYS * 8), f.scratch(KEYS * 8)  # addresses of keys

    def write(self) -> None:
        """words: as `attend` in ops.py lays them down."""
        f = self.f
        num_kv_heads, self.parts = f.word(f.words, 13), f.word(f.words, 18)
        chunks = num_kv_heads * self.parts
        begin, chunk = f.chunk // chunks * ROWS_OF_CHUNK, f.chunk % chunks
        self.kv_head, self.part = chunk // self.parts, chunk % self.parts
        self.is_split = (f.rows <= MOST_SPLIT_ROWS) & (self.parts > 1)
        positions, table_rows = (f.address(f.words, i) for i in (3, 4))
        end = f.smaller(begin + ROWS_OF_CHUNK, f.rows)
        with f.when(self.is_split | self.part.equals(0)), f.loop(begin, end) as row:
            position, own = positions + row * 8, table_rows + row * 8
            first, table_row = f.word(position, 0), f.word(own, 0)
            before = f.choose(row > 0, f.number(I64, -8), 0)
            follows = (f.word(position + before, 0) + 1).equals(first) & f.word(own + before, 0).equals(table_row)
            with f.when((follows ^ 1) | (first % self.tokens).equals(0)):
                count = f.variable(I64, 1)
                most = f.smaller(f.rows - row, f.like(first, self.tokens) - first % self.tokens)
                with f.repeat() as ended:
                    n = count.get()
                    f.leave(ended, n >= most)
                    f.leave(ended, f.word(own + n * 8, 0).differs(table_row))
                    f.leave(ended, f.word(position + n * 8, 0).differs(first + n))
                    count.add(f.number(I64, 1))
                self._tile(row, first, table_row, count.get())

    def _tile(self, row: Value, first: Value, table_row: Value, count: Value) -> None:
        """``count`` tokens from a row on, which are at positions from ``first`` on."""
        f = self.f
        self.first, self.count = first, count
        self.table = f.address(f.words, 5) + table_row * f.word(f.words, 6)
        self.window = f.word(f.words, 14)
        self.length = f.word(f.address(f.words, 21) + table_row * 8, 0) if self.both_sides else None
        self.last = self._end(count - 1) - 1
        self.lowest = f.larger(first - self.window + 1, 0)  # position that any of the tokens looks at
        self._begin(row)
        begin, end = self.lowest // SEGMENT, self.last // SEGMENT + 1
        segment = f.variable(I64, begin + self.part)  # the part is 0 if nothing is split
        step = f.choose(self.is_split, self.parts, 1)
        with f.when(segment.get() < end):
            self._find_keys(f.larger(segment.get() * SEGMENT, self.lowest // KEYS * KEYS))
        with f.repeat() as all_done:
            own = segment.get()
            f.leave(all_done, own >= end)
            self.state = f.choose(self.is_split, self._kept_state(row, own), self.own_state)
            self._attend_to_segment(own, step)
            with f.when(self.is_split ^ 1):
                self._join(self.state)
            segment.add(step)
        is_last = f.variable(I64, 1)
        with f.when(self.is_split):
            done = f.address(f.words, 19) + (row * f.word(f.words, 13) + self.kv_head) * COUNTER_BYTES
            is_last.set(f.widened((f.fetch_add(done, 1) + 1).equals(self.parts), I64, signed=False))
            with f.when(is_last.get().differs(0)):
                f.store(f.number(I64, 0), done)
                with f.loop(begin, end) as other:
                    self._join(self._kept_state(row, other))
        with f.when(is_last.get().differs(0)):
            self._finish(row)

    def _kept_state(self, row: Value, segment: Value) -> Value:
        """The state of the rows of a tile, from a row on, where all parts see it."""
        f = self.f
        num_kv_heads, segments = f.word(f.words, 13), f.word(f.words, 20)
        first = f.address(f.words, 19) + num_kv_heads * (MOST_SPLIT_ROWS * COUNTER_BYTES)
        place = (self.kv_head * segments + segment) * MOST_SPLIT_ROWS + row
        return first + place * (self.group * self.state_bytes)

    def _attend_to_segment(self, segment: Value, step: Value) -> None:
        """Make the state of a segment; the addresses of its first block's keys are found."""
        f = self.f
        self._clear(self.state)
        begin = f.larger(segment * SEGMENT, self.lowest // KEYS * KEYS)
        end = f.smaller((segment + 1) * SEGMENT, self.last + 1)
        with f.loop(begin, end, KEYS) as block:
            for half in range(0, KEYS * 8, KEYS * 4):
                f.store(f.load(I64 * (KEYS // 2), self.next_places + half), self.places + half)
            after = f.choose(block + KEYS < end, block + KEYS, (segment + step) * SEGMENT)
            with f.when(after <= self.last):
                self._find_keys(after)
            self._turn_keys()
            self._each(self.count, self._multiply)
            self._softmax(block)
            low, high = self._seen(block, self.count - 1)[0], self._seen(block, 0)[1]
            see_all = low.equals(0) & high.equals(KEYS)
            self._each(f.choose(see_all, self.count, 0), partial(self._add_values, block))

    def _clear(self, state: Value) -> None:
        f = self.f
        with f.loop(0, self.count * (self.group * self.state_bytes), self.state_bytes) as at:
            for i in range(0, self.largest, 4 * KEYS):
                f.store(f.number(F32 * KEYS, 0.0), state + at + i)
            f.store(f.number(F32, _LOWEST), state + at + self.largest)

    def _join(self, state: Value) -> None:
        """Add the state of a segment to the total."""
        f, vector = self.f, F32 * KEYS
        with f.loop(0, self.count * (self.group * self.state_bytes), self.state_bytes) as at:
            total, own = self.total + at, state + at
            before, new = (f.load(F32, x + self.largest) for x in (total, own))
            largest = f.larger(before, new)
            old_factor, factor = (_exp2(f, f.splat(x - largest, KEYS)) for x in (before, new))
            f.store(largest, total + self.largest)
            for i in range(0, self.largest, 4 * KEYS):
                shrunk = f.load(vector, total + i) * old_factor
                f.store(f.fma(f.load(vector, own + i), factor, shrunk), total + i)

    def _rows_of(self, row: Value, place: Value, row_size: Value) -> Value:
        """Where a token's heads of this KV head begin."""
        return place + row * row_size + self.kv_head * (self.group * self.head_dim * 4)

    def _begin(self, row: Value) -> None:
        """Queries times the scale, a total of nothing but the sinks. Scores are of base 2."""
        f, size, vector = self.f, self.head_dim * 4, F32 * KEYS
        scale, sinks = f.load(F32, f.words + 8 * 15), f.address(f.words, 17)
        scale = f.choose(f.load(F32, f.words + 8 * 16) > 0.0, scale, scale * _LOG2_E) * self._kv_scale(0)
        self._clear(self.total)
        with f.loop(0, self.count) as token:
            q = self._rows_of(row + token, f.address(f.words, 0), f.word(f.words, 1))
            own = token * (self.group * size)
            with f.loop(0, self.group * size, 4 * KEYS) as at:
                f.store(f.load(vector, q + at) * scale, self.queries + own + at)
            with f.when(f.word(f.words, 17).differs(0)), f.loop(0, self.group) as i:
                sink = f.load(F32, sinks + (self.kv_head * self.group + i) * 4) * _LOG2_E
                total = self.total + (token * self.group + i) * self.state_bytes
                f.store(sink, total + self.largest)
                f.store(f.number(F32, 1.0), total + self.weight_sums)

    def _kv_scale(self, which: int) -> Value | float:
        """The scale of the head's keys (0) or values (1)."""
        f = self.f
        if not self.has_scales:
            return 1.0
        place = f.address(f.words, 21) + (f.word(f.words, 13) * which + self.kv_head) * 4
        return f.load(F32, place)

    def _find_keys(self, block: Value) -> None:
        """Addresses of a block's keys, which are fetched. In place of one that no token looks at, its neighbour's."""
        f = self.f
        size, token_stride = f.word(f.words, 8), f.word(f.words, 10)
        begin = f.larger(block, self.lowest)
        page, offset = f.variable(I64, begin // size), f.variable(I64, begin % size)
        head = f.address(f.words, 7) + self.kv_head * f.word(f.words, 12)

        def start() -> Value:
            number = f.widened(f.load(I32, self.table + page.get() * 4), I64)
            return number * f.word(f.words, 9) + offset.get() * token_stride

        place = f.variable(I64, start())
        with f.loop(0, KEYS) as i:
            f.store(head + place.get(), self.next_places + i * 8)
            position = block + i
            with f.when((position >= self.lowest) & (position < self.last)):
                offset.add(f.number(I64, 1))
                place.add(token_stride)
                with f.when(offset.get().equals(size)):
                    offset.set(0)
                    page.add(f.number(I64, 1))
                    place.set(start())

    def _turn_keys(self) -> None:
        """Keys as [head_dim, KEYS]."""
        f = self.f
        places = [f.address(self.places, i) for i in range(KEYS)]
        values = f.word(f.words, 11)
        with f.loop(0, self.head_dim, KEYS) as i:
            for key in range(KEYS):
                next_key = f.address(self.next_places, key) + i * self.size
                f.prefetch(next_key, 2)
                f.prefetch(next_key + values, 2)
            square = [self.dtype.load(f, place + i * self.size, KEYS) for place in places]
            for j, column in enumerate(transposed(f, square)):
                f.store(column, self.keys + i * (4 * KEYS) + 4 * KEYS * j)

    def _each(self, count: Value, compute: Callable[[Value, int], None]) -> None:
        """Compute with all tokens of the tile: with several abreast, as long as there are so many among the first
        ``count``, then one by one."""
        f = self.f
        whole = count // self.abreast * self.abreast if self.abreast > 1 else f.number(I64, 0)
        if self.abreast > 1:
            with f.loop(0, whole, self.abreast) as token:
                compute(token, self.abreast)
        with f.loop(whole, self.count) as token:
            compute(token, 1)

    def _seen(self, block: Value, token: Value | int) -> tuple[Value, Value]:
        """The first key of a block that a token of the tile sees, and one past the last; if it sees none, these are no
        range."""
        f = self.f
        begin = self.first + token - block - self.window + 1
        return f.smaller(f.larger(begin, 0), KEYS), f.smaller(self._end(token) - block, KEYS)

    def _end(self, token: Value | int) -> Value:
        """One past the last position that a token of the tile sees."""
        own = self.first + token
        return own + 1 if self.length is None else self.f.smaller(own + self.window, self.length)

    def _multiply(self, token: Value, count: int) -> None:
        """Products of tokens' rows and all keys of the block: a sum over each half of a head's elements."""
        f, size, half = self.f, self.head_dim * 4, self.head_dim // 2
        row, num_rows = token * self.group, count * self.group
        for begin, end in _parts(num_rows, max(1, self.most_sums // 2)):
            queries = self.queries + (row + begin) * size
            sums = [[f.variable(F32 * KEYS, 0.0) for _ in range(2)] for _ in range(begin, end)]
            with f.loop(0, half) as i:
                for j in range(2):
                    keys = f.load(F32 * KEYS, self.keys + i * (4 * KEYS) + half * 4 * KEYS * j)
                    for r, own in enumerate(sums):
                        element = f.load(F32, queries + i * 4 + (size * r + half * 4 * j))
                        _fma(f, own[j], keys, element)
            for r, (low, high) in enumerate(sums):
                f.store(low.get() + high.get(), self.scores + (row + (begin + r)) * (4 * KEYS))

    def _softmax(self, block: Value) -> None:
        """Scores become weights, by the largest score so far; when that grows, the sums so far shrink."""
        f, vector = self.f, F32 * KEYS
        softcap = f.load(F32, f.words + 8 * 16)
        lanes = f.numbers(I32 * KEYS, range(KEYS))
        with f.loop(0, self.count) as token:
            begin, end = (f.narrowed(x, I32) for x in self._seen(block, token))
            mask = (lanes >= begin) & (lanes < end)
            with f.loop(token * self.group, (token + 1) * self.group) as r:
                scores, state = self.scores + r * (4 * KEYS), self.state + r * self.state_bytes
                with f.when(softcap > 0.0):
                    capped = f.tanh(f.load(vector, scores) / softcap) * (softcap * _LOG2_E)
                    f.store(capped, scores)
                own = f.choose(mask, f.load(vector, scores), _LOWEST)
                before = f.load(F32, state + self.largest)
                with f.when(f.any_lane(own > before)):
                    largest = f.max_lanes(own)
                    f.store(largest, state + self.largest)
                    factor = _exp2(f, f.splat(before - largest, KEYS))
                    for i in range(0, self.largest, 4 * KEYS):
                        f.store(f.load(vector, state + i) * factor, state + i)
                weights = f.choose(mask, _exp2(f, own - f.load(F32, state + self.largest)), 0.0)
                f.store(weights, scores)
                weight_sums = state + self.weight_sums
                f.store(f.load(vector, weight_sums) + weights, weight_sums)

    def _add_values(self, block: Value, token: Value, count: int) -> None:
        """Add a block's values times the weights to the sums of tokens' rows. Several tokens see all of it; what
        one does not see is left out: it may be no number, and times a weight of 0 would be none."""
        f, vectors = self.f, self.head_dim // KEYS
        values, row, num_rows = f.word(f.words, 11), token * self.group, count * self.group
        keys = (0, KEYS) if count > 1 else self._seen(block, token)
        for low, high in _parts(vectors, 4 if self.most_sums > 12 else 2):
            for begin, end in _parts(num_rows, self.most_sums // (high - low)):
                own = self.state + (row + begin) * self.state_bytes
                places = [
                    [own + (r * self.state_bytes + 4 * KEYS * i) for i in range(low, high)] for r in range(end - begin)
                ]
                sums = [[f.variable(F32 * KEYS, f.load(F32 * KEYS, place)) for place in of_row] for of_row in places]
                weights = self.scores + (row + begin) * (4 * KEYS)
                with f.loop(*keys) as key:
                    place = f.address(self.places + key * 8, 0) + values
                    parts = [self.dtype.load(f, place + KEYS * self.size * i, KEYS) for i in range(low, high)]
                    for r, of_row in enumerate(sums):
                        weight = f.load(F32, weights + key * 4 + 4 * KEYS * r)
                        for part, total in zip(parts, of_row, strict=True):
                            _fma(f, total, part, weight)
                for own_places, of_row in zip(places, sums, strict=True):
                    for at, total in zip(own_places, of_row, strict=True):
                        f.store(total.get(), at)

    def _finish(self, row: Value) -> None:
        f, size = self.f, self.head_dim * 4
        num_heads = f.word(f.words, 13) * self.group
        with f.loop(0, self.count) as token:
            out = self._rows_of(row + token, f.address(f.words, 2), num_heads * size)
            with f.loop(0, self.group) as i:
                total = self.total + (token * self.group + i) * self.state_bytes
                weight_sum = f.sum_lanes(f.load(F32 * KEYS, total + self.weight_sums))
                inverse = f.like(weight_sum, 1.0) / weight_sum * self._kv_scale(1)
                with f.loop(0, size, 4 * KEYS) as at:
                    f.store(f.load(F32 * KEYS, total + at) * inverse, out + i * size + at)


def state_bytes(head_dim: int) -> int:
    """Bytes of a row's state of a softmax, see `_Attend`."""
    return 4 * (head_dim + KEYS + KEYS)


def _power_of_2(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def _exp2(f: Function, x: Value) -> Value:
    """2^x of KEYS float32 up to 0, off by at most 3 units in the last place; below -126 next to nothing.

    By 2^n * 2^r with |r| <= 1/2. The polynomial for 2^r is the one of degree 5 whose largest relative error is least.
    """
    x = f.choose(x < -126.0, f.like(x, -126.0), x)
    n = f.nearest(x)
    r = x - n
    p = f.like(r, 1.326472498e-3)
    for coefficient in (9.671513923e-3, 5.550733581e-2, 2.402224243e-1, 6.931470037e-1, 1.0):
        p = f.fma(p, r, f.like(r, coefficient))
    return f.cast(f.cast(p, I32 * KEYS) + (f.to_int(n, I32 * KEYS) << 23), F32 * KEYS)


def _fma(f: Function, total: Variable, a: Value, b: Value) -> None:
    total.set(f.fma(a, b, total.get()))


def _parts(count: int, most: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the parts of a range, as few as can be and about as large as each other."""
    parts = -(-count // most)
    for i in range(parts):
        yield count * i // parts, count * (i + 1) // parts


def transposed(f: Function, square: Sequence[Value]) -> list[Value]:
    """The columns of a square of 16 vectors: steps that leave quarters of a vector in their place, then quarters."""

    def quarters(a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Take four of each four lanes of ``a`` (0 to 3) and of ``b`` (4 to 7)."""
        return f.shuffle(a, b, [4 * q + lane + (12 if lane > 3 else 0) for q in range(4) for lane in lanes])

    def pairs(vectors: Sequence[Value], step: int, low: Sequence[int], high: Sequence[int]) -> list[Value]:
        """Each vector whose index has no bit ``step``, joined with that which has it."""
        out = list(vectors)
        for i in range(KEYS):
            if not i & step:
                a, b = vectors[i], vectors[i + step]
                out[i], out[i + step] = quarters(a, b, low), quarters(a, b, high)
        return out

    whole = pairs(square, 1, (0, 4, 1, 5), (2, 6, 3, 7))
    whole = pairs(whole, 2, (0, 1, 4, 5), (2, 3, 6, 7))
    # Now vector 4 r + (0, 2, 1, 3)[c] has, in quarter q, rows 4 r to 4 r + 3 of column 4 q + c.
    columns: dict[int, Value] = {}
    for c, at in enumerate((0, 2, 1, 3)):
        rows = [whole[4 * r + at] for r in range(4)]
        halves = []
        for half in (0, 8):
            lanes = [*range(half, half + 8), *range(half + 16, half + 24)]
            halves += [f.shuffle(rows[r], rows[r + 1], lanes) for r in (0, 2)]
        for q in range(4):
            picked = [begin + 4 * (q % 2) + lane for begin in (0, 8, 16, 24) for lane in range(4)]
            columns[4 * q + c] = f.shuffle(halves[q // 2 * 2], halves[q // 2 * 2 + 1], picked)
    return [columns[i] for i in range(KEYS)]


def _attend(f: Function, target: Target, head_dim: str, group: str, dtype: str) -> None:
    _Attend(f, target, int(head_dim), int(group), dtype).write()


def _attend_both_sides(f: Function, target: Target, head_dim: str, group: str) -> None:
    """words: as of `attend`, then the length of each request, int64. ``window``: to either side."""
    _Attend(f, target, int(head_dim), int(group), "float32", both_sides=True).write()


KERNELS: dict[str, WriteKernel] = {"attend": _attend, "attend_both_sides": _attend_both_sides}
