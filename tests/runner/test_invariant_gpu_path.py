"""The GPU's runner with a batch-invariant policy on the CPU, its kernels in Triton's interpreter: right tokens, and
log-probabilities whose bits depend on nothing but the request."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_gpu_path
import torch
from plain_llama import PlainLlama
from test_gpu_path import NUM_LAYERS, Launches, check_tokens, make_runner, steps, write_model
from torch import Tensor
from triton_interpreter import add_in_order

from aengine.ipc.messages import DraftColumns, NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.policy import KernelPolicy
from aengine.runner.attention import triton_attention
from aengine.runner.attention.invariant import InvariantKvCache
from aengine.runner.model_runner import ModelRunner
from aengine.runner.weights import scope
from aengine.runner.weights.formats import WeightFormats
from aengine.runner.weights.invariant import InOrderFormat
from aengine.runner.weights.weight import Weight

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("wide_programs", "quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # padding is computed with whatever lies in memory
    pytest.mark.skipif(torch.cuda.is_available(), reason="the same is tested on the GPU itself"),
]
sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
ARCHS = ["llama", "qwen3", "mistral"]
LENGTH, DECODES = 40, 4


class AlignedFormat(InOrderFormat):
    """Of tensors in memory of their own, as a GPU's are: the file's may begin anywhere."""

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        return super().make({name: tensor.clone() for name, tensor in tensors.items()})


@pytest.fixture(autouse=True)
def like_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and attention are those that a GPU has by such a policy."""
    pytest.importorskip("triton")
    add_in_order(monkeypatch)
    monkeypatch.setattr(triton_attention, "GpuKvCache", InvariantKvCache)
    monkeypatch.setattr(scope, "invariant_format", lambda form, *where: AlignedFormat(form.dtype))


def invariant_runner(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> ModelRunner:
    choose = test_gpu_path.choose_formats

    def choose_formats(*args: Any) -> WeightFormats:
        return replace(choose(*args), policy=KernelPolicy(batch_invariant=True))

    with monkeypatch.context() as patch:
        patch.setattr(test_gpu_path, "choose_formats", choose_formats)
        return make_runner(folder, like_gpu=True, **how)


def test_the_same_tokens(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, rng.choice(ARCHS))
    check_tokens(make_runner(folder, like_gpu=False), invariant_runner(folder, monkeypatch), rng)


def test_what_is_read_before_a_wait_is_written_by_then(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans of prompts; of decodes there are none."""
    runner, num_checked = invariant_runner(write_model(tmp_path, "llama"), monkeypatch), []
    for out in steps(rng)[:4]:
        with monkeypatch.context() as patch, triton_everywhere(), Launches(patch) as launches:
            runner.execute_model(out)
            runner.sample_tokens(None)
        num_checked.append(launches.check())
    assert num_checked == [NUM_LAYERS, 0, NUM_LAYERS, NUM_LAYERS]


class Steps:
    """Steps of a runner: of row 0, whose log-probabilities are kept, and of others."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]]) -> None:
        self._runner, self._prompts = runner, prompts
        self.known: set[int] = set()
        self.found: list[tuple[int, float]] = []  # tokens of row 0 and their log-probabilities; the others ask for none

    def run(self, batch: dict[int, int], drafts: Sequence[int] = ()) -> None:
        """Compute so many tokens of each row, the first with ``drafts``."""
        out = SchedulerOutput(0, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()))
        for row in batch.keys() - self.known:
            ids, blocks = int32(self._prompts[row]), int32(range(6 * row, 6 * row + 6))
            out.new_requests.append(NewRequest(row, ids, len(ids), 0, blocks, temperature=0.0, logprobs=min(0, -row)))
        self.known |= batch.keys()
        if drafts:
            counts = [len(drafts) if row == 0 else 0 for row in batch]
            out.drafts = DraftColumns(int32(counts), int32(drafts), int32([0] * len(batch)))
        self._runner.execute_model(out)
        answer = self._runner.sample_tokens(None).get()
        assert answer.errors == []
        if (columns := answer.logprobs) is not None:
            ids = (answer.token_ids[i] for i in columns.token_idx)
            self.found += zip(ids, columns.sampled, strict=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_log_probabilities_have_one_result(
    arch: str, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone; cut into chunks beside others, and decoded beside others; as a plain module computes them."""
    folder = write_model(tmp_path, arch)
    prompts = [[rng.randrange(300) for _ in range(n)] for n in (LENGTH, 30, 17, 25)]

    def new_steps() -> Steps:
        return Steps(invariant_runner(folder, monkeypatch), prompts)

    with triton_everywhere():
        alone = new_steps()
        for count in (LENGTH, *[1] * DECODES):
            alone.run({0: count})
        together = new_steps()
        together.run({1: 30})
        cuts = sorted(rng.sample(range(1, LENGTH), 2))
        for i, count in enumerate((cuts[0], cuts[1] - cuts[0], LENGTH - cuts[1])):
            together.run({1: 1, 0: count, 2: [9, 8, 1][i]})
        for _ in range(2):
            together.run({2: 1, 0: 1, 1: 1, 3: 1} if 3 in together.known else {2: 1, 3: 25, 0: 1})
        together.run({0: 3}, [alone.found[3][0], 299])  # the second draft is wrong, or by chance right
        assert together.found[: len(alone.found)] == alone.found
        if arch == "mistral":
            return
        ids = prompts[0] + [token_id for token_id, _ in alone.found]
        module = plain_module(folder)
        assert module.logprobs(ids, LENGTH) == [value for _, value in alone.found]


def plain_module(folder: Path) -> PlainLlama:
    from safetensors.torch import load_file

    from aengine.checkpoint.source import resolve_model
    from aengine.config import EngineConfig

    hf_config = resolve_model(EngineConfig.create(str(folder), {})).hf_config
    return PlainLlama(hf_config, load_file(folder / "model.safetensors"))
