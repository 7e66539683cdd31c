"""batch_invariant=True on a GPU: tokens and log-probabilities have the same bits alone, in any batch, however prompts
are cut and whatever graphs hold; and those of a module of plain torch over the same kernels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, GPU_VARIANTS, MIB, Batch, Checkpoint, make_runner
from invariant_targets import Targets, params
from plain_llama import PlainLlama
from safetensors.torch import load_file
from test_gpu_bfloat16 import FAMILIES
from test_gpu_engine import running
from tiny import VOCAB_SIZE, write_tiny_model

from aengine import ModelLoadError
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.kernels.linear_tilings import StreamedTiling
from aengine.kernels.ordered_linear import ordered_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0), reason="it is for compute capability 9.0"
    ),
]
MakeCheckpoint = Callable[..., Checkpoint]
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True, "block_size": 16}
HYBRIDS = ("lfm2", "qwen3-next", "qwen3.5")
LARGE: dict[str, Any] = {**SETTINGS, "max_model_len": 4096, "kv_cache_memory_bytes": 512 * MIB}


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
async def test_one_result_alone_and_in_200_batches(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    model = checkpoint(arch, "bfloat16", "medium")
    targets = Targets(rng, [3, 40, 130, 300, 700, 2100], model.vocab_size)
    settings = {**LARGE, "max_num_batched_tokens": 2048}
    async with running(model.folder, **settings) as engine:
        await targets.run_alone(engine)
        await targets.check_batches(engine, 200, 600)
    # In chunks of at most 96 tokens, kernel by kernel, and with drafts.
    async with running(model.folder, **settings | {"max_num_batched_tokens": 96, "enforce_eager": True}) as engine:
        await targets.check_batches(engine, 8, 600)
    async with running(model.folder, **settings, speculation="ngram_worker") as engine:
        await targets.check_batches(engine, 20, 600)


def check_logits(folder: Path, rng: random.Random, lengths: Sequence[int], vocab_size: int, **settings: Any) -> None:
    """Of a runner in this process: logits of some prompts and decodes together, and of each by itself; and of what was
    decoded, computed again as a prompt."""
    runner = make_runner(folder, **SETTINGS, enforce_eager=True, kv_cache_memory_bytes=256 * MIB, **settings)
    longest = max(lengths) + 8
    prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
    tokens, together = Batch(runner, longest).tokens_and_logits(prompts, 6)
    for i in rng.sample(range(len(prompts)), 3):
        own_tokens, alone = Batch(runner, longest).tokens_and_logits([prompts[i]], 6)
        assert own_tokens[0] == tokens[i] and torch.equal(alone[0], together[i]), f"prompt of {lengths[i]}"
        _, again = Batch(runner, longest).tokens_and_logits([prompts[i] + tokens[i][:6]], 0)
        assert torch.equal(again[0, 0], together[i, 6]), f"prompt of {lengths[i]}, as a prompt again"


@pytest.mark.parametrize("name", [*GPU_VARIANTS, *(name for name in FAMILIES if not name.startswith(HYBRIDS))])
def test_every_family(name: str, tmp_path: Path, rng: random.Random) -> None:
    arch, fields = FAMILIES.get(name) or (name, GPU_VARIANTS[name])
    folder = write_tiny_model(tmp_path, arch, seed=11, dtype="bfloat16", **fields)
    check_logits(folder, rng, [rng.randint(1, 80) for _ in range(24)], VOCAB_SIZE)


@pytest.mark.parametrize("size", ["heads of 256", "9 heads", "14 heads"])
def test_heads_of_other_sizes(checkpoint: MakeCheckpoint, size: str, rng: random.Random) -> None:
    model, lengths = checkpoint("llama", "bfloat16", size), [1, 700, 2100, *(rng.randint(1, 600) for _ in range(9))]
    check_logits(model.folder, rng, lengths, model.vocab_size, max_model_len=4096, max_num_batched_tokens=8192)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
async def test_log_probabilities_of_a_plain_module(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    """Of prompts and answers, bit by bit; how far they are from those of transformers in bfloat16 is printed."""
    model = checkpoint(arch, "bfloat16", "medium")
    module = plain_module(model.folder)
    worst = 0.0
    async with running(model.folder, **LARGE, enforce_eager=True) as engine:
        prompts = [[rng.randrange(model.vocab_size) for _ in range(n)] for n in (2, 17, 400, 1500)]
        how = [params(rng, logprobs=0, prompt_logprobs=0, max_tokens=32) for _ in prompts]
        done = await asyncio.gather(*(engine.generate(*one) for one in zip(prompts, how, strict=True)))
    for prompt, completion in zip(prompts, done, strict=True):
        logprobs, of_prompt = completion.choices[0].logprobs, completion.prompt_logprobs
        assert logprobs is not None and of_prompt is not None
        ours = [own[0].logprob for own in (*of_prompt, *logprobs) if own is not None]
        ids = [*prompt, *completion.token_ids]
        assert module.logprobs(ids, 1) == ours
        theirs = model.logits(ids[:1], ids[1:], "bfloat16").log_softmax(-1).cpu()
        taken = theirs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(ours) - taken).abs().max()))
    print(f"{arch}: largest difference of a log-probability from transformers' in bfloat16: {worst:.3g}")


def plain_module(folder: Path) -> PlainLlama:
    hf_config = resolve_model(EngineConfig.create(str(folder), {})).hf_config
    weights = {name: tensor.to(DEVICE) for name, tensor in load_file(folder / "model.safetensors").items()}
    return PlainLlama(hf_config, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
def test_all_tilings_of_a_product_add_up_in_one_order(
    kind: str, dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`choose_in_order` may return any of them."""
    from aengine.kernels.triton import linear_streamed

    torch.manual_seed(rng.getrandbits(60))
    n, k = rng.choice([(4096, 4096), (1024, 14336), (6144, 4096), (1000, 1032)])
    x = (torch.randn(256, k, device=DEVICE) * torch.randn(256, 1, device=DEVICE).exp()).to(dtype)
    weight = torch.randn(2 * n if kind == "gated" else n, k, device=DEVICE).to(dtype)
    residual = torch.randn(256, n, device=DEVICE).to(dtype)
    found = []
    for sizes in (
        (64, 16, 256, 4, 5),
        (64, 32, 128, 4, 4),
        (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 3),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 8, 2),
        *([] if kind == "gated" else [(128, 256, 64, 8, 3)]),  # the fastest of 4,096 rows, and not chosen yet
    ):
        monkeypatch.setattr(linear_streamed, "choose_in_order", lambda *shape, sizes=sizes: StreamedTiling(*sizes))
        if kind == "add":
            out = residual.clone()
            linear_streamed.multiply_in_order(x, weight, None, out, add=True)
        else:
            out = ordered_linear(x, weight, None, torch.float32, "silu" if kind == "gated" else None)
        found.append(out)
    assert all(torch.equal(out, found[0]) for out in found), [int((out != found[0]).sum()) for out in found]


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has all of these")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ({"quantization": "fp8"}, "is in fp8"),
        ({"attention_backend": "cudnn"}, "attention_backend='cudnn'"),
    ],
)
async def test_what_is_refused(checkpoint: MakeCheckpoint, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"batch_invariant=True: .*{reason}"):
        async with running(checkpoint("llama", "bfloat16").folder, **SETTINGS | settings):
            pass
