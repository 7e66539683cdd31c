"""Scheduler and runner together on models with windows: right tokens from a pool that their whole context would not fit
into, on the CPU's path and, in Triton's interpreter, on the GPU's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some
from scheduler_invariants import check_scheduler
from test_gpu_path import CPU, make_model

from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import Kind, pack, unpack
from aengine.kernels.dispatch import triton_everywhere
from aengine.params import SamplingParams
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.prefill import TritonPrefill
from aengine.runner.attention.torch_attention import KvCache
from aengine.runner.model_runner import ModelRunner
from aengine.runner.platforms.cpu import CpuPlatform

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too

BLOCK_SIZE, MAX_LEN, MAX_SEQS, STEP_TOKENS = 4, 128, 4, 24
WINDOW = 10
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": WINDOW, "num_hidden_layers": 2}),
    "mixed": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}


class Engine:
    """Two steps in flight, the second made before the first is answered."""

    def __init__(self, folder: Path, num_blocks: int, *, like_gpu: bool, **settings: Any) -> None:
        config, model = make_model(folder)
        spec = KvCacheSpec(config, num_blocks, BLOCK_SIZE, torch.float32, CPU, MAX_SEQS, MAX_LEN)
        if like_gpu:
            from aengine.runner.attention.triton_attention import GpuKvCache

            cache: Any = GpuKvCache(spec, TritonPrefill())
            for layer in cache.layers.values():
                layer.cache.fill_(torch.nan)  # what nobody has written must not be looked at
        else:
            cache = KvCache(spec)
        self._make_runner: Callable[[], ModelRunner] = lambda: ModelRunner(
            model,
            cache,
            vocab_size=config.vocab_size,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            num_blocks=num_blocks,
            kv_groups=cache.layout.groups,
            platform=CpuPlatform(),
            graph_sizes=[1, 2, 4] if like_gpu else None,
            max_graph_tokens=32,
            enforce_eager=True,
        )
        self.runner = self._make_runner()
        self._body = triton_everywhere if like_gpu else contextlib.nullcontext
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            kv_groups=cache.layout.groups,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=MAX_LEN,
            **settings,
        )
        self.requests: list[Request] = []
        self._in_flight: deque[Any] = deque()
        self.most_used = 0  # pages

    def add(self, prompt: Sequence[int], max_tokens: int, n: int = 1) -> None:
        params = SamplingParams(n=n, temperature=0, max_tokens=max_tokens)
        for index in range(n):
            name = f"r{len(self.requests) - index}"
            length = len(prompt) + max_tokens
            request = Request(
                name, prompt, params, seed=0, max_num_tokens=length, stop_token_ids=frozenset(), index=index
            )
            self.requests.append(request)
            self.scheduler.add_request(request)

    def run(self, num_steps: int = 10_000) -> None:
        """To the end, or so many steps."""
        scheduler = self.scheduler
        with self._body():
            while num_steps and not all(request.finish_reason for request in self.requests):
                out = scheduler.schedule() if len(self._in_flight) < 2 else None
                if out is not None:
                    num_steps -= 1
                    self.runner.execute_model(unpack(Kind.STEP, pack(out)))
                    self._in_flight.append(self.runner.sample_tokens(None))
                    self.most_used = max(self.most_used, scheduler.num_blocks - scheduler.num_free_blocks)
                else:
                    scheduler.update(self._in_flight.popleft().get())
                    check_scheduler(scheduler)

    def die(self) -> None:
        """The worker is a new one; nothing is known of its KV."""
        self._in_flight.clear()
        self.scheduler.preempt_all()
        self.runner = self._make_runner()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    from tiny import load_reference, write_tiny_model

    arch, fields = MODELS[request.param]
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param), arch, seed=5, **fields)
    return request.param, folder, load_reference(folder, arch)


def check(engine: Engine, reference: Any) -> None:
    """Every output is transformers' greedy one: each token is the likeliest, given those before."""
    for request in engine.requests:
        output = request.output_token_ids
        with torch.inference_mode():
            ids = torch.tensor([request.token_ids])
            logits = reference(ids, use_cache=False).logits[0, request.num_prompt_tokens - 1 : -1].float()
        best = logits.max(-1)
        gaps = best.values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float(gaps.max()) < 5e-5 * float(logits.abs().max()), (request, int(gaps.argmax()))


def prompts_of(rng: random.Random) -> list[list[int]]:
    shared = [rng.randrange(300) for _ in range(30)]
    prompts = [[rng.randrange(300) for _ in range(n)] for n in (1, 9, 50)]
    return [*prompts, shared + [1, 2], shared + [3]]


def pages(name: str, num_full: int, num_window: int) -> int:
    return num_window if name == "window" else num_full + num_window


def test_right_tokens_from_a_small_pool(model: Any, rng: random.Random) -> None:
    """Batched, chunked, with prefix hits; what has left a window goes to others at once."""
    name, folder, reference = model
    engine = Engine(folder, pages(name, 40, 22), like_gpu=False)
    for prompt in prompts_of(rng):
        engine.add(prompt, 14)
    engine.run()
    check(engine, reference)
    hits = engine.scheduler.prefix_cache_hits
    for prompt in prompts_of(rng)[:1]:
        engine.add([*engine.requests[2].token_ids, *prompt], 5)  # a conversation goes on
    engine.run()
    check(engine, reference)
    assert engine.scheduler.prefix_cache_hits - hits >= 60, "the window's last blocks were there"


def test_right_tokens_after_preemption_and_a_death(model: Any, rng: random.Random) -> None:
    name, folder, reference = model
    engine = Engine(folder, pages(name, 20, 10), like_gpu=False)
    for length in (9, 30, 12, 5):
        engine.add([rng.randrange(300) for _ in range(length)], 40)  # begun together, too long to end together
    engine.run(num_steps=25)
    engine.die()
    engine.run()
    check(engine, reference)
    assert name == "window" or engine.scheduler.rows.num_preemptions


def test_completions_of_one_prompt_share_it(model: Any, rng: random.Random) -> None:
    name, folder, reference = model
    engine = Engine(folder, pages(name, 40, 24), like_gpu=False)
    engine.add(prompts_of(rng)[2], 6, n=3)
    engine.run()
    check(engine, reference)
    assert [request.num_cached_tokens for request in engine.requests] == [0, 48, 48]


@pytest.mark.slow
@pytest.mark.parametrize("model", some(MODELS, "mixed"), indirect=True)
@pytest.mark.usefixtures("wide_programs")
def test_right_tokens_by_the_kernels_of_a_gpu(model: Any, rng: random.Random) -> None:
    """In few steps, as the interpreter is slow: chunks, decodes, blocks that change hands, a prefix hit."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the same is tested on the GPU itself")
    name, folder, reference = model
    engine = Engine(folder, pages(name, 14, 11), like_gpu=True)
    for length in (5, 34):
        engine.add([rng.randrange(300) for _ in range(length)], 4)
    engine.run()
    engine.add([*engine.requests[1].token_ids, 1, 2, 3], 3)
    engine.run()
    check(engine, reference)
    assert engine.requests[2].num_cached_tokens == 36


@pytest.mark.parametrize("length", [20, 60, 110])
def test_kv_stays_bounded_as_the_context_grows(tmp_path: Path, rng: random.Random, length: int) -> None:
    from tiny import load_reference, write_tiny_model

    arch, fields = MODELS["window"]
    folder = write_tiny_model(tmp_path, arch, seed=5, **fields)
    engine = Engine(folder, 40, like_gpu=False, enable_prefix_caching=False)
    engine.add([rng.randrange(300) for _ in range(3)], length)
    engine.run()
    check(engine, load_reference(folder, arch))
    # The window's nine tokens before a query, those of the steps in flight, and blocks begun at both ends.
    assert engine.most_used <= -(-(WINDOW + 2) // BLOCK_SIZE) + 2
