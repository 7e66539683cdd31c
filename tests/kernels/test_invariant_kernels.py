"""Kernels of a batch-invariant policy: a row's bits are the same alone and in any batch, and right."""

from __future__ import annotations

import random

import pytest
import torch
from test_gpu_attention import DTYPES, Case, close, features, moved_cache
from torch import Tensor
from triton_interpreter import add_in_order

from aengine.kernels.activation import Activation, activate
from aengine.kernels.decode_plan import PartsWorkspace
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import MAX_PAIR_TOKENS, ExpertShape
from aengine.kernels.expert_types import ExpertGate, ExpertMatrices, InputNorm, Routing
from aengine.kernels.experts import add_experts, expert_product
from aengine.kernels.invariant_attention import attend_alone, attend_to_prompts, plan_prompts
from aengine.kernels.linear_tilings import LinearShape, choose_in_order
from aengine.kernels.ordered_linear import add_ordered_linear, ordered_linear
from aengine.kernels.policy import FASTEST, KernelPolicy
from aengine.kernels.rms_norm import rms_norm

pytestmark = pytest.mark.slow
HALF = DTYPES[-1]  # bfloat16 on a GPU


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch, triton_device: torch.device) -> None:
    """What matrix instructions do tests/gpu/test_gpu_batch_invariant.py sees."""
    if triton_device.type == "cpu":
        add_in_order(monkeypatch)


# -- products


@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
def test_a_row_of_a_product_has_one_result(
    kind: str, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    k, n = 8 * rng.randint(1, 60), rng.randint(1, 130)
    activation: Activation = rng.choice(["silu", "gelu", "gelu_tanh"])
    x = torch.randn(300, k, generator=gen).to(HALF)
    weight = torch.randn(2 * n if kind == "gated" else n, k, generator=gen).to(HALF)
    bias = torch.randn(len(weight), generator=gen).to(HALF) if rng.random() < 0.5 else None
    residual = torch.randn(300, n, generator=gen).to(HALF)
    where = weight.to(triton_device), None if bias is None else bias.to(triton_device)

    def product(rows: slice) -> Tensor:
        own = x[rows].clone().to(triton_device)
        if kind == "add":
            out = residual[rows].clone().to(triton_device)
            add_ordered_linear(out, own, *where)
            return out.cpu()
        out_dtype = None if kind == "gated" else torch.float32
        return ordered_linear(own, *where, out_dtype, activation if kind == "gated" else None).cpu()

    together = product(slice(0, 300))
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if kind == "gated":
        gate, up = wanted.chunk(2, 1)
        wanted = activate(gate, activation) * up
    assert close(together, wanted + (residual.double() if kind == "add" else 0), HALF)
    for size in (1, 1, 2, rng.randint(3, 64), rng.randint(65, 128), rng.randint(129, 290)):
        begin = rng.randrange(300 - size)
        assert torch.equal(product(slice(begin, begin + size)), together[begin : begin + size]), size


def test_any_number_of_rows_has_a_tiling() -> None:
    for rows in range(1, 400):
        for kind in ("plain", "gated", "add"):
            for n, k in ((64, 64), (1024, 3072), (4096, 14336), (151936, 1024)):
                for device in ("", "NVIDIA H200"):
                    tiling = choose_in_order(device, LinearShape(kind, n, k), rows)  # type: ignore[arg-type]
                    assert tiling.block_n % 64 == 0 and tiling.block_m >= 16 and tiling.num_warps % 4 == 0


def test_a_row_of_experts_has_one_result(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    policy, shape = KernelPolicy(batch_invariant=True), ExpertShape(5, 64, 32, 2)
    assert FASTEST.expert_tiling(shape, 1) is None
    n = rng.randint(90, 200)  # blocks of 64 and of 128 slots

    def stack(out_features: int, in_features: int) -> ExpertMatrices:
        weight = torch.randn(shape.num_experts, out_features, in_features, generator=gen) / 8
        return ExpertMatrices(weight.to(HALF).to(triton_device))

    first, second = stack(2 * shape.intermediate_size, shape.hidden_size), stack(64, shape.intermediate_size)
    x, residual = (torch.randn(n, shape.hidden_size, generator=gen).to(HALF).to(triton_device) for _ in range(2))
    ids = torch.stack([torch.randperm(shape.num_experts, generator=gen)[:2] for _ in range(n)]).int().to(triton_device)
    weights = torch.rand(n, 2, generator=gen).to(triton_device)
    norm = InputNorm(torch.ones(shape.hidden_size, dtype=HALF, device=triton_device), 1e-5)

    def product(rows: Tensor) -> Tensor:
        routing = Routing(ids[rows].contiguous(), weights[rows].contiguous())
        plan = plan_experts(routing, shape, policy.expert_tiling(shape, len(rows)), can_group=True)
        out = residual[rows]
        add_experts(out, expert_product(x[rows], first, plan, ExpertGate(), norm), second, plan)
        return out

    together = product(torch.arange(n, device=triton_device))
    for size in (1, MAX_PAIR_TOKENS, rng.randint(5, 30), rng.randint(40, 80)):
        rows = torch.randperm(n, generator=gen)[:size].to(triton_device)
        assert torch.equal(product(rows), together[rows]), size


def test_a_norm_has_one_result(gen: torch.Generator, triton_device: torch.device) -> None:
    x, weight = torch.randn(40, 72, generator=gen).to(triton_device), torch.randn(72, generator=gen).to(triton_device)
    together = rms_norm(x, weight, 1e-5)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 40)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-5), together[rows])


# -- attention


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so short that the tests' sequences have several sizes of them."""
    from aengine.kernels.triton import invariant_attention

    monkeypatch.setattr(invariant_attention, "LEAST_PART", 64)
    monkeypatch.setattr(PartsWorkspace, "MOST_PARTS", 2)


def attend(case: Case, device: torch.device, cache: Tensor, qkv: Tensor, query_lens: list[int]) -> Tensor:
    """The attention of each sequence's last tokens, so many of each, which are written; single ones are alone."""
    n = len(query_lens)
    q = qkv.view(len(qkv), -1, case.head_dim)[:, : case.num_heads]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    lens, rows = torch.tensor(case.seq_lens, dtype=torch.int32, device=device), case.rows.to(device)
    group, table = case.num_heads // case.num_kv_heads, case.table.to(device)
    plan = plan_prompts(rows, starts, lens, len(q), group, case.head_dim)
    out = attend_to_prompts(q, cache, table, plan, case.scores(device))
    workspace = PartsWorkspace(n, case.num_heads, case.num_kv_heads, case.head_dim, device)
    for i in (i for i in range(n) if query_lens[i] == 1):
        at = slice(int(starts[i]), int(starts[i]) + 1)
        where = (q[at], cache, table, rows[i : i + 1], lens[i : i + 1], case.scores(device), workspace)
        attend_alone(*where, out[at])
    assert workspace.counters.sum() == 0, "a counter was not put back"
    return out


def a_case(rng: random.Random, gen: torch.Generator, dtype: torch.dtype, lens: list[int], head_dim: int) -> Case:
    num_kv_heads = rng.choice([1, 2])
    return Case(
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4]),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=rng.choice([4, 16, 32]),
        window=rng.choice([None, 7, 100]),
        seq_lens=lens,
        query_lens=list(lens),
        dtype=dtype,
        gen=gen,
        with_norm=False,
        **features(rng, head_dim),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_and_queries_alone_are_right(
    dtype: torch.dtype, rng: random.Random, gen: torch.Generator, triton_device: torch.device, short_parts: None
) -> None:
    """What is before the window of a step's first query is a block of NaN by now."""
    lens = [rng.choice([1, 15, 16, 17, rng.randint(1, 200)]) for _ in range(3)]
    case = a_case(rng, gen, dtype, lens, rng.choice([16, 80, 128]))
    query_lens = [rng.choice([1, rng.randint(1, s)]) for s in lens]
    case = Case(**{**vars_of(case), "query_lens": query_lens, "with_norm": True})
    nobodys = int(case.cache[:, 0, 0, 0, 0].isnan().nonzero()[0])
    for row, seq_len, query_len in zip(case.rows.tolist(), lens, query_lens, strict=True):
        if case.window is not None:
            case.table[row, : max(0, seq_len - query_len - case.window + 1) // case.block_size] = nobodys
    cache = moved_cache(case, triton_device)
    qkv = case.write(triton_device, cache)
    assert close(attend(case, triton_device, cache, qkv, case.query_lens), case.expected(), dtype)


def vars_of(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_has_one_result(
    dtype: torch.dtype, rng: random.Random, gen: torch.Generator, triton_device: torch.device, short_parts: None
) -> None:
    """As part of a whole prompt, of a chunk that begins and ends anywhere, and alone beside others and padding."""
    case = a_case(rng, gen, dtype, [rng.randint(140, 300), rng.randint(1, 100)], rng.choice([32, 48]))
    cache = moved_cache(case, triton_device)
    qkv = case.write(triton_device, cache)
    whole = attend(case, triton_device, cache, qkv, case.seq_lens)
    length, n = case.seq_lens
    for _ in range(4):
        begin = rng.randrange(length)
        end = rng.choice([begin + 1, rng.randint(begin + 1, length)])
        own = torch.cat((qkv[length:], qkv[begin:end]))
        part = Case(**{**vars_of(case), "seq_lens": [n, end], "query_lens": [n, end - begin]})
        part.table, part.rows, part.sinks = case.table, case.rows.flip(0), case.sinks
        out = attend(part, triton_device, cache, own, part.query_lens)
        assert torch.equal(out, torch.cat((whole[length:], whole[begin:end]))), (begin, end)
    positions = torch.tensor([0, length - 1, *(rng.randrange(length) for _ in range(8))], device=triton_device)
    rows = case.rows[:1].to(triton_device).expand(len(positions) + 2).clone()
    rows[-2:] = -1
    lens = torch.cat((positions + 1, positions.new_zeros(2))).int()
    q = torch.cat((qkv[positions], torch.full_like(qkv[:2], torch.nan))).view(len(rows), -1, case.head_dim)
    workspace = PartsWorkspace(len(rows), case.num_heads, case.num_kv_heads, case.head_dim, triton_device)
    out = torch.full((len(rows), case.num_heads * case.head_dim), 7.0, dtype=dtype, device=triton_device)
    table, how = case.table.to(triton_device), case.scores(triton_device)
    attend_alone(q[:, : case.num_heads], cache, table, rows, lens, how, workspace, out)
    assert torch.equal(out[:-2], whole[positions])
    assert (out[-2:] == 7).all(), "padding was written"
