"""The gated delta rule and the short convolution: prompts in any chunks against the definition, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aengine.kernels.gated_delta import gated_delta_of_prompt, gated_delta_of_tokens
from aengine.kernels.short_conv import conv_of_prompt, conv_of_tokens

NUM_TOKENS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 150, 2, 4, 8, 12


def make_inputs() -> tuple[Tensor, ...]:
    q, k = torch.randn(2, NUM_TOKENS, KEY_HEADS, KEY_DIM)
    v = torch.randn(NUM_TOKENS, VALUE_HEADS, VALUE_DIM)
    decay = -torch.rand(NUM_TOKENS, VALUE_HEADS) * 2
    decay[70:75] = -200.0  # forgets everything: exp(-1000) is 0, and nothing may become infinite
    return q, k, v, decay, torch.rand(NUM_TOKENS, VALUE_HEADS)


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


def test_a_prompt_in_chunks() -> None:
    torch.manual_seed(0)
    inputs, first = make_inputs(), torch.randn(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    wanted, last = by_definition(*inputs, first)
    for cuts in ([NUM_TOKENS], [1, 64, 20, 65], [128, 22]):
        state, parts, start = first.clone(), [], 0
        for length in cuts:
            parts.append(gated_delta_of_prompt(*(x[start : start + length] for x in inputs), state))
            start += length
        torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)


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
        torch.testing.assert_close(out[i].double(), wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(memory[page].cpu().double(), last, rtol=1e-4, atol=1e-5)
    others = [page for page in range(9) if page not in pages.tolist()]
    assert torch.equal(memory[others].cpu(), before[others])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_a_convolution_goes_on_where_it_was(runs: str, width: int, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(20, 6), torch.randn(width, 6), torch.randn(6)
    filters = weight.t().unsqueeze(1)
    wanted = torch.nn.functional.conv1d(x.t()[None], filters, bias, padding=width - 1, groups=6)[0, :, :20].t()
    state, parts, start = torch.zeros(width - 1, 6), [], 0
    for length in (1, 2, 9, 8):
        parts.append(conv_of_prompt(x[start : start + length], weight, bias, state))
        start += length
    torch.testing.assert_close(torch.cat(parts), wanted)
    torch.testing.assert_close(state, x[21 - width :])
    memory, pages, begins = some_pages(in_pages(6, width - 1, 6), 4)
    places = [9, 0, 13, 0]
    for i in (0, 2):
        memory[pages[i]] = x[places[i] - width + 1 : places[i]]
    device = request.getfixturevalue("triton_device") if runs == "triton" else torch.device("cpu")
    sent = [t.to(device) for t in (x[places], weight, bias, memory, pages, begins)]
    torch.testing.assert_close(conv_of_tokens(*sent).cpu(), wanted[places])
    kept = sent[3][sent[4]].cpu()
    torch.testing.assert_close(kept[0], x[11 - width : 10])
    torch.testing.assert_close(kept[1], torch.cat((torch.zeros(width - 2, 6), x[:1])))
