"""The gated delta rule and the short convolution: prompts in any chunks against the definition, token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.delta_memory import DeltaGates, DeltaInputs
from aengine.kernels.gated_delta import gated_delta_of_prompts, gated_delta_of_tokens
from aengine.kernels.sequences import Cut, Sequences
from aengine.kernels.short_conv import conv_of_prompts, conv_of_tokens, ungated
from aengine.runner.state_tables import TableSizes, tables_of, views_of

CPU = torch.device("cpu")
NUM_TOKENS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 150, 2, 4, 8, 12


GATES = DeltaGates(
    -torch.linspace(0.1, 1, VALUE_HEADS), torch.linspace(-2, 1, VALUE_HEADS), torch.ones(VALUE_DIM), 1e-6
)


def make_inputs(num_tokens: int) -> DeltaInputs:
    mixed = torch.randn(num_tokens, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM) * 2
    z, b, a = (torch.randn(num_tokens, size) for size in (VALUE_HEADS * VALUE_DIM, VALUE_HEADS, VALUE_HEADS))
    a[70:75] = 2000.0  # forgets everything: exp(-1000) is 0, and nothing may become infinite
    return DeltaInputs(mixed, z, b, a, KEY_HEADS)


def joined(parts: Iterable[DeltaInputs]) -> DeltaInputs:
    return DeltaInputs(*(torch.cat(xs) for xs in zip(*(part.tensors for part in parts), strict=True)), KEY_HEADS)


def sent_to(device: torch.device, inputs: DeltaInputs) -> tuple[DeltaInputs, DeltaGates]:
    gates = DeltaGates(*(x.to(device) for x in GATES[:3]), GATES.eps)
    return DeltaInputs(*(x.to(device) for x in inputs.tensors), KEY_HEADS), gates


def by_definition(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    mixed, z, b, a = (x.double() for x in inputs.tensors)
    keys = KEY_HEADS * KEY_DIM
    q, k, v = F.silu(mixed).split([keys, keys, VALUE_HEADS * VALUE_DIM], 1)
    q, k, v = q.unflatten(1, (-1, KEY_DIM)), k.unflatten(1, (-1, KEY_DIM)), v.unflatten(1, (-1, VALUE_DIM))
    decay, beta = GATES.rate * F.softplus(a + GATES.bias), b.sigmoid()
    state, out = state.double().clone(), torch.empty(v.shape, dtype=torch.float64)
    for t in range(len(q)):
        for head in range(VALUE_HEADS):
            own_q, own_k = (x[t, head * KEY_HEADS // VALUE_HEADS] for x in (q, k))
            own_q, own_k = own_q / own_q.norm() / KEY_DIM**0.5, own_k / own_k.norm()
            own = state[head] * decay[t, head].exp()
            state[head] = own + torch.outer(own_k, (v[t, head] - own.T @ own_k) * beta[t, head])
            out[t, head] = state[head].T @ own_q
    normed = out / (out.square().mean(2, keepdim=True) + GATES.eps).sqrt() * GATES.norm
    return normed.flatten(1) * F.silu(z), state


def deal(rng: random.Random, num_tokens: list[int]) -> Iterator[list[int]]:
    """Steps: how many tokens of each sequence are in it, until all are computed; of some sequences none."""
    left = list(num_tokens)
    while any(left):
        step = [min(n, rng.choice([0, 1, 2, 3, 17, 64, 65])) for n in left]
        left = [n - now for n, now in zip(left, step, strict=True)]
        if any(step):
            yield step


def step_of(num_tokens: list[int], done: list[int], step: list[int]) -> tuple[list[int], list[int], Tensor]:
    """The sequences that have tokens in a step, those of one token first; how many; and where these are, when the whole
    sequences lie one after the other."""
    those = sorted((i for i in range(len(step)) if step[i]), key=lambda i: step[i] > 1)
    firsts = [sum(num_tokens[:i]) + done[i] for i in those]
    lens = [step[i] for i in those]
    return those, lens, torch.cat([torch.arange(first, first + n) for first, n in zip(firsts, lens, strict=True)])


def tables_for(
    lens: list[int],
    pages: Tensor,
    begins: list[bool],
    cuts: list[Cut],
    spare: int,
    device: torch.device,
    *,
    is_padded: bool,
) -> Sequences:
    """``is_padded``: with room for more, as in a graph."""
    tables = tables_of(lens, lens.count(1), pages.tolist(), begins, cuts)
    sizes = tables.sizes
    if is_padded:
        sizes = TableSizes(sizes.tokens, 5, min(4, sizes.tokens), sizes.chunks + 2, 3)
    return views_of(torch.from_numpy(tables.laid_out(sizes, spare)).to(device), sizes, lens, cuts)


@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_prompts_of_several_sequences(runs: str, request: pytest.FixtureRequest, rng: random.Random) -> None:
    """In steps of any lengths, with states kept at places within them, and tables that have room for more."""
    torch.manual_seed(rng.getrandbits(30))
    device = request.getfixturevalue("triton_device") if runs == "triton" else CPU
    num_tokens = [NUM_TOKENS, 1, 90, 64]
    parts = [make_inputs(n) for n in num_tokens]
    inputs = joined(parts)
    memory, pages, _ = some_pages(in_pages(9, VALUE_HEADS, KEY_DIM, VALUE_DIM), 4)
    first = [torch.zeros_like(memory[0]) if i < 2 else memory[pages[i]].nan_to_num() for i in range(4)]
    wanted = [by_definition(own, state) for own, state in zip(parts, first, strict=True)]
    memory[pages[:2]], memory[pages[2:]] = torch.nan, torch.stack(first[2:])
    spare, *others = [page for page in range(9) if page not in pages.tolist()]
    before, memory = memory[others[1:]].clone(), memory.to(device)
    done, out, num_cuts = [0] * 4, torch.empty(sum(num_tokens), VALUE_HEADS * VALUE_DIM), 0
    for step in deal(rng, num_tokens):
        those, lens, at = step_of(num_tokens, done, step)
        begins = [i < 2 and done[i] == 0 for i in those]
        cuts = [Cut(i, rng.randrange(1, n), others[0]) for i, n in enumerate(lens) if n > 1][:1]
        sequences = tables_for(lens, pages[those], begins, cuts, spare, device, is_padded=runs == "triton")
        own, gates = sent_to(device, inputs.of(at))
        out[at] = gated_delta_of_prompts(own, gates, memory, sequences).cpu()
        for cut in cuts:
            i = those[cut.sequence]
            right = by_definition(parts[i].of(slice(done[i] + cut.num_tokens)), first[i])[1]
            torch.testing.assert_close(memory[cut.page].cpu().double(), right, rtol=2e-3, atol=2e-3)
            num_cuts += 1
        done = [n + now for n, now in zip(done, step, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat([right for right, _ in wanted]), rtol=2e-3, atol=2e-3)
    states = torch.stack([last for _, last in wanted])
    torch.testing.assert_close(memory[pages].cpu().double(), states, rtol=2e-3, atol=2e-3)
    assert torch.equal(memory[others[1:]].cpu(), before) and num_cuts


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
    inputs = make_inputs(n)
    memory, pages, begins = some_pages(in_pages(9, VALUE_HEADS, KEY_DIM, VALUE_DIM), n)
    before = memory.clone()
    if runs == "triton":
        device = request.getfixturevalue("triton_device")
        memory = memory.to(device)
        out = gated_delta_of_tokens(*sent_to(device, inputs), memory, pages.to(device), begins.to(device)).cpu()
    else:
        out = gated_delta_of_tokens(inputs, GATES, memory, pages, begins)
    for i, page in enumerate(pages.tolist()):
        first = torch.zeros_like(before[page]) if begins[i] else before[page]
        wanted, last = by_definition(inputs.of(slice(i, i + 1)), first)
        torch.testing.assert_close(out[i].double(), wanted[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(memory[page].cpu().double(), last, rtol=2e-3, atol=2e-3)
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
    spare, kept_page, *others = [page for page in range(9) if page not in pages.tolist()]
    untouched, memory = memory[others].clone(), memory.to(device)
    sent = [t if t is None else t.to(device) for t in (weight, bias)]
    done, out = [0] * 4, torch.empty(len(given), channels)
    for step in deal(rng, num_tokens):
        those, lens, at = step_of(num_tokens, done, step)
        begins = [i < 2 and done[i] == 0 for i in those]
        cuts = [Cut(i, rng.randrange(1, n), kept_page) for i, n in enumerate(lens) if n > 1][:1]
        sequences = tables_for(lens, pages[those], begins, cuts, spare, device, is_padded=runs == "triton")
        out[at] = conv_of_prompts(given[at].to(device), *sent, memory, sequences).cpu()
        for cut in cuts:
            i = those[cut.sequence]
            end = done[i] + cut.num_tokens
            torch.testing.assert_close(memory[cut.page].cpu(), whole[i][end : end + width - 1])
        done = [n + now for n, now in zip(done, step, strict=True)]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(memory[pages.to(device)].cpu(), torch.stack([own[1 - width :] for own in whole]))
    assert torch.equal(memory[others].cpu(), untouched)
