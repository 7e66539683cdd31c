"""Kernels of mixtures of experts: how tokens choose experts, and the products of each chosen one with its tokens.

A pair is a token and one of its experts. `plan_experts` gives each pair a slot, so that those of an expert lie behind
each other. The experts that are used have an entry each: number, first slot, slots; entries beyond them have no slots.
How many are used is not known when an op is recorded: a chunk of one that is not has nothing to do.

The weighted outputs of a token's experts are added in the order of the experts' numbers, whatever else is in the batch.
"""

from __future__ import annotations

from .compiler.emit import F32, I32, I64, Function, Value
from .compiler.target import Target, WriteKernel
from .packed.products import GATES, MULTIPLIES, activated, sigmoid, tile_product
from .packed.tiles import ROWS_OF_CHUNK
from .rows import LANES

ENTRY = 3
"""Words, int32, of an expert that is used."""
_FLOATS = F32 * LANES
_INTS = I32 * LANES
_LOWEST = -3.0e38
_MOST = 2**31 - 1


# -- Choosing


def _route(f: Function, target: Target, scoring: str, of: str) -> None:
    """words: logits float32 [rows, experts], correction float32 [experts] or none, memory as large as logits, ids int32
    and weights float32 [rows, top_k], experts, top_k, scale. A chunk is a row. ``of``: "chosen": weights add up to the
    scale.
    """
    count, top_k = f.word(f.words, 5), f.word(f.words, 6)
    logits, choice = (f.address(f.words, i) + f.chunk * count * 4 for i in (0, 2))
    ids, weights = (f.address(f.words, i) + f.chunk * top_k * 4 for i in (3, 4))
    largest, total = f.variable(_FLOATS, _LOWEST), f.variable(_FLOATS, 0.0)
    with f.loop(0, count, LANES) as i:
        mask = f.lane_mask(count - i, LANES)
        own = f.load_lanes(_FLOATS, logits + i * 4, mask)
        largest.set(f.larger(largest.get(), f.choose(mask, own, _LOWEST)))
        if scoring == "sigmoid":
            own = sigmoid(f, own)
            correction = f.variable(_FLOATS, 0.0)
            with f.when(f.word(f.words, 1).differs(0)):
                correction.set(f.load_lanes(_FLOATS, f.address(f.words, 1) + i * 4, mask))
            own = own + correction.get()
        f.store_lanes(own, choice + i * 4, mask)
    top = f.max_lanes(largest.get())
    if scoring == "softmax" and of == "all":
        with f.loop(0, count, LANES) as i:
            mask = f.lane_mask(count - i, LANES)
            own = f.exp(f.load_lanes(_FLOATS, logits + i * 4, mask) - top)
            total.add(f.choose(mask, own, 0.0))
    chosen = f.variable(F32, 0.0)
    with f.loop(0, top_k) as rank:
        best = _best(f, choice, count)
        f.store(f.number(F32, _LOWEST), choice + f.widened(best, I64) * 4)
        logit = f.load(F32, logits + f.widened(best, I64) * 4)
        weight = f.exp(logit - top) if scoring == "softmax" else sigmoid(f, logit)
        f.store(best, ids + rank * 4)
        f.store(weight, weights + rank * 4)
        chosen.add(weight)
    factor = f.load(F32, f.words + 56)
    if of == "chosen":
        factor = factor / (chosen.get() + 1e-20)
    elif scoring == "softmax":
        factor = factor / f.sum_lanes(total.get())
    with f.loop(0, top_k) as rank:
        f.store(f.load(F32, weights + rank * 4) * factor, weights + rank * 4)


def _best(f: Function, choice: Value, count: Value) -> Value:
    """The number (int32) of the largest of ``count`` float32, the first of equal ones; 0 where none is a number."""
    best, where = f.variable(_FLOATS, _LOWEST), f.variable(_INTS, 0)
    lanes = f.numbers(_INTS, range(LANES))
    with f.loop(0, count, LANES) as i:
        mask = f.lane_mask(count - i, LANES)
        own = f.choose(mask, f.load_lanes(_FLOATS, choice + i * 4, mask), _LOWEST)
        is_better = own > best.get()
        best.set(f.choose(is_better, own, best.get()))
        where.set(f.choose(is_better, lanes + f.narrowed(i, I32), where.get()))
    is_best = best.get().equals(f.max_lanes(best.get()))
    first = f.choose(is_best, f.like(where.get(), 0) - where.get(), -_MOST)
    return f.number(I32, 0) - f.max_lanes(first)


def _plan_experts(f: Function, target: Target, num_experts: str) -> None:
    """words: ids int32 and weights float32 [rows, top_k], top_k; of each slot its token, int32, and weight, float32;
    the entries, as many as slots. The only chunk. An id may be the number of experts: the pair is none of theirs."""
    pairs = f.rows * f.word(f.words, 2)
    ids, weights, tokens, of_slots, entries = (f.address(f.words, i) for i in (0, 1, 3, 4, 5))
    count = int(num_experts)
    places = f.scratch(4 * (count + 1))  # each expert's number of pairs, then its next slot
    one, none = f.number(I32, 1), f.number(I32, 0)
    with f.loop(0, count + 1) as i:
        f.store(none, places + i * 4)

    def place_of(pair: Value) -> Value:
        return places + f.widened(f.load(I32, ids + pair * 4), I64) * 4

    with f.loop(0, pairs) as pair:
        place = place_of(pair)
        f.store(f.load(I32, place) + one, place)
    slot, used = f.variable(I32, 0), f.variable(I64, 0)
    with f.loop(0, count + 1) as expert:
        own = f.load(I32, places + expert * 4)
        f.store(slot.get(), places + expert * 4)
        with f.when((own > 0) & (expert < count)):
            for word, number in enumerate((f.narrowed(expert, I32), slot.get(), own)):
                f.store(number, entries + used.get() * (4 * ENTRY) + 4 * word)
            used.add(f.number(I64, 1))
        slot.add(own)
    with f.loop(used.get(), f.smaller(pairs, count)) as entry:
        for word in range(ENTRY):
            f.store(none, entries + entry * (4 * ENTRY) + 4 * word)
    with f.loop(0, pairs) as pair:
        place = place_of(pair)
        own = f.load(I32, place)
        f.store(own + one, place)
        at = f.widened(own, I64) * 4
        f.store(f.narrowed(pair / f.word(f.words, 2), I32), tokens + at)
        f.store(f.load(F32, weights + pair * 4), of_slots + at)


# -- Rows of slots


def _gather(f: Function, target: Target) -> None:
    """words: x, out, bytes of a row, a multiple of 4; meta, its out, bytes of a row or 0; tokens of slots, int32. A
    chunk is a slot."""
    token = f.widened(f.load(I32, f.address(f.words, 6) + f.chunk * 4), I64)
    for i in (0, 3):
        size = f.word(f.words, i + 2)
        source, out = f.address(f.words, i) + token * size, f.address(f.words, i + 1) + f.chunk * size
        with f.loop(0, size, 4 * LANES) as place:
            mask = f.lane_mask((size - place) / 4, LANES)
            f.store_lanes(f.load_lanes(_INTS, source + place, mask), out + place, mask)


def _gate_experts(f: Function, target: Target, kind: str, lies: str) -> None:
    """words: gate and up float32 [slots, 2 * size], out float32 [slots, size], size, alpha, limit. A chunk is a slot.
    ``lies``: "halves", the gate comes first; "interleaved"."""
    size = f.word(f.words, 2)
    both, out = f.address(f.words, 0) + f.chunk * size * 8, f.address(f.words, 1) + f.chunk * size * 4
    with f.loop(0, size, LANES) as i:
        left = size - i
        mask = f.lane_mask(left, LANES)
        if lies == "halves":
            gate, up = (f.load_lanes(_FLOATS, both + place * 4, mask) for place in (i, i + size))
        else:
            masks = [f.lane_mask(left * 2 - j * LANES, LANES) for j in range(2)]
            parts = [f.load_lanes(_FLOATS, both + (i * 8 + 4 * LANES * j), masks[j]) for j in range(2)]
            gate, up = (f.shuffle(parts[0], parts[1], range(j, 2 * LANES, 2)) for j in range(2))
        if kind == "clamped_swiglu":
            alpha, limit = (f.load(F32, f.words + 8 * j) for j in (3, 4))
            most = f.splat(limit, LANES)
            gate = f.smaller(gate, most)
            up = f.larger(f.smaller(up, most), f.like(most, 0.0) - most)
            gated = gate * sigmoid(f, gate * alpha) * (up + 1.0)
        else:
            gated = activated(f, gate, kind) * up
        f.store_lanes(gated, out + i * 4, mask)


# -- Products


(_X, _META, _MATRICES, _OUT, _BIASES, _FEATURES, _SIZE, _TILE_BYTES, _TILES, _OF_CHUNK, _ENTRIES) = range(11)
"""Words of a product: x of slots; its meta; addresses of the packed matrices; out, float32; addresses of biases, or
none; output features; input features in blocks, or one by one; bytes of a tile; tiles (of gated ones, of the gate);
tiles of a chunk; entries."""


class _Products:
    """The products of an expert's rows with tiles of its matrix."""

    def __init__(self, f: Function, target: Target, name: str, entry: Value, parts: int = 1) -> None:
        """``entry``: its number (int64). ``parts``: tiles that are multiplied, as far from each other as there are
        tiles."""
        self._f = f
        self._multiply = MULTIPLIES[name]
        self._function = tile_product(f, target, self._multiply)
        self._products = [f.scratch(ROWS_OF_CHUNK * LANES * 4) for _ in range(parts)]
        place = f.address(f.words, _ENTRIES) + entry * (4 * ENTRY)
        expert, self.first, self.count = (f.widened(f.load(I32, place + 4 * i), I64) for i in range(ENTRY))
        self._matrix = f.address(f.address(f.words, _MATRICES) + expert * 8, 0)
        self._expert = expert

    def biases(self, tile: Value, mask: Value) -> list[Value]:
        f, found = self._f, []
        for i in range(len(self._products)):
            bias = f.variable(_FLOATS, 0.0)
            with f.when(f.word(f.words, _BIASES).differs(0)):
                own = f.address(f.address(f.words, _BIASES) + self._expert * 8, 0)
                begin = (tile + f.word(f.words, _TILES) * i) * (4 * LANES)
                bias.set(f.load_lanes(_FLOATS, own + begin, mask))
            found.append(bias.get())
        return found

    def multiply(self, tile: Value, begin: Value, rows: Value) -> None:
        """Multiply rows from ``begin`` on, counted among the expert's, with a tile."""
        f = self._f
        size = f.word(f.words, _SIZE)
        slot = self.first + begin
        x = f.address(f.words, _X) + slot * size * self._multiply.x_bytes
        meta = f.address(f.words, _META) + slot * size * 16
        for i, product in enumerate(self._products):
            place = self._matrix + (tile + f.word(f.words, _TILES) * i) * f.word(f.words, _TILE_BYTES)
            f.call(self._function, None, x, meta, place, size, rows, product)

    def of_row(self, row: Value) -> list[Value]:
        return [self._f.load(_FLOATS, product + row * (4 * LANES)) for product in self._products]


def _expert_product(f: Function, target: Target, kind: str, of: str, end: str) -> None:
    """words: see _X to _ENTRIES, then chunks of an expert; out [slots, features]. A chunk is some tiles of an expert
    that is used, with all of its rows. ``end``: "store", or an activation of gates."""
    tiles, of_chunk, features = (f.word(f.words, i) for i in (_TILES, _OF_CHUNK, _FEATURES))
    chunks = f.word(f.words, _ENTRIES + 1)
    own = _Products(f, target, f"{kind}_{of}", f.chunk / chunks, parts=2 if end in GATES else 1)
    first_tile = f.chunk % chunks * of_chunk
    last_tile = f.choose(own.count > 0, f.smaller(first_tile + of_chunk, tiles), first_tile)
    with f.loop(first_tile, last_tile) as tile:
        mask = f.lane_mask(features - tile * LANES, LANES)
        biases = own.biases(tile, mask)
        with f.loop(0, own.count, ROWS_OF_CHUNK) as begin:
            rows = f.smaller(own.count - begin, ROWS_OF_CHUNK)
            own.multiply(tile, begin, rows)
            with f.loop(0, rows) as row:
                values = [value + bias for value, bias in zip(own.of_row(row), biases, strict=True)]
                result = activated(f, values[0], end) * values[1] if end in GATES else values[0]
                slot = own.first + begin + row
                f.store_lanes(result, f.address(f.words, _OUT) + (slot * features + tile * LANES) * 4, mask)


def _add_experts(f: Function, target: Target, kind: str, of: str) -> None:
    """words: see _X to _ENTRIES, then numbers of out from row to row, most entries, tokens and weights of slots, top_k.
    A chunk is some tiles of all experts that are used: to each row of out their weighted products are added in order.
    """
    tiles, of_chunk, features = (f.word(f.words, i) for i in (_TILES, _OF_CHUNK, _FEATURES))
    stride, entries, top_k = (f.word(f.words, _ENTRIES + i) for i in (1, 2, 5))
    tokens, weights = (f.address(f.words, _ENTRIES + i) for i in (3, 4))
    first_tile = f.chunk * of_chunk
    with f.loop(0, f.smaller(f.rows * top_k, entries)) as entry:
        own = _Products(f, target, f"{kind}_{of}", entry)
        last_tile = f.choose(own.count > 0, f.smaller(first_tile + of_chunk, tiles), first_tile)
        with f.loop(first_tile, last_tile) as tile:
            mask = f.lane_mask(features - tile * LANES, LANES)
            (bias,) = own.biases(tile, mask)
            with f.loop(0, own.count, ROWS_OF_CHUNK) as begin:
                rows = f.smaller(own.count - begin, ROWS_OF_CHUNK)
                own.multiply(tile, begin, rows)
                with f.loop(0, rows) as row:
                    at = (own.first + begin + row) * 4
                    token = f.widened(f.load(I32, tokens + at), I64)
                    place = f.address(f.words, _OUT) + (token * stride + tile * LANES) * 4
                    value = own.of_row(row)[0] + bias
                    weight = f.splat(f.load(F32, weights + at), LANES)
                    f.store_lanes(f.fma(value, weight, f.load_lanes(_FLOATS, place, mask)), place, mask)


KERNELS: dict[str, WriteKernel] = {
    "route": _route,
    "plan_experts": _plan_experts,
    "gather": _gather,
    "gate_experts": _gate_experts,
    "expert_product": _expert_product,
    "add_experts": _add_experts,
}
