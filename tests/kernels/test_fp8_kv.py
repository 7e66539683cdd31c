"""Keys and values in FP8: the codes, and attention over them by torch and by the Triton kernels."""

from __future__ import annotations

import random

import pytest
import torch
from test_gpu_attention import Case, close, draw
from torch import Tensor

from aengine.kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from aengine.kernels.dispatch import torch_reference
from aengine.kernels.kv_codes import kept_kv, kv_numbers
from aengine.kernels.paged_attention import PromptLayers, Scores
from aengine.kernels.varlen_attention import plan_prompts, varlen_attention
from aengine.kernels.write_qkv import apply_rope_and_write_kv

NAN = float("nan")


@pytest.fixture(params=[True, False], ids=["float8", "bytes"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that knows float8_e4m3fn, and on one that does not."""
    pytest.importorskip("triton")
    if not request.param:
        from aengine.kernels.triton import kv_codes

        monkeypatch.setattr(kv_codes, "has_fp8", lambda: False)


def reference_codes(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3, of two as near the even one, by search among all of them."""
    table = torch.arange(127, dtype=torch.uint8)
    numbers = table.view(torch.float8_e4m3fn).double()
    size = x.double().abs().clamp(max=448)
    above = torch.searchsorted(numbers, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - size, size - numbers[below]
    takes_up = (up < down) | ((up == down) & (above % 2 == 0))
    codes = torch.where(takes_up, above, below)
    codes = torch.where(x.isnan(), 127, codes)
    return (codes + 128 * (x.signbit() & ~x.isnan())).to(torch.uint8)


def numbers_to_round(gen: torch.Generator) -> Tensor:
    """All halves between two codes and what is next to them; subnormals; zeros; what is too large, infinite, a NaN."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(1e9)), codes))
    odd = torch.tensor([0.0, 448, 449, 464, 500, 1e9, 3e38, torch.inf, NAN, 1e-9, 1e-40, 2**-10, 2**-9])
    some = torch.randn(999, generator=gen) * torch.randint(-12, 12, (999,), generator=gen).exp2()
    x = torch.cat((near, odd, some))
    return torch.cat((x, -x))


def test_codes_are_the_nearest(gen: torch.Generator) -> None:
    x = numbers_to_round(gen)
    kept = kept_kv(x.view(-1, 1, 1, 2).expand(-1, 2, 1, 2), torch.uint8, torch.ones(2, 1))
    for row in kept.unbind(1):
        assert torch.equal(row.flatten() & 0x7F, reference_codes(x) & 0x7F)
    back = kv_numbers(kept, torch.float32, torch.ones(2, 1))[:, 0].flatten()
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back[~x.isnan()].signbit(), x[~x.isnan()].signbit())
    assert back.nan_to_num().abs().max() == 448


@pytest.mark.usefixtures("known")
def test_kernels_write_the_same_codes(gen: torch.Generator, triton_device: torch.device) -> None:
    """Heads neither turned nor normalised are written as they are, whatever their scales."""
    x = numbers_to_round(gen)
    tokens = -(-len(x) // 32)
    x = torch.cat((x, torch.zeros(tokens * 32 - len(x)))).view(tokens, 2, 2, 8)
    for scales in (torch.ones(2, 2), torch.tensor([[2.0**-20, 0.37], [2.0**18, 3e-5]])):
        numbers = x * scales[:, :, None]
        qkv = torch.cat((torch.zeros(tokens, 1, 2, 8), numbers), 1).flatten(1).to(triton_device)
        cache = torch.full((tokens // 4 + 1, 2, 2, 4, 8), 99, dtype=torch.uint8, device=triton_device)
        cache, slots = cache.permute(0, 3, 1, 2, 4), torch.arange(tokens, device=triton_device)
        apply_rope_and_write_kv(qkv, slots, slots, None, None, 2, cache, scales.to(triton_device))
        written = cache.flatten(0, 1)[:tokens].cpu()
        expected = reference_codes(numbers / scales[:, :, None])
        is_number = ~numbers.isnan()
        assert torch.equal(written[is_number], expected[is_number])
        assert torch.equal(written[~is_number] & 0x7F, torch.full_like(written[~is_number], 0x7F))
        assert (cache.flatten(0, 1)[tokens:] == 99).all()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_read_every_code(triton_device: torch.device, dtype: torch.dtype) -> None:
    """As values, of which the attention of the first token has one."""
    from aengine.kernels.triton import kv_codes

    if kv_codes.is_interpreted and dtype == torch.bfloat16:
        pytest.skip("numpy, with which the interpreter multiplies, has no bfloat16")
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    cache = torch.zeros(16, 2, 1, 16, 16, dtype=torch.uint8)
    cache[:, 1, 0, 0] = codes
    cache = cache.to(triton_device).permute(0, 3, 1, 2, 4)
    rows, lens = (torch.arange(16, device=triton_device), torch.ones(16, dtype=torch.int32, device=triton_device))
    workspace = DecodeWorkspace(16, 1, 1, 16, triton_device)
    how = (None, None, 1, Scores(1.0, None), plan_decode(rows, lens, workspace, None), workspace)
    qkv, scales = torch.zeros(16, 3 * 16, dtype=dtype, device=triton_device), torch.ones(2, 1, device=triton_device)
    table = rows[:, None].int()
    out = decode_step_attention(qkv, cache, table, *how, is_raw=False, kv_scales=scales).cpu().view(16, 16)
    wanted = codes.view(torch.float8_e4m3fn).to(dtype)
    if kv_codes.is_interpreted and kv_codes.as_known(cache, scales).dtype != torch.int8:
        out[wanted.isnan()] = NAN  # the interpreter reads the NaN of float8_e4m3fn as 480
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


class Fp8Case:
    """A `Case` over codes. What no sequence owns, or has not written yet, is a NaN."""

    def __init__(self, case: Case, gen: torch.Generator) -> None:
        self.case = case
        self.scales = 0.02 + 0.04 * torch.rand(2, case.num_kv_heads, generator=gen)
        codes = kept_kv(case.cache.float(), torch.uint8, self.scales)
        self.cache = codes.permute(0, 2, 3, 1, 4).contiguous()
        owners = zip(case.rows.tolist(), case.context, case.seq_lens, case.query_lens, strict=True)
        for row, kv, seq_len, query_len in owners:
            old = seq_len - query_len
            rounded = kept_kv(kv.float(), torch.uint8, self.scales)
            kv[:old] = kv_numbers(rounded, torch.float32, self.scales).to(kv.dtype)[:old]
            assert row >= 0

    def cache_on(self, device: torch.device) -> Tensor:
        return self.cache.clone().to(device).permute(0, 3, 1, 2, 4)

    def new_of(self, cache: Tensor) -> Tensor:
        """The codes of the new tokens, [num_tokens, 2, num_kv_heads, head_dim]."""
        size = self.case.block_size
        return cache.cpu()[self.case.slots // size, self.case.slots % size]

    def close(self, out: Tensor, cache: Tensor) -> bool:
        """Whether ``out`` is the attention over what ``cache`` holds of the new tokens and the context."""
        turned = self.case.turned
        q, k, v = turned()
        new = self.new_of(cache)
        off = (new.int() - kept_kv(torch.stack((k, v), 1), torch.uint8, self.scales).int()).abs()
        assert (off > 0).float().mean() < (0.02 if self.case.dtype == torch.float32 else 0.1), (
            "other codes were written"
        )
        numbers = kv_numbers(new, torch.float64, self.scales.double())
        self.case.turned = lambda: (q, *numbers.unbind(1))  # type: ignore[method-assign]
        try:
            return close(out, self.case.expected(), self.case.dtype)
        finally:
            self.case.turned = turned  # type: ignore[method-assign]

    def write(self, device: torch.device, cache: Tensor) -> Tensor:
        case, qkv = self.case, self.case.qkv.clone().to(device)
        where = case.places.to(device), case.slots.to(device), case.rope_on(device), case.norms(device)
        apply_rope_and_write_kv(qkv, *where, case.num_heads, cache, self.scales.to(device))
        return qkv

    def decode(self, device: torch.device, qkv: Tensor, cache: Tensor, *, is_raw: bool) -> Tensor:
        case = self.case
        lens = torch.tensor(case.seq_lens, dtype=torch.int32).to(device)
        workspace = DecodeWorkspace(len(lens), case.num_heads, case.num_kv_heads, case.head_dim, device)
        plan = plan_decode(case.rows.to(device), lens, workspace, case.window)
        how = (case.rope_on(device), case.norms(device), case.num_heads, case.scores(device), plan, workspace)
        scales = self.scales.to(device)
        return decode_step_attention(qkv, cache, case.table.to(device), *how, is_raw=is_raw, kv_scales=scales)

    def prompts(self, device: torch.device, qkv: Tensor, cache: Tensor) -> Tensor:
        case = self.case
        layers = PromptLayers(case.num_heads, case.num_kv_heads, case.head_dim, case.dtype, case.window, True)
        lens = torch.tensor(case.seq_lens, dtype=torch.int32).to(device)
        where = case.rows.to(device), case.query_start_loc.to(device), lens, len(qkv)
        plan = plan_prompts(*where, layers, skip_single=False)
        q = qkv.view(len(qkv), -1, case.head_dim)[:, : case.num_heads]
        how = case.scores(device), self.scales.to(device)
        return varlen_attention(q, cache, case.table.to(device), plan, len(lens), *how)


@pytest.mark.usefixtures("known", "few_idle_programs")
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prompt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, decode: bool
) -> None:
    """What each kernel writes, and makes of what is there, beside the definition; and torch's on the same codes."""
    for plain in (True, False):
        case = draw(rng, gen, decode=decode, dtype=dtype, longest=150, plain=plain)
        kept = Fp8Case(case, gen)
        cache = kept.cache_on(triton_device)
        qkv = kept.write(triton_device, cache)
        assert kept.close(kept.prompts(triton_device, qkv, cache), cache), case
        if decode:
            assert kept.close(kept.decode(triton_device, qkv, cache, is_raw=False), cache), case
            cache = kept.cache_on(triton_device)
            out = kept.decode(triton_device, case.qkv.clone().to(triton_device), cache, is_raw=True)
            assert kept.close(out, cache), case
            others = torch.ones(kept.cache.shape, dtype=torch.bool).permute(0, 3, 1, 2, 4)
            others[case.slots // case.block_size, case.slots % case.block_size] = False
            assert torch.equal(cache.cpu()[others], kept.cache_on(torch.device("cpu"))[others]), "others were written"
    with torch_reference():
        cpu = torch.device("cpu")
        kept.cache[kept.cache == 127] = 0  # torch's reads what is masked: a CPU clears blocks that have a new owner
        cache = kept.cache_on(cpu)
        qkv = kept.write(cpu, cache)
        if decode:
            assert kept.close(kept.decode(cpu, qkv, cache, is_raw=False), cache), case
        assert kept.close(kept.prompts(cpu, qkv, cache), cache), case


@pytest.mark.usefixtures("few_idle_programs")
def test_scales_are_factors(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    """Very large and very small ones: the same codes give the same bits, as many times as large as the values' scale,
    where the queries make up for that of the keys. A scale far from its numbers saturates them, or makes zeros."""
    case = draw(rng, gen, decode=True, dtype=torch.float32, longest=60)
    kept = Fp8Case(case, gen)
    cache = kept.cache_on(triton_device)
    qkv = kept.write(triton_device, cache)
    outs = [kept.decode(triton_device, qkv, cache, is_raw=False), kept.prompts(triton_device, qkv, cache)]
    for power in (-60, 60):
        q = qkv.clone()
        q[:, : case.num_heads * case.head_dim] *= 2.0 ** (-power // 2)
        kept.scales *= torch.tensor([2.0 ** (power // 2), 2.0**power])[:, None]
        again = [kept.decode(triton_device, q, cache, is_raw=False), kept.prompts(triton_device, q, cache)]
        for out, other in zip(outs, again, strict=True):
            torch.testing.assert_close(other * 2.0**-power, out, rtol=1e-5, atol=1e-6)
        saturated = kept.cache_on(triton_device)
        kept.decode(triton_device, case.qkv.clone().to(triton_device), saturated, is_raw=True)
        new = kept.new_of(saturated)[:, 1] & 0x7F
        assert (new == (0x7E if power < 0 else 0)).float().mean() > 0.99
        kept.scales *= torch.tensor([2.0 ** -(power // 2), 2.0**-power])[:, None]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("place", [4 * 16, 6 * 16], ids=["key", "value"])
@pytest.mark.parametrize("number", [NAN, torch.inf, -1e30, 0.0])
def test_a_number_stays_with_its_sequence(
    gen: torch.Generator, triton_device: torch.device, number: float, place: int
) -> None:
    """A NaN makes one of the query heads of its key, or of its place in the value; what is too large saturates, and no
    number changes a bit of another sequence."""
    case = Case(4, 2, 16, 4, None, [9, 12, 5], [1, 1, 1], torch.float32, gen, with_norm=False)
    kept = Fp8Case(case, gen)

    def outs() -> list[Tensor]:
        cache = kept.cache_on(triton_device)
        decoded = kept.decode(triton_device, case.qkv.clone().to(triton_device), cache, is_raw=True)
        codes.append(kept.new_of(cache)[1])
        cache = kept.cache_on(triton_device)
        prompt = kept.prompts(triton_device, kept.write(triton_device, cache), cache)
        return [out.cpu().view(3, 4, 16) for out in (decoded, prompt)]

    codes: list[Tensor] = []
    before = outs()
    case.qkv[1, place] = number
    from aengine.kernels.triton import kv_codes

    found = outs()
    if number != number and kv_codes.as_known(kept.cache, kept.scales).dtype != torch.int8 and kv_codes.is_interpreted:
        found.pop()  # the interpreter reads the NaN of float8_e4m3fn as 480
    for out, clean in zip(found, before, strict=False):
        assert torch.equal(out[[0, 2]], clean[[0, 2]]) and torch.equal(out[1, 2:], clean[1, 2:])
        is_nan = torch.zeros(2, 16, dtype=torch.bool)
        if number != number:
            is_nan[:, slice(None) if place == 4 * 16 else 0] = True
        assert torch.equal(out[1, :2].isnan(), is_nan) and not torch.equal(out[1, :2], clean[1, :2])
        assert bool(out[1, :2][~is_nan].isfinite().all())
    own = codes[1][place // (6 * 16), 0, 0] & 0x7F
    assert own == 0x7F if number != number else own == (0x7E if number else own)
