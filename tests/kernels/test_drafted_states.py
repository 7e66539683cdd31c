"""States behind which drafts lie: whatever is rejected, the outputs are those of the accepted tokens one by one."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from test_gated_delta import (
    KEY_DIM,
    KEY_HEADS,
    VALUE_DIM,
    VALUE_HEADS,
    by_definition,
    in_pages,
    joined,
    make_inputs,
    sent_to,
)
from torch import Tensor

from aengine.kernels.delta_memory import DeltaInputs, DeltaMemory
from aengine.kernels.drafted_states import (
    conv_of_drafts,
    gated_delta_of_drafts,
    keep_last,
    settle_drafts,
)
from aengine.kernels.short_conv import ungated

CPU = torch.device("cpu")
NUM_TOKENS, NUM_PAGES, MOST = 30, 6, 4  # tokens of a sequence, of which a step has at most MOST
Step = list[tuple[int, int, int]]


def play(rng: random.Random, num_sequences: int) -> list[Step]:
    """Steps of (sequence, position of its first token, number of tokens), of which one or more are accepted each time;
    of every number that can be rejected there is one."""
    at, steps, seen = [0] * num_sequences, [], set()
    while min(at) < NUM_TOKENS - MOST:
        going = [i for i in range(num_sequences) if at[i] < NUM_TOKENS - MOST and rng.random() < 0.8]
        step = [(i, at[i], rng.randint(1, MOST)) for i in going]
        if step:
            steps.append(step)
        for i, _, count in step:
            accepted = rng.randint(1, count)
            seen.add(count - accepted)
            at[i] += accepted
    return steps if len(seen) == MOST else play(rng, num_sequences)


def dirty(x: Tensor) -> Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x.random_(-1, NUM_TOKENS)


@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_what_is_rejected_leaves_nothing(runs: str, request: pytest.FixtureRequest, rng: random.Random) -> None:
    """Other tokens are drafted each time; padding is between the requests' last token and the end of a step."""
    torch.manual_seed(rng.getrandbits(30))
    device = request.getfixturevalue("triton_device") if runs == "triton" else CPU
    texts = [make_inputs(NUM_TOKENS) for _ in range(3)]
    zero = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    wanted = [by_definition(text, zero)[0] for text in texts]
    width = KEY_HEADS * KEY_DIM + VALUE_HEADS * (VALUE_DIM + 2)
    states = dirty(in_pages(NUM_PAGES, VALUE_HEADS, KEY_DIM, VALUE_DIM))
    pending, tags = dirty(in_pages(NUM_PAGES, 2 * MOST, width)), dirty(torch.zeros(NUM_PAGES, 2 * MOST).int())
    memory = DeltaMemory(*(x.to(device) for x in (states, pending, tags)))
    pages = torch.randperm(NUM_PAGES - 1)[:3]
    steps = play(rng, 3)
    places = dict.fromkeys(range(3), 0)
    for number, step in enumerate(steps):
        following = {
            i: next((p for later in steps[number + 1 :] for j, p, _ in later if j == i), None) for i, _, _ in step
        }
        parts, where, at = [], [], []
        for i, first, count in step:
            own = DeltaInputs(*(x[first : first + count].clone() for x in texts[i].tensors), KEY_HEADS)
            end = following[i]
            for x in own.tensors:
                x[count if end is None else end - first :] = torch.rand_like(x[:1])[0]
            parts.append(own)
            where += [int(pages[i])] * count
            at += range(first, first + count)
        padding = DeltaInputs(*(torch.ones_like(x[:1]).expand(2, -1) for x in parts[0].tensors), KEY_HEADS)
        inputs, gates = sent_to(device, joined([*parts, padding]))
        sent = [torch.tensor(column).to(device) for column in (where + [NUM_PAGES - 1] * 2, at + [0, 0])]
        out = gated_delta_of_drafts(inputs, gates, memory, *sent).cpu()
        begin = 0
        for i, first, count in step:
            right = count if following[i] is None else following[i] - first
            torch.testing.assert_close(
                out[begin : begin + right].double(), wanted[i][first : first + right], rtol=1e-3, atol=1e-3
            )
            places[i], begin = first + right, begin + count
    last = torch.tensor([places[i] for i in range(3)])
    settle_drafts(memory, pages.to(device), last.to(device), torch.ones(3, dtype=torch.int64).to(device))
    right = torch.stack([by_definition(texts[i].of(slice(places[i])), zero)[1] for i in range(3)])
    torch.testing.assert_close(memory.states[pages.to(device)].cpu().double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("runs", ["torch", "triton"])
def test_a_convolution_forgets_what_is_rejected(
    runs: str, width: int, request: pytest.FixtureRequest, rng: random.Random
) -> None:
    """Long spans of prompts stand behind those that may have drafts."""
    torch.manual_seed(rng.getrandbits(30))
    device = request.getfixturevalue("triton_device") if runs == "triton" else CPU
    channels, given = 150, torch.randn(3, NUM_TOKENS, 7 + 150 * rng.choice([1, 3]))[..., 7:]
    weight, bias = torch.randn(width, channels), torch.randn(channels)
    texts, c = (t if isinstance(t, float) else t.unflatten(0, (3, -1)) for t in ungated(given.flatten(0, 1), weight))
    filters, padded = weight.t().unsqueeze(1), F.pad(texts, (0, 0, width - 1, 0))
    wanted = F.conv1d(padded.transpose(1, 2), filters, bias, groups=channels).transpose(1, 2) * c
    ring = dirty(in_pages(NUM_PAGES, width - 1 + MOST, channels)).to(device)
    pages, at = torch.randperm(NUM_PAGES)[:3].tolist(), [0] * 3
    for _ in range(30):
        short = [(i, rng.randint(1, MOST)) for i in range(3) if at[i] < NUM_TOKENS - MOST and rng.random() < 0.6]
        long = [(i, rng.randint(MOST + 1, 9)) for i in range(3) if at[i] < NUM_TOKENS - 9 and rng.random() < 0.2]
        step = short + [(i, count) for i, count in long if i not in dict(short)]
        if not step:
            continue
        accepted = [rng.randint(1, count) if (i, count) in short else count for i, count in step]
        x = [given[i, at[i] : at[i] + count].clone() for i, count in step]
        for own, right in zip(x, accepted, strict=True):
            own[right:] = rng.random()
        lens = [count for _, count in step]
        where = torch.tensor([pages[i] for i, _ in step]).repeat_interleave(torch.tensor(lens)).to(device)
        places = torch.cat([torch.arange(at[i], at[i] + count) for i, count in step]).to(device)
        num_short = sum(count for _, count in short)
        sent = [t.to(device) for t in (torch.cat(x), weight, bias)]
        y = conv_of_drafts(*sent, ring, where, places, num_short).cpu().split(lens)
        ends = torch.tensor(lens).cumsum(0)[len(short) :]
        last = torch.cat([torch.arange(end - MOST, end) for end in ends.tolist()] or [ends]).to(device)
        keep_last(sent[0][last], ring, where[last], places[last])
        for (i, _), own, right in zip(step, y, accepted, strict=True):
            torch.testing.assert_close(own[:right], wanted[i, at[i] : at[i] + right])
            at[i] += right
    assert min(at) > MOST
