"""The gated delta rule and the short convolution: prompts in any chunks against the definition, token by token."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.gated_delta import check_gated_delta, gated_delta_of_prompts, gated_delta_of_tokens
from aengine.kernels.sequences import Sequences, chunks_of
from aengine.kernels.short_conv import conv_of_prompts, conv_of_tokens, ungated

CPU = torch.device("cpu")
NUM_TOKENS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 150, 2, 4, 8, 12


def make_inputs(num_tokens: int) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, num_tokens, KEY_HEADS, KEY_DIM)
    v = torch.randn(num_tokens, VALUE_HEADS, VALUE_DIM)
    decay = -torch.rand(num_tokens, VALUE_HEADS) * 2
    decay[70:75] = -200.0  # forgets everything: exp(-1000) is 0, and nothing may become infinite
    return q, k, v, decay, torch.rand(num_tokens, VALUE_HEADS)


def by_definition(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state, out = state.double().clone(), torch.empty(v.shape, dtype=torch.float64)
    for t in range(len(q)):
        for head in range(v.shape[1]):
            own_q, own_k = (x[t, head * q.shape[1] // v.shape[1]].double() for x in (q, k))
            own_q, own_k = own_q / own_q.norm() / KEY_DIM**0.5, own_k / own_k.norm()
            own = state[head] * decay[t, head].double().exp()
            state[head] = own + torch.outer(own_k, (v[t, head] - own.T @ own_k) * beta[t, head])
            out[t, head] = state[head].T @ own_q
    return out, state


def sequences_of(lens: list[int], pages: Tensor, begins: list[bool], device: torch.device = CPU) -> Sequences:
    starts = torch.tensor([0, *lens]).cumsum(0)
    owners = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(torch.tensor(lens))
    where = starts, owners, pages, torch.tensor(begins), torch.from_numpy(chunks_of(lens))
    return Sequences(tuple(lens), *(t.to(device) for t in where))


def deal(rng: random.Random, num_tokens: list[int]) -> Iterator[list[int]]:
    """Steps: how many tokens of each sequence are in it, until all are computed; of some sequences none."""
    left = list(num_tokens)
    while any(left):
        step = [min(n, rng.choice([0, 1, 2, 3, 17, 64, 65])) for n in left]
        left = [n - now for n, now in zip(left, step, strict=True)]
        if any(step):
            yield step


def places_of(num_tokens: list[int], done: list[int], step: list[int]) -> list[int]:
    """Where the step's tokens are, when the whole sequences lie one after the other."""
    firsts = [sum(num_tokens[:i]) for i in range(len(num_tokens))]
    return [first + n + i for first, n, now in zip(firsts, done, step, strict=True) for i in range(now)]


def test_prompts_of_several_sequences(rng: random.Random) -> None:
    torch.manual_seed(rng.getrandbits(30))
    num_tokens = [NUM_TOKENS, 1, 90, 64]
    parts = [make_inputs(n) for n in num_tokens]
    inputs = [torch.cat(xs) for xs in zip(*parts, strict=True)]
    memory, pages, _ = some_pages(in_pages(9, VALUE_HEADS, KEY_DIM, VALUE_DIM), 4)
    first = [torch.zeros_like(memory[0]) if i < 2 else memory[pages[i]].nan_to_num() for i in range(4)]
    wanted = [by_definition(*own, state) for own, state in zip(parts, first, strict=True)]
    memory[pages[:2]], memory[pages[2:]] = torch.nan, torch.stack(first[2:])
    others = [page for page in range(9) if page not in pages.tolist()]
    before = memory[others].clone()
    done, out = [0] * 4, torch.empty(sum(num_tokens), VALUE_HEADS, VALUE_DIM)
    for step in deal(rng, num_tokens):
        at, those = places_of(num_tokens, done, step), [i for i in range(4) if step[i]]
        begins = [i < 2 and done[i] == 0 for i in those]
        sequences = sequences_of([step[i] for i in those], pages[those], begins)
        out[at] = gated_delta_of_prompts(*(x[at] for x in inputs), memory, sequences)
        done = [n + now for n, now in zip(done, step, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat([right for right, _ in wanted]), rtol=1e-4, atol=1e-4)
    states = torch.stack([last for _, last in wanted])
    torch.testing.assert_close(memory[pages].double(), states, rtol=1e-4, atol=1e-4)
    assert torch.equal(memory[others], before)


def test_a_gpu_needs_the_library_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    gpu = torch.device("cuda")
    check_gated_delta(CPU, torch.bfloat16)
    check_gated_delta(gpu, torch.float32)
    with pytest.raises(ModelLoadError, match="pip install fla-core"):
        check_gated_delta(gpu, torch.bfloat16)


def some_pages(memory: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scattered pages, those of two sequences that begin not clean; the pages lie apart."""
    begins = torch.zeros(n, dtype=torch.bool)
    begins[1], begins[n - 1] = True, True
    pages = torch.randperm(len(memory))[:n]
    memory[pages[begins]] = torch.nan
    return memory, pages, begins


def in_pages(num_pages: int, *shape: int) -> Tensor:
    return torch.randn(num_pages, 7 + math.prod(shape))[:, 7:].unflatten(1, shape)


@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_tokens_of_several_sequences(runs: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(1)
    n = 5
    mixed = torch.randn(n, KEY_HEADS * KEY_DIM * 2 + VALUE_HEADS * VALUE_DIM)
    parts = mixed.split([KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM], 1)
    q, k, v = (x.unflatten(1, (-1, size)) for x, size in zip(parts, (KEY_DIM, KEY_DIM, VALUE_DIM), strict=True))
    inputs = q, k, v, -torch.rand(n, VALUE_HEADS), torch.rand(n, VALUE_HEADS)
    memory, pages, begins = some_pages(in_pages(9, VALUE_HEADS, KEY_DIM, VALUE_DIM), n)
    before = memory.clone()
    if runs == "triton":
        device = request.getfixturevalue("triton_device")
        memory = memory.to(device)
        out = gated_delta_of_tokens(*(x.to(device) for x in inputs), memory, pages.to(device), begins.to(device)).cpu()
    else:
        out = gated_delta_of_tokens(*inputs, memory, pages, begins)
    for i, page in enumerate(pages.tolist()):
        first = torch.zeros_like(before[page]) if begins[i] else before[page]
        wanted, last = by_definition(*(x[i : i + 1] for x in inputs), first)
        torch.testing.assert_close(out[i].double(), wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(memory[page].cpu().double(), last, rtol=1e-4, atol=1e-4)
    others = [page for page in range(9) if page not in pages.tolist()]
    assert torch.equal(memory[others].cpu(), before[others])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_a_convolution_of_one_token_each(runs: str, width: int, gated: bool, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(2)
    given, weight, bias = torch.randn(20, 18 if gated else 6), torch.randn(width, 6), torch.randn(6)
    x, c = ungated(given, weight)
    filters = weight.t().unsqueeze(1)
    wanted = torch.nn.functional.conv1d(x.t()[None], filters, bias, padding=width - 1, groups=6)[0, :, :20].t() * c
    memory, pages, begins = some_pages(in_pages(6, width - 1, 6), 4)
    places = [9, 0, 13, 0]
    for i in (0, 2):
        memory[pages[i]] = x[places[i] - width + 1 : places[i]]
    device = request.getfixturevalue("triton_device") if runs == "triton" else torch.device("cpu")
    sent = [t.to(device) for t in (given[places], weight, bias, memory, pages, begins)]
    torch.testing.assert_close(conv_of_tokens(*sent).cpu(), wanted[places])
    kept = sent[3][sent[4]].cpu()
    torch.testing.assert_close(kept[0], x[11 - width : 10])
    torch.testing.assert_close(kept[1], torch.cat((torch.zeros(width - 2, 6), x[:1])))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_a_convolution_goes_on_where_it_was(
    runs: str, width: int, request: pytest.FixtureRequest, rng: random.Random
) -> None:
    torch.manual_seed(rng.getrandbits(30))
    device = request.getfixturevalue("triton_device") if runs == "triton" else CPU
    num_tokens, channels = [70, 1, 35, 2], 150
    given = torch.randn(sum(num_tokens), 7 + channels * rng.choice([1, 3]))[:, 7:]
    weight = torch.randn(width, channels)
    x, c = ungated(given, weight)
    bias = torch.randn(channels) if rng.random() < 0.5 else None
    memory, pages, _ = some_pages(in_pages(9, width - 1, channels), 4)
    before = [torch.zeros(width - 1, channels) if i < 2 else memory[pages[i]].nan_to_num() for i in range(4)]
    whole = [torch.cat(pair) for pair in zip(before, x.split(num_tokens), strict=True)]
    filters = weight.t().unsqueeze(1)
    wanted = torch.cat([F.conv1d(own.t()[None], filters, bias, groups=channels)[0].t() for own in whole]) * c
    memory[pages[:2]], memory[pages[2:]] = torch.nan, torch.stack(before[2:])
    others = [page for page in range(9) if page not in pages.tolist()]
    untouched, memory = memory[others].clone(), memory.to(device)
    sent = [t if t is None else t.to(device) for t in (weight, bias)]
    done, out = [0] * 4, torch.empty(len(given), channels)
    for step in deal(rng, num_tokens):
        at, those = places_of(num_tokens, done, step), [i for i in range(4) if step[i]]
        sequences = sequences_of(
            [step[i] for i in those], pages[those], [i < 2 and done[i] == 0 for i in those], device
        )
        out[at] = conv_of_prompts(given[at].to(device), *sent, memory, sequences).cpu()
        done = [n + now for n, now in zip(done, step, strict=True)]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(memory[pages.to(device)].cpu(), torch.stack([own[1 - width :] for own in whole]))
    assert torch.equal(memory[others].cpu(), untouched)
