"""Layers that differ in heads, ropes, windows, soft caps and sinks, through the runner: against attention spelled out
in float64, on the torch bodies and on the Triton kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pairs import some
from torch import Tensor

from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.prefill import TritonPrefill
from aengine.runner.attention.torch_attention import KvCache
from aengine.runner.kv_spec import FullKV, LayerKV, WindowKV
from aengine.runner.layers.attention import AttentionLayer
from aengine.runner.model_config import ModelConfig
from aengine.runner.model_runner import ModelRunner
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.platforms.platform import Platform
from aengine.runner.rope import RopeConfig

CPU = torch.device("cpu")
VOCAB, BLOCK, MAX_LEN, ROWS, BORDER = 40, 4, 64, 4, 24
LONGROPE = {
    "short_factor": [1.0, 1.3, 2.0, 1.1],
    "long_factor": [3.0, 1.7, 5.0, 9.0],
    "original_max_position_embeddings": BORDER,
}
ROPES = (
    RopeConfig("default", 10000.0, {}, 16, MAX_LEN),
    RopeConfig("longrope", 500.0, LONGROPE, 8, MAX_LEN, interleaved=True),
    RopeConfig("default", 30.0, {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 10}, 12, MAX_LEN),
)


@dataclass
class Shape:
    heads: int
    kv_heads: int
    dim: int
    rope: int | None = None
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    value_dim: int | None = None  # given: the layer calls `attend`


SHAPES = [
    Shape(4, 2, 16, rope=0, window=7, has_sinks=True),
    Shape(4, 1, 32, rope=1, softcap=2.0),
    Shape(4, 2, 16, value_dim=12),
    Shape(2, 2, 16),
    Shape(6, 2, 16, rope=2, window=30, has_sinks=True, softcap=1.0),
]


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        return tuple(WindowKV(s.kv_heads, s.dim, s.window) if s.window else FullKV(s.kv_heads, s.dim) for s in SHAPES)

    @property
    def query_heads(self) -> tuple[int, ...]:
        return tuple(s.heads for s in SHAPES)


CONFIG = Config(
    model_type="test",
    vocab_size=VOCAB,
    hidden_size=1,
    intermediate_size=1,
    num_layers=len(SHAPES),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=MAX_LEN,
    tie_word_embeddings=False,
    ropes=ROPES,
    sliding_windows=tuple(s.window for s in SHAPES),
    checkpoint_dtype="float32",
)


@dataclass
class Scores:
    weight: Tensor


class Model:
    """Each layer's q, k and v follow from the token's id alone; the hidden states are the outputs of all layers."""

    def __init__(self, gen: torch.Generator, device: torch.device = CPU) -> None:
        widths = [(s.heads + 2 * s.kv_heads) * s.dim for s in SHAPES]
        self.tables = [torch.randn(VOCAB, width, generator=gen).to(device) for width in widths]
        self.sinks = [Scores(torch.randn(s.heads, generator=gen).to(device)) if s.has_sinks else None for s in SHAPES]
        self.layers = [
            AttentionLayer(i, s.heads, s.kv_heads, s.dim, 0.3, rope=s.rope, softcap=s.softcap, sinks=self.sinks[i])
            for i, s in enumerate(SHAPES)
        ]
        width = sum(s.heads * (s.value_dim or s.dim) for s in SHAPES)
        self.head = torch.randn(width, VOCAB, generator=gen).to(device)

    def split(self, i: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = SHAPES[i]
        heads = qkv.view(len(qkv), -1, shape.dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        return q, k, v[..., : shape.value_dim]

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any) -> Tensor:
        attn.begin(positions)
        outs = []
        for i, layer in enumerate(self.layers):
            qkv = self.tables[i][input_ids]
            if SHAPES[i].value_dim is None:
                outs.append(attn.forward(layer, qkv))
            else:
                q, k, v = self.split(i, qkv)
                outs.append(attn.attend(layer, q * (1 + (attn.first_lens() > BORDER).float())[:, None, None], k, v))
        return torch.cat(outs, 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head

    def expected(self, ids: list[int], first_len: int) -> Tensor:
        """Logits after the last of the ids, float64, of a request that had ``first_len`` tokens when it got its row."""
        outs = []
        at = torch.arange(len(ids))
        for i, shape in enumerate(SHAPES):
            q, k, v = (t.double() for t in self.split(i, self.tables[i].cpu()[torch.tensor(ids)]))
            if shape.rope is not None and shape.value_dim is None:
                q, k = (turned(t, ROPES[shape.rope], at, first_len) for t in (q, k))
                if shape.rope == 2:
                    q = q * (1 + 0.7 * torch.log(1 + torch.floor(at / 10)))[:, None, None]
            if shape.value_dim is not None and first_len > BORDER:
                q = q * 2  # what such a layer does by itself, as of one with longrope
            group = shape.heads // shape.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("hd,thd->ht", q[-1], k) * 0.3
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if shape.window:
                scores[:, : max(0, len(ids) - shape.window)] = -torch.inf
            sinks = self.sinks[i]
            if sinks is not None:
                scores = torch.cat((scores, sinks.weight.cpu().double()[:, None]), 1)
            weights = scores.softmax(1)[:, : len(ids)]
            outs.append(torch.einsum("ht,thd->hd", weights, v).flatten())
        return torch.cat(outs) @ self.head.cpu().double()


def turned(x: Tensor, rope: RopeConfig, at: Tensor, first_len: int) -> Tensor:
    """x [tokens, heads, dim], float64."""
    n = rope.rotary_dim
    exponents = torch.arange(0, n, 2).double() / n
    factors, by = torch.ones(n // 2).double(), 1.0
    if rope.rope_type == "longrope":
        factors = torch.tensor(LONGROPE["long_factor" if first_len > BORDER else "short_factor"]).double()
        by = (1 + torch.log(torch.tensor(MAX_LEN / BORDER)) / torch.log(torch.tensor(float(BORDER)))).sqrt().double()
    angles = at.double()[:, None, None] / (factors * rope.theta**exponents)
    first, second = (x[..., 0:n:2], x[..., 1:n:2]) if rope.interleaved else x[..., :n].chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles) * by
    both = (pairs.real, pairs.imag)
    return torch.cat((torch.stack(both, -1).flatten(-2) if rope.interleaved else torch.cat(both, -1), x[..., n:]), -1)


def make_runner(
    model: Model, *, like_gpu: bool, graphs: bool = False, platform: Platform | None = None, eager: bool = True
) -> ModelRunner:
    platform = platform or CpuPlatform()
    spec = KvCacheSpec(CONFIG, 200, BLOCK, torch.float32, platform.device, ROWS, MAX_LEN)
    cache: Any
    if like_gpu:
        from aengine.runner.attention.triton_attention import GpuKvCache

        cache = GpuKvCache(spec, TritonPrefill())
    else:
        cache = KvCache(spec)
    return ModelRunner(
        model,
        cache,
        vocab_size=VOCAB,
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        num_blocks=200,
        kv_groups=cache.layout.groups,
        platform=platform,
        graph_sizes=[1, 2, 4] if graphs else None,
        max_graph_tokens=64,
        enforce_eager=eager,
    )


def run(runner: ModelRunner, model: Model, rng: random.Random) -> None:
    """Greedy requests on both sides of longrope's border, in chunks and beside each other; each must get the tokens,
    and the log-probabilities, of attention spelled out."""
    pages = iter(rng.sample(range(200), 200))
    ids: dict[int, list[int]] = {}
    first_lens: dict[int, int] = {}
    todo: dict[int, int] = {}
    computed: dict[int, int] = {}
    late = {2: rng.randint(2, 12), 3: BORDER + rng.randint(1, 4)}
    start = {0: rng.randint(2, BORDER - 9), 1: BORDER + rng.randint(1, 9)}
    for step in range(9):
        new = []
        for row, length in (start if step == 0 else late if step == 3 else {}).items():
            ids[row] = [rng.randrange(VOCAB) for _ in range(length)]
            first_lens[row], computed[row] = length, 0
            counts = [-(-40 // group.block_size) for group in runner.tables.groups]
            blocks = int32(next(pages) for _ in range(sum(counts)))
            spans = int32(n for count in counts for n in (0, count))
            new.append(
                NewRequest(row, int32(ids[row]), length, 0, blocks, temperature=0.0, logprobs=1, block_spans=spans)
            )
        for row in ids:
            left = len(ids[row]) - computed[row]
            todo[row] = left if left == 1 else rng.randint(1, min(left, 20))
        rows = list(ids)
        rng.shuffle(rows)
        runner.execute_model(
            SchedulerOutput(
                step, new_requests=new, req_idx=int32(rows), num_scheduled_tokens=int32(todo[row] for row in rows)
            )
        )
        out = runner.sample_tokens(None).get()
        assert not out.errors
        sampled = {} if out.logprobs is None else dict(zip(out.logprobs.token_idx, out.logprobs.sampled))
        for i, row in enumerate(rows):
            computed[row] += todo[row]
            if computed[row] < len(ids[row]):
                assert out.token_ids[i] == -1
                continue
            wanted = model.expected(ids[row], first_lens[row]).log_softmax(0)
            token = out.token_ids[i]
            assert wanted[token] > wanted.max() - 1e-4, (step, row)
            assert sampled[i] == pytest.approx(float(wanted[token]), abs=2e-4)
            ids[row].append(token)


def test_torch(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(3):
        model = Model(gen)
        run(make_runner(model, like_gpu=False), model, rng)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", some([False, True], True))
@pytest.mark.usefixtures("wide_programs")
def test_triton(rng: random.Random, gen: torch.Generator, graphs: bool) -> None:
    """``graphs``: a step of decodes alone takes the fused kernel."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the same is tested on the GPU itself")
    model = Model(gen)
    with triton_everywhere():
        run(make_runner(model, like_gpu=True, graphs=graphs), model, rng)
