"""Paged attention against softmax(q k / scale) v spelled out, head by head and query by query, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from aengine.kernels import paged_attention
from aengine.kernels.paged_attention import Scores, decode_attention, prefill_attention


def naive(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q: [query_len, num_heads, dim], the last tokens of keys and values [seq_len, num_kv_heads, dim]."""
    query_len, num_heads, dim = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    out = torch.empty(query_len, num_heads, dim, dtype=torch.float64)
    for i in range(query_len):
        last = seq_len - query_len + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[first : last + 1, kv_head].double() @ q[i, head].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = torch.softmax(scores, 0)[: last + 1 - first]
            out[i, head] = weights @ values[first : last + 1, kv_head].double()
    return out.flatten(1)


class Pool:
    """A cache full of other requests' values, in which sequences lie in scattered blocks."""

    def __init__(self, rng: random.Random, gen: torch.Generator, kv_heads: int, dim: int) -> None:
        self.block_size = rng.choice((1, 3, 4, 16))
        self.cache = torch.randn(64 if self.block_size > 1 else 200, self.block_size, 2, kv_heads, dim, generator=gen)
        self.cache *= 30  # a key read by mistake would win the softmax
        self._free = list(range(len(self.cache)))
        rng.shuffle(self._free)
        self._gen = gen

    def add(self, seq_len: int) -> tuple[Tensor, Tensor]:
        """(kv [seq_len, 2, kv_heads, dim], block ids) of a sequence written into the cache."""
        blocks = torch.tensor([self._free.pop() for _ in range(-(-seq_len // self.block_size))])
        kv = torch.randn(seq_len, *self.cache.shape[2:], generator=self._gen)
        for place in range(seq_len):
            self.cache[blocks[place // self.block_size], place % self.block_size] = kv[place]
        return kv, blocks


def shapes(rng: random.Random) -> tuple[int, int, int]:
    """(heads, KV heads, dim)"""
    kv_heads = rng.choice((1, 2, 3))
    return kv_heads * rng.choice((1, 2, 4)), kv_heads, rng.choice((4, 10, 16))


def cap_and_sinks(rng: random.Random, gen: torch.Generator, heads: int) -> tuple[float, Tensor | None]:
    """A soft cap that bends the scores, or none; sinks that weigh as much as a key, or none."""
    return rng.choice((0.0, 1.5)), rng.choice((None, torch.randn(heads, generator=gen)))


def close(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
def test_decode(rng: random.Random, gen: torch.Generator, window: int | None) -> None:
    for _ in range(6):
        heads, kv_heads, dim = shapes(rng)
        pool = Pool(rng, gen, kv_heads, dim)
        lens = [rng.randint(1, 30) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.3:
            lens = [lens[0]] * len(lens)
        sequences = [pool.add(length) for length in lens]
        width = max(len(blocks) for _, blocks in sequences) + rng.randint(0, 2)
        table = torch.randint(0, len(pool.cache), (len(lens), width), generator=gen)
        for row, (_, blocks) in zip(table, sequences):
            row[: len(blocks)] = blocks
        q = torch.randn(len(lens), heads, dim, generator=gen)
        scale = rng.uniform(0.1, 1)
        how = Scores(scale, window, *cap_and_sinks(rng, gen, heads))
        out = decode_attention(q, pool.cache, table, lens, how)
        for i, (kv, _) in enumerate(sequences):
            close(out[i : i + 1], naive(q[i : i + 1], kv[:, 0], kv[:, 1], *how))


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("computed", ["nothing", "something"])
def test_prefill(
    rng: random.Random, gen: torch.Generator, window: int | None, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        heads, kv_heads, dim = shapes(rng)
        pool = Pool(rng, gen, kv_heads, dim)
        query_len = rng.randint(1, 20)
        seq_len = query_len + (rng.randint(1, 25) if computed == "something" else 0)
        kv, blocks = pool.add(seq_len)
        q = torch.randn(query_len, heads + 2, dim, generator=gen)[:, :heads]  # strided, as in the model
        scale = rng.uniform(0.1, 1)
        how = Scores(scale, window, *cap_and_sinks(rng, gen, heads))
        monkeypatch.setattr(paged_attention, "_MOST_SCORES", rng.choice((1, 200, 1 << 22)))  # in one piece, or several
        out = prefill_attention(q, kv[seq_len - query_len :], pool.cache, blocks, seq_len, how)
        close(out, naive(q, kv[:, 0], kv[:, 1], *how))


def test_decode_and_prefill_agree(rng: random.Random, gen: torch.Generator) -> None:
    heads, kv_heads, dim = shapes(rng)
    pool = Pool(rng, gen, kv_heads, dim)
    kv, blocks = pool.add(23)
    q = torch.randn(1, heads, dim, generator=gen)
    decoded = decode_attention(q, pool.cache, blocks[None], [23], Scores(0.3))
    torch.testing.assert_close(decoded, prefill_attention(q, kv[-1:], pool.cache, blocks, 23, Scores(0.3)))


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_scores_in_float16_may_be_large_before_their_scale(softcap: float) -> None:
    """q k^T is 128,000 here, and 500 with the scale: past the range of float16 and well within it."""
    q, kv = torch.full((1, 1, 128), 100.0).half(), torch.full((1, 1, 2, 1, 128), 10.0).half()
    how = Scores(1 / 256, None, softcap, None if softcap else torch.zeros(1).half())
    assert decode_attention(q, kv, torch.zeros(1, 1, dtype=torch.int32), [1], how).eq(10).all()
    assert prefill_attention(q, kv[0], kv, torch.zeros(1, dtype=torch.int32), 1, how).eq(10).all()
