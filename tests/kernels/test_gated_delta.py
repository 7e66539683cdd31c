"""The gated delta rule and the short convolution: prompts in any chunks against the definition, token by token."""

from __future__ import annotations

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


def test_tokens_of_several_sequences() -> None:
    torch.manual_seed(1)
    inputs, states = make_inputs(), torch.randn(NUM_TOKENS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    out, after = gated_delta_of_tokens(*inputs, states.clone())
    for i in range(5):
        wanted, last = by_definition(*(x[i : i + 1] for x in inputs), states[i])
        torch.testing.assert_close(out[i].double(), wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after[i].double(), last, rtol=1e-4, atol=1e-5)


def test_a_convolution_goes_on_where_it_was() -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(20, 6), torch.randn(4, 6), torch.randn(6)
    filters = weight.t().unsqueeze(1)
    wanted = torch.nn.functional.conv1d(x.t()[None], filters, bias, padding=3, groups=6)[0, :, :20].t()
    state, parts, start = torch.zeros(3, 6), [], 0
    for length in (1, 2, 9, 8):
        parts.append(conv_of_prompt(x[start : start + length], state, weight, bias))
        start += length
    torch.testing.assert_close(torch.cat(parts), wanted)
    torch.testing.assert_close(state, x[-3:])
    states = torch.stack([torch.zeros(3, 6), x[:3], x[10:13]])
    out, after = conv_of_tokens(torch.stack((x[0], x[3], x[13])), states, weight, bias)
    torch.testing.assert_close(out, wanted[[0, 3, 13]])
    torch.testing.assert_close(after[1:], torch.stack((x[1:4], x[11:14])))
