"""What shows on a GPU only: races of kernels that start early, tiles that are too large, kernels compiled too late."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from runner_fakes import request
from test_encoders import load as load_encoder
from test_encoders import write as write_encoder
from torch import Tensor

from aengine.ipc.messages import ModelRunnerOutput
from aengine.runner.attention.prefill import TritonPrefill
from aengine.runner.model_runner import ModelRunner
from aengine.runner.startup.encoder import _run as run_encoder

pytestmark = pytest.mark.gpu

MakeCheckpoint = Callable[..., Checkpoint]
NUM_DECODES, BLOCK_SIZE, MAX_LEN = 8, 4, 96


def poison(runner: ModelRunner, positions: list[int]) -> None:
    """NaN where the next step will write keys and values: of row i at positions[i]."""
    width = MAX_LEN // BLOCK_SIZE
    for layer in runner.kv_memory.layers.values():  # type: ignore[attr-defined]
        for row, position in enumerate(positions):
            layer.cache[row * width + position // BLOCK_SIZE, position % BLOCK_SIZE] = torch.nan
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def mixed_steps(
    runner: ModelRunner, prompts: list[list[int]], late: list[list[int]], *, poisoned: bool
) -> tuple[list[ModelRunnerOutput], list[Tensor]]:
    """Answers and logits of steps in which the ``prompts`` decode, each beside one of ``late``."""
    batch = Batch(runner, MAX_LEN)
    batch.start(prompts)
    rows = list(range(len(prompts)))
    width = MAX_LEN // BLOCK_SIZE
    answers, logits = [], []
    for i, prompt in enumerate(late):
        row = len(prompts)
        new = request(row, prompt, range(row * width, (row + 1) * width))
        if poisoned:
            poison(runner, [len(p) + i for p in prompts])
        answer, of_step = batch._step([*rows, row], [1] * len(rows) + [len(prompt)], new_requests=[new])
        assert of_step is not None
        answers.append(answer)
        logits.append(of_step.cpu())
        batch.end([row])
    batch.end(rows)
    return answers, logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("arch", "size"), [("llama", "9 heads"), ("qwen2", "14 heads")])
def test_decodes_beside_prompts_read_what_the_step_writes(
    checkpoint: MakeCheckpoint, arch: str, size: str, dtype: str, rng: random.Random
) -> None:
    """Attention starts before the kernel has ended that writes the tokens' own keys and values."""
    model = checkpoint(arch, "float32", size)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(rng.randint(1, 30))] for _ in range(NUM_DECODES)]
    late = [[rng.randrange(model.vocab_size) for _ in range(rng.randint(8, 56))] for _ in range(60)]
    outcomes = []
    for is_eager, is_poisoned in ((True, False), (False, False), (False, True), (True, True)):
        runner = make_runner(model.folder, dtype=dtype, enforce_eager=is_eager, kv_cache_memory_bytes=64 * MIB)
        outcomes.append(mixed_steps(runner, prompts, late, poisoned=is_poisoned))
        del runner
    for (answers, logits), how in zip(
        outcomes, ("eager", "graphs", "graphs, poisoned", "eager, poisoned"), strict=True
    ):
        assert not any(answer.errors for answer in answers), how
        assert all(of_step.isfinite().all() for of_step in logits), how
    eager, graphs, graphs_poisoned, eager_poisoned = outcomes
    for plain, poisoned in ((graphs, graphs_poisoned), (eager, eager_poisoned)):
        assert plain[0] == poisoned[0]
        assert all(torch.equal(a, b) for a, b in zip(plain[1], poisoned[1], strict=True))
    if dtype == "float32":  # of one step: two tokens that are equally likely may part the texts
        torch.testing.assert_close(graphs[1][0], eager[1][0], rtol=1e-3, atol=1e-3)


class FailingLibrary(TritonPrefill):
    """A library that was fine when the engine started."""

    failed = False

    def is_faster(self, query_lens: Any, seq_lens: Any) -> bool:
        return not self.failed

    def prefill(self, *args: Any) -> None:
        self.failed = True


def test_a_library_that_fails_changes_nothing(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """Our own kernel takes over in the middle of a step, with a plan that has only just been made."""
    model = checkpoint("llama", "bfloat16", "medium")
    settings = {"dtype": "bfloat16", "max_model_len": 1000, "max_num_batched_tokens": 4096, "enforce_eager": True}
    runner = make_runner(
        model.folder, attention_backend="triton", kv_cache_memory_bytes=512 * MIB, block_size=16, **settings
    )
    for _ in range(10):
        prompts = [[rng.randrange(model.vocab_size) for _ in range(rng.randint(1, 900))] for _ in range(4)]
        outcomes = []
        for backend in (TritonPrefill(), FailingLibrary()):
            runner.kv_memory.prefill = backend  # type: ignore[attr-defined]
            outcomes.append(Batch(runner, 1000).tokens_and_logits(prompts, 1))
        assert outcomes[0][0] == outcomes[1][0] and torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("length", [300, 3071, 3072, 6000])
def test_large_heads(checkpoint: MakeCheckpoint, length: int, rng: random.Random) -> None:
    model = checkpoint("qwen3", "bfloat16", "heads of 256")
    runner = make_runner(
        model.folder,
        dtype="bfloat16",
        attention_backend="triton",
        max_model_len=length + 8,
        block_size=16,
        kv_cache_memory_bytes=1024 * MIB,
        max_num_batched_tokens=8192,
        max_num_seqs=4,
    )
    prompt = [rng.randrange(model.vocab_size) for _ in range(length)]
    (tokens,), (logits,) = Batch(runner, length + 8).tokens_and_logits([prompt], 4)
    wanted, theirs = model.logits(prompt, tokens), model.logits(prompt, tokens, "bfloat16")
    ours = float((logits - wanted).norm() / wanted.norm())
    assert ours <= 1.2 * float((theirs - wanted).norm() / wanted.norm())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that have been compiled since the list was cleared last."""
    triton = pytest.importorskip("triton")
    found: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **kwargs: found.append(f"{src.name} {src.constants}")
    )
    return found


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled")
@pytest.mark.parametrize(
    ("arch", "size", "max_num_seqs"),
    [
        ("llama", "14 heads", 4),
        ("llama", "14 heads", 40),
        ("llama", "14 heads", 256),
        ("qwen3_moe", "long", 40),
        ("gpt_oss", "long", 40),
        ("gemma2", "long", 40),
    ],
)
def test_serving_compiles_nothing(
    checkpoint: MakeCheckpoint, arch: str, size: str, max_num_seqs: int, rng: random.Random, compiled: list[str]
) -> None:
    """A compilation while requests wait is a stall of a second or more."""
    model = checkpoint(arch, "bfloat16", size)
    runner = make_runner(
        model.folder,
        dtype="bfloat16",
        attention_backend="triton",
        max_model_len=4096,
        block_size=16,
        kv_cache_memory_bytes=4096 * MIB,
        max_num_batched_tokens=8192,
        max_num_seqs=max_num_seqs,
    )
    compiled.clear()
    batch = Batch(runner, 4096)
    for wanted, longest in ((1, 4000), (2, 4000), (4, 2000), (4, 60), (40, 100), (256, 30), (256, 20)):
        count = min(wanted, max_num_seqs)
        lengths = [longest, *(rng.randint(2, longest) for _ in range(count - 1))]
        prompts = [[rng.randrange(model.vocab_size) for _ in range(length)] for length in lengths]
        batch.start(prompts, temperature=[rng.choice((0.0, 1.0)) for _ in range(count)])
        rows = list(range(count))
        for some in {1, count // 2, count} - {0}:
            batch.decode(rows[:some])
        batch.end(rows)
    assert not compiled, compiled


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled")
def test_an_encoder_compiles_nothing(tmp_path: Path, rng: random.Random, compiled: list[str]) -> None:
    write_encoder(tmp_path, "bert", hidden_size=256, intermediate_size=512)
    model = load_encoder(tmp_path, device=DEVICE, dtype="bfloat16")
    runner, _ = model.allocate(model.offer)
    compiled.clear()
    for count, longest in ((1, 1), (1, 60), (3, 5), (9, 9), (9, 60), (1, 17), (30, 60)):
        run_encoder(runner, [rng.randint(1, longest) for _ in range(count)])
    assert not compiled, compiled


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no shared memory")
def test_the_limit_is_what_the_driver_says() -> None:
    from aengine.kernels.triton.launch import max_shared_memory

    properties = torch.cuda.get_device_properties(0)
    assert max_shared_memory() == properties.shared_memory_per_block_optin
    known = {(7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448}
    assert max_shared_memory() == known.get((properties.major, properties.minor), max_shared_memory())


def test_long_prompts_by_cudnn(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """Its logits are as near to float32 as those of our own kernel; lengths with and without padding."""
    model = checkpoint("llama", "bfloat16", "medium")
    settings = {"dtype": "bfloat16", "max_model_len": 5000, "max_num_batched_tokens": 8192, "block_size": 16}
    prompts = [[rng.randrange(model.vocab_size) for _ in range(n)] for n in (2048, 3000, 3001)]
    errors = {}
    for backend in ("triton", "cudnn"):
        runner = make_runner(model.folder, attention_backend=backend, kv_cache_memory_bytes=512 * MIB, **settings)
        while runner.prepares_after is not None:
            runner.prepare_more()
        tokens, logits = Batch(runner, 5000).tokens_and_logits(prompts, 2)
        wanted = [model.logits(p, t) for p, t in zip(prompts, tokens, strict=True)]
        errors[backend] = float(sum((a - b).norm() / b.norm() for a, b in zip(logits, wanted, strict=True)))
        assert runner.kv_memory.prefill.name == backend  # type: ignore[attr-defined]
    print(errors)
    assert errors["cudnn"] < 1.3 * errors["triton"]
