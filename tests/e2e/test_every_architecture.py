"""Every architecture through the whole engine, in a real worker process, against transformers on the same folder.

The weights are tiny and random; the models differ in what their configs can switch on. tests/models compares logits of
one model alone; here scheduler, KV cache, worker and model work together.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_api import settled
from pairs import some
from transformers import PreTrainedModel

from aengine import AsyncLLM, Completion, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import VARIANTS, VOCAB_SIZE, load_reference, write_tiny_model

MODELS = {name: fields for name, fields in VARIANTS.items() if name != "gpt_oss"} | {  # tests/models has it
    "mixed": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
}
"""The last is a Qwen2 whose three layers are a KV group each: two windows, and one that keeps all tokens."""
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 4, "num_threads": 1}
MIB = 2**20

Prompts = list[list[int]]


class Model:
    """A tiny model's folder, and what transformers says about sequences of its tokens."""

    def __init__(self, folder: Path, arch: str) -> None:
        fields, arch = MODELS[arch], "qwen2" if arch == "mixed" else arch
        self.folder = write_tiny_model(folder, arch, seed=11, **fields)
        self._reference: PreTrainedModel = load_reference(self.folder, arch)

    @torch.inference_mode()
    def check_greedy(self, prompt: Sequence[int], output: Sequence[int], length: int = 24, most: float = 1e-4) -> None:
        """Each token is the likeliest, given those before: by induction the sequence is transformers' greedy one.
        ``most``: by how much, in log-probability, it may be less likely."""
        assert len(output) == length
        logits = self._reference(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        best = logprobs.max(-1)
        for i, token_id in enumerate(output):
            gap = float(best.values[i] - logprobs[i, token_id])
            # Two tokens this close are one to float32 in another order of summation.
            assert gap <= most, f"position {i}: {token_id} instead of {int(best.indices[i])}, {gap:.2g} less likely"

    def check_all(self, prompts: Prompts, completions: Sequence[Completion]) -> None:
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.usage.prompt_tokens == len(prompt)
            self.check_greedy(prompt, completion.token_ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def model_of(arch: str) -> Model:
        if arch not in made:
            made[arch] = Model(tmp_path_factory.mktemp(arch), arch)
        return made[arch]

    return model_of


@pytest.fixture(
    params=some(MODELS, "llama", "mistral", "mixed")
)  # tests/models has the scenarios of all, in one process
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@asynccontextmanager
async def running(model: Model, **config: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(model.folder), **(SETTINGS | {"kv_cache_memory_bytes": 8 * MIB} | config)) as engine:
        yield engine
        await settled(engine)


def some_prompts(rng: random.Random) -> Prompts:
    """Lengths of 1 to 60; a third begin like one another, some of them for whole blocks and some within one."""
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 2, 4, 59, 60)]
    prompts += [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    for length in (8, 17, 23, 32, 39, 40):
        prompts.append(shared[:length] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))])
    rng.shuffle(prompts)
    return prompts


async def all_at_once(engine: AsyncLLM, prompts: Prompts) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(ids, GREEDY) for ids in prompts)))


async def test_alone_at_once_and_cached(model: Model, rng: random.Random) -> None:
    prompts = some_prompts(rng)
    async with running(model) as engine:
        for prompt in prompts[:4]:
            model.check_all([prompt], [await engine.generate(prompt, GREEDY)])
        model.check_all(prompts, await all_at_once(engine, prompts))
        again = await all_at_once(engine, prompts)
        model.check_all(prompts, again)
        for prompt, completion in zip(prompts, again, strict=True):
            # Every whole block but one that holds the last token, which must be computed for its logits.
            assert completion.usage.cached_tokens == (len(prompt) - 1) // 4 * 4
        # A conversation goes on: the hit reaches into what was generated.
        longer = [[*p, *c.token_ids[:10], 5] for p, c in zip(prompts, again, strict=True) if len(p) < 50]
        extended = await all_at_once(engine, longer)
        model.check_all(longer, extended)
        assert all(c.usage.cached_tokens > len(p) - 11 - 4 for p, c in zip(longer, extended, strict=True))
        assert engine.statistics().num_preemptions == 0


async def test_chunked_and_preempted(model: Model, rng: random.Random) -> None:
    """Steps of 16 tokens, a pool for hardly more than one request of the greatest length, and 19 of them at once."""
    prompts = some_prompts(rng)
    is_mixed, is_windowed = ("mixed" in model.folder.name), ("mistral" in model.folder.name)
    num_slabs, num_groups = (1, 3) if is_mixed else (3, 1)
    page_bytes = num_slabs * 2 * 2 * (16 if "qwen3" in model.folder.name else 8) * 4 * 4
    num_pages = 9 if is_windowed else 72 if is_mixed else 30  # a window and a step: 7 pages
    async with running(model, kv_cache_memory_bytes=num_pages * page_bytes, max_num_batched_tokens=16) as engine:
        assert engine.describe()["num_blocks"] == num_pages
        assert len(engine.describe()["kv_groups"]) == num_groups
        completions = await all_at_once(engine, prompts)
        if not (is_mixed or is_windowed):  # windows give back enough for some draws of lengths
            assert engine.statistics().num_preemptions > 0, engine.statistics()
        model.check_all(prompts, completions)


def test_the_test_can_fail(models: Callable[[str], Model]) -> None:
    model, prompt = models("llama"), [1, 2, 3]
    with torch.inference_mode():
        output = model._reference.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
        )
    ids = output[0, len(prompt) :].tolist()
    model.check_greedy(prompt, ids)
    with pytest.raises(AssertionError, match="position 20"):
        model.check_greedy(prompt, [*ids[:20], (ids[20] + 1) % VOCAB_SIZE, *ids[21:]])
