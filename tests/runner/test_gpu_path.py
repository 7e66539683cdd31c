"""The GPU's runner on the CPU, its kernels in Triton's interpreter, against the CPU's runner: the same tokens."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from pairs import some
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aengine.ipc.messages import (
    DraftColumns,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    float32,
    int32,
)
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.attention.backend import TritonAttention
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.prefill import TritonPrefill
from aengine.runner.attention.torch_attention import KvCache
from aengine.runner.graphs.cuda_graphs import graph_sizes
from aengine.runner.model_config import ModelConfig
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models import build_model, read_config
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.sampling.bitmask_memory import HostBitmasks
from aengine.runner.sampling.sampler import Sampling
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.loader import load_weights
from aengine.runner.weights.step_rows import StepRows

if TYPE_CHECKING:
    from aengine.runner.startup.setup import RunnerSetup

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, MAX_SEQS = 32, 16, 96, 8
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_programs")]
NUM_LAYERS = 2  # the interpreter is slow
SHAPES = {
    "llama": {"attention_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "num_key_value_heads": 6,
    },  # fmt: skip
}


sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too


def write_model(folder: Path, arch: str) -> Path:
    from tiny import write_tiny_model

    return write_tiny_model(folder, arch, num_hidden_layers=NUM_LAYERS, **SHAPES[arch])


@pytest.fixture(autouse=True)
def triton() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the same is tested on the GPU itself")


def make_model(folder: Path, step_rows: StepRows | None = None) -> tuple[ModelConfig, CausalLM]:
    from aengine.checkpoint.source import resolve_model
    from aengine.config import EngineConfig

    source = resolve_model(EngineConfig.create(str(folder), {}))
    config = read_config(source.hf_config)
    formats = choose_formats("float32", CPU)
    model = build_model(config, formats if step_rows is None else replace(formats, step_rows=step_rows))
    load_weights(model, source, 0, lambda *report: None)
    return config, model


def make_runner(
    folder: Path,
    *,
    like_gpu: bool,
    enforce_eager: bool = True,
    captures_ends: bool = False,
    position_sizes: tuple[int, ...] = (),
    step_rows: StepRows | None = None,
) -> ModelRunner:
    config, model = make_model(folder, step_rows)
    spec = KvCacheSpec(config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU, MAX_SEQS, MAX_LEN)
    spec = replace(spec, max_positions=max(position_sizes, default=0))
    if like_gpu:
        from aengine.runner.attention.triton_attention import GpuKvCache

        cache = GpuKvCache(spec, TritonPrefill())
    else:
        cache = KvCache(spec)
    return ModelRunner(
        model,
        cache,
        vocab_size=config.vocab_size,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_blocks=NUM_BLOCKS,
        kv_groups=cache.layout.groups,
        platform=CpuPlatform(),
        graph_sizes=[1, 2, 4, 8] if like_gpu else None,
        max_graph_tokens=64,
        position_sizes=position_sizes,
        enforce_eager=enforce_eager,
        captures_ends=captures_ends,
        step_rows=step_rows,
    )


def steps(rng: random.Random) -> list[SchedulerOutput]:
    """Prompts whole and in chunks, beside decodes; rows freed and taken anew."""
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)

    def request(row: int, length: int, **sampling) -> NewRequest:
        blocks = int32(free.pop() for _ in range(MAX_LEN // BLOCK_SIZE)) if len(free) >= 6 else int32(range(6))
        ids = int32(rng.randrange(300) for _ in range(length))
        return NewRequest(row, ids, length, 0, blocks, **{"temperature": 0.0, **sampling})

    lengths = [rng.randint(2, 40) for _ in range(3)]
    fields: list[dict] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "top_p": 0.9},
        {"min_tokens": 3, "stop_token_ids": int32(range(0, 300, 2)), "logprobs": 3, "presence_penalty": 0.3},
        {},
    ]
    fields[0]["extras"] = {"logit_bias": [int32([5, 9]).tobytes(), float32([2.0, -1.0]).tobytes()]}
    fields[1] |= {"top_k": 9, "min_p": 0.01}
    new = [
        request(row, length, seed=row, **{"temperature": rng.choice([0.0, 1.0])} | fields[row])
        for row, length in enumerate(lengths)
    ]
    out = [SchedulerOutput(0, new_requests=new, req_idx=int32([0, 1, 2]), num_scheduled_tokens=int32(lengths))]
    out.append(SchedulerOutput(1, req_idx=int32([0, 1, 2]), num_scheduled_tokens=int32([1, 1, 1])))
    late = request(4, 30, logprobs=2)
    out.append(
        SchedulerOutput(2, new_requests=[late], req_idx=int32([0, 4, 2, 1]), num_scheduled_tokens=int32([1, 17, 1, 1]))
    )
    out.append(SchedulerOutput(3, req_idx=int32([1, 4, 0]), num_scheduled_tokens=int32([1, 13, 1])))
    out.append(SchedulerOutput(4, removed=int32([1]), req_idx=int32([4, 0, 2]), num_scheduled_tokens=int32([1, 1, 1])))
    out.append(SchedulerOutput(5, removed=int32([4]), req_idx=int32([0, 2]), num_scheduled_tokens=int32([1, 1])))
    out += [SchedulerOutput(i, req_idx=int32([2]), num_scheduled_tokens=int32([1])) for i in (6, 7, 8)]
    cut = request(5, 7, temperature=1.0, top_p=0.7, top_k=9, seed=3)
    out.append(SchedulerOutput(9, new_requests=[cut], req_idx=int32([2, 5]), num_scheduled_tokens=int32([1, 7])))
    out += [SchedulerOutput(i, req_idx=int32([5, 2]), num_scheduled_tokens=int32([1, 1])) for i in (10, 11)]
    return out


@pytest.mark.parametrize("arch", some(["llama", "mistral", "qwen3", "deepseek_v3"], "qwen3", "deepseek_v3"))
def test_the_same_tokens(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """With prompts, too, a step's end is what a graph holds."""
    folder = write_model(tmp_path, arch)
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True)
    monkeypatch.setattr(like_gpu, "_sample_op_by_op", lambda *args: pytest.fail("sampled op by op"))
    check_tokens(plain, like_gpu, rng)


def test_the_same_tokens_where_ends_alone_are_graphs(tmp_path: Path, rng: random.Random) -> None:
    folder = write_model(tmp_path, "llama")
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True, captures_ends=True)
    check_tokens(plain, like_gpu, rng)


def test_the_same_tokens_with_features_that_no_graph_holds(tmp_path: Path, rng: random.Random) -> None:
    """A step with such a row is sampled op by op, with a prompt or without; the others as ever."""
    folder = write_model(tmp_path, "llama")
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True)
    words = [[first, second] for first in range(300) for second in (7, 9)][:255]
    extras = [
        {"bad_words": [int32(map(len, words)).tobytes(), int32(i for word in words for i in word).tobytes()]},
        {},
        {"allowed_token_ids": [int32(range(0, 300, 7)).tobytes()]},
    ]
    new = [
        NewRequest(i, int32([5 + i] * 4), 4, 0, int32(range(6 * i, 6 * i + 6)), seed=i, extras=extras[i])
        for i in range(3)
    ]
    new[1].logprobs, new[2].frequency_penalty = 2, 0.5
    batches = [dict.fromkeys(range(3), 4), *[dict.fromkeys(range(3), 1)] * 3, {1: 1}, {2: 1}]
    ways = []
    for owner, name in ((like_gpu, "_sample_op_by_op"), (like_gpu.graphs, "sample")):
        sample = getattr(owner, name)
        setattr(owner, name, lambda *a, name=name, of=sample, **k: (ways.append(name), of(*a, **k))[1])
    for step_id, batch in enumerate(batches):
        out = SchedulerOutput(step_id, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()))
        out.new_requests, new = new, []
        plain.execute_model(out)
        expected = plain.sample_tokens(None).get()
        with triton_everywhere():
            like_gpu.execute_model(out)
            answer = like_gpu.sample_tokens(None).get()
        assert answer.token_ids == expected.token_ids and answer.errors == expected.errors == []
        assert (answer.logprobs is None) == (1 not in batch) == (expected.logprobs is None)
        assert 2 not in batch or answer.token_ids[-1] % 7 == 0
    assert ways == ["_sample_op_by_op"] * 4 + ["sample", "_sample_op_by_op"]
    lengths = (
        like_gpu.requests.scalars.num_tokens[:3].tolist(),
        like_gpu.requests.scalars.num_computed_tokens[:3].tolist(),
    )
    assert lengths == ([8, 9, 9], [7, 8, 8]) and like_gpu.requests.num_tokens[:3].tolist() == lengths[0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
def test_the_same_tokens_without_memory_for_graphs(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps run op by op, and no step tries again what failed twice."""
    folder = write_model(tmp_path, "llama")
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True, enforce_eager=False)
    tried: list[object] = []

    def capture(shape: object) -> None:
        tried.append(shape)
        if len(tried) % 3 == 0:
            raise RuntimeError("CUDA error: out of memory\n...")
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        except RuntimeError:
            if len(tried) % 3 == 1:
                raise
            torch.zeros(1).view(2)  # the capture's end fails as well

    graphs = like_gpu.batch_graphs
    assert graphs is not None
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_loaded", set(graphs.missing()))
    check_tokens(plain, like_gpu, rng)
    assert len(tried) == 2 * len(set(tried)) >= 4
    assert caplog.text.count("op by op, more slowly: lower gpu_memory_utilization") == len(set(tried))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
@pytest.mark.parametrize(
    ("arch", "how"),
    [
        ("qwen3", "op by op"),
        ("qwen3", "layers"),
        ("qwen3", "graph"),
        ("deepseek_v3", "layers"),
        ("deepseek_v3", "graph"),
    ],
)
def test_the_same_tokens_with_drafts(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, arch: str, how: str
) -> None:
    """Verified beside decodes, op by op, their layers as one launch, or in the steps that graphs hold; then decodes of
    rows whose lengths the host does not know."""
    folder, sizes = write_model(tmp_path, arch), (4, 8, 16) if how == "graph" else ()
    plain = make_runner(folder, like_gpu=False)
    like_gpu = make_runner(folder, like_gpu=True, enforce_eager=how != "layers", position_sizes=sizes)
    if sizes:
        monkeypatch.setattr(like_gpu, "_sample_op_by_op", lambda *args: pytest.fail("sampled op by op"))
    # Together they are more than 16 tokens, so the step with drafts is the first of its shape, and is not captured.
    prompts = [[rng.randrange(300) for _ in range(rng.randint(6, 20))] for _ in range(3)]

    def answers(runner: ModelRunner, batch: dict[int, int], **more):
        out = SchedulerOutput(0, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()), **more)
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        assert answer.errors == []
        return answer.counts, answer.token_ids

    def begin(runner: ModelRunner) -> list[int]:
        new = [
            NewRequest(i, int32(ids), len(ids), 0, int32(range(6 * i, 6 * i + 6)), temperature=float(i % 2), seed=i)
            for i, ids in enumerate(prompts)
        ]
        return answers(runner, {i: len(ids) for i, ids in enumerate(prompts)}, new_requests=new)[1]

    first = begin(plain)
    alone = [[token_id] for token_id in first]
    for _ in range(7):
        for tokens, token_id in zip(alone, answers(plain, dict.fromkeys(range(3), 1))[1], strict=True):
            tokens.append(token_id)
    with triton_everywhere():
        assert begin(like_gpu) == first
        drafts = [[], alone[1][1:4], [alone[2][1], (alone[2][2] + 1) % plain.vocab_size, 5]]
        columns = DraftColumns(int32(map(len, drafts)), int32(i for ids in drafts for i in ids), int32([0] * 3))
        counts, token_ids = answers(like_gpu, {i: 1 + len(ids) for i, ids in enumerate(drafts)}, drafts=columns)
        assert list(counts) == [1, 4, 2]
        if how == "layers":
            assert like_gpu.batch_graphs is not None and (16, 8, 0) in like_gpu.batch_graphs._loaded
        assert list(token_ids) == alone[0][1:2] + alone[1][1:5] + alone[2][1:3]
        for k in range(2):  # nothing is settled: to the host row 2 is two tokens longer than it is
            _, token_ids = answers(like_gpu, dict.fromkeys(range(3), 1))
            assert list(token_ids) == [alone[0][2 + k], alone[1][5 + k], alone[2][3 + k]]
        settled = {"settled_rows": int32([1, 2]), "num_rejected": int32([0, 2])}
        _, token_ids = answers(like_gpu, {2: 1}, **settled)
        assert list(token_ids) == [alone[2][5]] and list(like_gpu.requests.num_unsettled[:3]) == [0, 0, 0]
        lengths = [len(prompts[i]) + n for i, n in enumerate((4, 7, 6))]
        assert like_gpu.requests.num_tokens[:3].tolist() == lengths
        assert like_gpu.requests.scalars.num_tokens[:3].tolist() == lengths


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
def test_drafts_in_graphs_with_all_that_requests_ask_for(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, min_tokens, biases, cutoffs, log-probabilities and a bitmask, over several steps with drafts of which
    some are wrong, some found on the device."""
    folder = write_model(tmp_path, "qwen3")
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True, position_sizes=(8, 16))
    monkeypatch.setattr(like_gpu, "_sample_op_by_op", lambda *args: pytest.fail("sampled op by op"))
    new = steps(rng)[0].new_requests
    few = [int32([5, 9, 11]).tobytes(), float32([60.0, 60.0, 60.0]).tobytes()]  # which take turns
    new[0].extras, new[0].temperature, new[0].frequency_penalty = {"logit_bias": few}, 0.0, 2.0
    prompts = [list(one.token_ids) for one in new]
    begin = SchedulerOutput(0, new_requests=new, req_idx=int32(range(3)), num_scheduled_tokens=int32(map(len, prompts)))
    size = 4 * ((plain.vocab_size + 31) // 32)
    masks = [rng.randbytes(size) for _ in range(40)]  # of row 2, by how many tokens it has

    def run(runner: ModelRunner, out: SchedulerOutput, masked: list[int]) -> ModelRunnerOutput:
        out.sample_now = not masked
        runner.execute_model(out)
        bits = b"".join(masks[i] for i in masked)
        grammar = GrammarOutput(out.step_id, int32([2] * len(masked)), bits) if masked else None
        answer = runner.sample_tokens(grammar).get()
        assert answer.errors == []
        return answer

    alone = [[token_id] for token_id in run(plain, begin, []).token_ids]
    values: list[float] = []
    for k in range(1, 13):
        out = SchedulerOutput(k, req_idx=int32(range(3)), num_scheduled_tokens=int32([1] * 3))
        answer = run(plain, out, [k])
        for tokens, token_id in zip(alone, answer.token_ids, strict=True):
            tokens.append(token_id)
        values += answer.logprobs.sampled
    got, got_values, settled = [1, 1, 1], [], {}
    with triton_everywhere():
        run(like_gpu, begin, [])
        for step_id in range(1, 5):
            drafts = [alone[i][got[i] : got[i] + rng.randint(0, 2)] for i in range(3)]
            is_found = int32([not drafts[0], 0, 0])
            drafts[1] += [(alone[1][got[1] + len(drafts[1])] + 1) % plain.vocab_size]
            counts = int32([len(drafts[0]) or 1, *map(len, drafts[1:])])
            columns = DraftColumns(counts, int32(i for ids in drafts for i in ids), int32([0] * 3), is_found)
            lengths = [1 + count for count in counts]
            out = SchedulerOutput(
                step_id, req_idx=int32(range(3)), num_scheduled_tokens=int32(lengths), drafts=columns, **settled
            )
            answer = run(like_gpu, out, list(range(got[2], got[2] + lengths[2])))
            wanted = [alone[i][got[i] : got[i] + count] for i, count in enumerate(answer.counts)]
            assert list(answer.token_ids) == sum(wanted, [])
            assert answer.counts[2] == lengths[2] and answer.counts[1] == lengths[1] - 1
            got = [n + count for n, count in zip(got, answer.counts, strict=True)]
            got_values += answer.logprobs.sampled
            rejected = [length - count for length, count in zip(lengths, answer.counts, strict=True)]
            rows = [i for i in range(3) if lengths[i] > 1]
            settled = {"settled_rows": int32(rows), "num_rejected": int32(rejected[i] for i in rows)}
    assert got_values == pytest.approx(values[: len(got_values)], abs=1e-3)


def check_tokens(plain: ModelRunner, like_gpu: ModelRunner, rng: random.Random) -> None:
    kinds, vocab_size = [], plain.vocab_size
    sample = like_gpu.graphs.sample
    like_gpu.graphs.sample = lambda rows, bits, kind: (kinds.append(kind), sample(rows, bits, kind))[1]
    for out in steps(rng):
        grammar = None
        # With a prompt; both rows masked, in the other order; its mask came too late; a plain row; one of a cut batch.
        masked = {2: [0, 3], 5: [1, 0], 6: [], 8: [0], 11: [1]}.get(out.step_id)
        if masked is not None:
            out.sample_now = False
            bits = rng.randbytes(4 * ((vocab_size + 31) // 32) * len(masked))
            grammar = GrammarOutput(out.step_id, int32(masked), bits)
        plain.execute_model(out)
        expected = plain.sample_tokens(grammar).get()
        with triton_everywhere():
            like_gpu.execute_model(out)
            answer = like_gpu.sample_tokens(grammar).get()
        if grammar is not None:
            size = len(grammar.bitmask) // max(1, len(grammar.batch_idx))
            for i, batch_idx in enumerate(grammar.batch_idx):
                token_id = answer.token_ids[batch_idx]
                assert grammar.bitmask[i * size + token_id // 8] >> token_id % 8 & 1
        assert answer.token_ids == expected.token_ids and answer.errors == expected.errors == []
        assert (answer.logprobs is None) == (expected.logprobs is None)
        if expected.logprobs is not None:
            assert list(answer.logprobs.sampled) == pytest.approx(list(expected.logprobs.sampled), abs=1e-3)
    assert set(kinds) == set(Sampling)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it computes with whatever lies in memory
def test_what_is_compiled_ahead_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk that compiles the kernels, here launching them: their arguments are those of a real step."""
    from aengine.kernels.triton import launch
    from aengine.runner.startup.warm_up import compile_kernels

    monkeypatch.setattr(launch, "compiling", lambda num_threads: contextlib.nullcontext())
    runner = make_runner(write_model(tmp_path, "qwen3"), like_gpu=True)
    with triton_everywhere():
        compile_kernels(runner, 16, {2}, 1, has_experts=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
def test_the_last_tokens_of_all_prompts_are_known_on_the_device(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in which every request samples sends their rows and lengths, and no places."""
    folder = write_model(tmp_path, "llama")
    plain, like_gpu = make_runner(folder, like_gpu=False), make_runner(folder, like_gpu=True, enforce_eager=False)
    out = next(step for step in iter(lambda: steps(rng)[0], None) if sum(step.num_scheduled_tokens) <= 64)
    plain.execute_model(out)
    expected = plain.sample_tokens(None).get()
    monkeypatch.setattr("aengine.runner.model_runner.to_device", lambda *args: pytest.fail("more was sent"))
    with triton_everywhere():
        like_gpu.execute_model(out)
        assert like_gpu.sample_tokens(None).get().token_ids == expected.token_ids


def test_graph_sizes() -> None:
    assert graph_sizes(1) == [1] and graph_sizes(3) == [1, 2, 3] and graph_sizes(8) == [1, 2, 4, 8]
    for most in (40, 256, 300, 512, 1024):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, 512)
        assert all(b - a <= max(8, b // 4) for a, b in zip(sizes, sizes[1:]))


def test_rows_are_sent_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from aengine.runner.graphs import cuda_graphs
    from aengine.runner.request_state import SCALAR_WORDS, RequestState
    from aengine.runner.staged_writes import StagedArena

    sent = []
    monkeypatch.setattr(cuda_graphs, "to_device", lambda column, device: (sent.append(1), torch.from_numpy(column))[1])
    requests = RequestState(StagedArena({"scalars": (9, SCALAR_WORDS), "token_ids": (9, 4)}, CPU))
    step = cuda_graphs.DecodeStep(requests, None, None, 8, 2, HostBitmasks(64), CpuPlatform())
    for rows, size, is_new in (
        ([3, 1], 2, True),
        ([3, 1], 2, False),
        ([3, 1], 4, True),
        ([3, 1], 4, False),
        ([3, 1, 5], 4, True),
        ([3, 1], 4, True),
        ([1, 3], 4, True),
        ([], 8, True),
        ([1, 3, 4, 5, 6, 7, 8, 2], 8, True),
        ([1, 3, 4, 5, 6, 7, 8, 2], 8, False),
    ):
        before = len(sent)
        assert step.set_rows(np.array(rows, dtype=np.int64), size).tolist() == rows + [-1] * (size - len(rows))
        assert len(sent) - before == is_new, (rows, size)


def test_rows_that_could_not_be_sent_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from aengine.runner.graphs import cuda_graphs
    from aengine.runner.request_state import SCALAR_WORDS, RequestState
    from aengine.runner.staged_writes import StagedArena

    requests = RequestState(StagedArena({"scalars": (9, SCALAR_WORDS), "token_ids": (9, 4)}, CPU))
    step = cuda_graphs.DecodeStep(requests, None, None, 8, 2, HostBitmasks(64), CpuPlatform())
    step.set_rows(np.array([3, 1]), 4)

    def no_memory(column: object, device: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "to_device", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            step.set_rows(np.array([5, 2]), 4)
    assert step.set_rows(np.array([5, 2]), 4).tolist() == [5, 2, -1, -1]


class Launches(TorchDispatchMode):
    """Within: every launch of a step in order, our kernels' names with what they were given and torch's ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aengine.kernels import triton as triton_kernels
        from aengine.kernels.triton.launch import launch

        super().__init__()
        self.log: list[tuple[str, dict]] = []
        self._launch = launch
        names = [info.name for info in pkgutil.iter_modules(triton_kernels.__path__)]
        # All are imported before the first is changed: they take `launch` from one another.
        for module in [importlib.import_module(f"{triton_kernels.__name__}.{name}") for name in names]:
            if callable(getattr(module, "launch", None)):
                monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, kernel, grid, *args, **options) -> None:
        self.log.append((kernel.fn.__name__, dict(zip(kernel.arg_names, args)) | options))
        with _disable_current_modes():
            self._launch(kernel, grid, *args, **options)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            self.log.append((str(func), {}))
        return result

    def check(self) -> int:
        """Kernels launched with PDL read plans ahead of their wait: something that waits for all before it must come
        between the plan and them. Returns how many it saw."""
        written: dict[int, int] = {}
        checked = 0
        for i, (name, given) in enumerate(self.log):
            if name in ("_plan_decode", "_plan_prompts"):
                written[given["plan"].data_ptr()] = i
            elif name in ("_decode_attention", "_varlen_attention", "_invariant_tiles"):
                between = self.log[written[given["plan"].data_ptr()] + 1 : i]
                assert any("PDL" not in options for _, options in between), (name, [name for name, _ in between])
                checked += 1
        return checked


class FailingLibrary(TritonPrefill):
    """A library that was fine when the engine started."""

    def __init__(self) -> None:
        self.calls = 0

    def is_faster(self, query_lens, seq_lens) -> bool:
        return not self.calls

    def prefill(self, *args) -> None:
        self.calls += 1


@pytest.mark.parametrize("prefill", some([TritonPrefill, FailingLibrary], FailingLibrary))  # which then is the other
def test_what_is_read_before_a_wait_is_written_by_then(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, prefill: type[TritonPrefill]
) -> None:
    """The order of launches of every kind of step; what happens otherwise is a race that only a GPU shows."""
    runner = make_runner(write_model(tmp_path, "llama"), like_gpu=True)
    runner.kv_memory.prefill = backend = prefill()
    num_checked = []
    for out in steps(rng):
        with monkeypatch.context() as patch, triton_everywhere(), Launches(patch) as launches:
            runner.execute_model(out)
            runner.sample_tokens(None)
        num_checked.append(launches.check())
    n = NUM_LAYERS  # prompts; decodes; both; decodes; both; decodes
    assert num_checked[:3] == [n, n, 2 * n] and num_checked[4:] == [n] * 5 + [2 * n] + [n] * 2
    assert getattr(backend, "calls", 1) == 1


class LikeGpu(CpuPlatform):
    """The CPU, started as an accelerator is."""

    name = "Tesla T4"
    is_accelerator = True


def make_setup(folder: Path, **settings) -> RunnerSetup:
    from aengine.checkpoint.source import resolve_model
    from aengine.config import EngineConfig
    from aengine.runner.startup.setup import RunnerSetup

    config = EngineConfig.create(str(write_model(folder, "llama")), {"max_num_seqs": 4, **settings})
    model_config = read_config(resolve_model(config).hf_config)
    model = build_model(model_config, choose_formats("float32", CPU))
    attention = TritonAttention(TritonPrefill())
    return RunnerSetup(config, model_config, model, LikeGpu(), attention, KVFormat(torch.float32), BLOCK_SIZE, 64, 0, 1)


@pytest.mark.parametrize(("in_flight", "leased"), [(2, 500), (300, 0), (2, 10**9)])
def test_every_step_in_flight_has_a_slot_for_its_answer(tmp_path: Path, in_flight: int, leased: int) -> None:
    """Also where the graph of each has to be captured first, which takes a slot of its own. Leased steps beyond
    max_in_flight_steps are not on the device (tests/workers/test_worker_loop.py), and need none."""
    setup = make_setup(tmp_path, max_in_flight_steps=in_flight, max_leased_steps=leased)
    runner = setup.make_runner(NUM_BLOCKS, MAX_LEN)
    assert runner.graphs is not None
    answers = [runner.graphs.step.published(4) for _ in range(2 * in_flight)]
    assert len({answer.words.ctypes.data for answer in answers}) == len(answers)


def test_a_kernel_that_no_tile_makes_fit_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import OutOfResources

    from aengine.errors import ModelLoadError
    from aengine.runner.startup import profile as module

    def compile_kernels(*args: object, **how: object) -> None:
        raise OutOfResources(131_072, 65_536, "shared memory")

    monkeypatch.setattr(module, "compile_kernels", compile_kernels)
    with pytest.raises(ModelLoadError, match=r"shared memory .*Tesla T4 \(131072 of 65536\).*device='cpu'") as caught:
        module.profile(make_setup(tmp_path), lambda *report: None)
    assert "\n" not in str(caught.value)


def test_a_library_without_memory_for_a_step_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    """It needs a copy of all contexts, which the profile does not know; our own kernel needs none."""
    import numpy as np

    from aengine.kernels.paged_attention import Scores
    from aengine.runner.attention.kv_pages import AttentionLayerKV
    from aengine.runner.attention.library import LibraryPrefill
    from aengine.runner.attention.prefill import PrefillMetadata
    from aengine.runner.kv_spec import FullKV, LayerPlace

    calls: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: object) -> torch.Tensor:
        calls.append(len(k))
        if len(k) > 3000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return q

    library = LibraryPrefill("flash-attn-4", lambda: attend, required=True)
    library.join()
    kept = AttentionLayerKV(LayerPlace(FullKV(1, 8), 0, 0), torch.zeros(300, 16, 2, 1, 8))
    table = torch.zeros(1, 1, 300, dtype=torch.int32)
    new = torch.zeros(2048, 1, 8)
    for context, wanted in ((0, True), (2000, False), (0, True), (2000, False), (500, True)):
        lens = np.array([2048]), np.array([2048 + context])
        metadata = PrefillMetadata.of(torch.zeros(1, dtype=torch.int64), table, *lens)
        assert library.is_faster(*lens)
        out = library.prefill(new, new, new, kept, metadata, Scores(1.0))
        assert (out is not None) == wanted
    assert calls == [2048, 4048, 2048, 4048, 2548]
    assert caplog.text.count("no memory for 4048 tokens") == 1 and "lower gpu_memory_utilization" in caplog.text


@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_a_library_gets_the_keys_of_the_window_alone(gen: torch.Generator, window: int) -> None:
    """With a context: it sees as many keys before a chunk as the window has, whatever the length."""
    import numpy as np

    from aengine.kernels.paged_attention import Scores, prefill_attention
    from aengine.runner.attention.kv_pages import AttentionLayerKV
    from aengine.runner.attention.library import LibraryPrefill
    from aengine.runner.attention.prefill import PrefillMetadata
    from aengine.runner.kv_spec import LayerPlace, WindowKV

    seen: list[int] = []

    def attend(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size, max_seqlen_k, **how):
        assert window_size == (window - 1, 0) and how["causal"]
        out = torch.empty_like(q)
        for i in range(len(cu_seqlens_q) - 1):
            own, keys = (slice(int(starts[i]), int(starts[i + 1])) for starts in (cu_seqlens_q, cu_seqlens_k))
            length = keys.stop - keys.start
            cache = torch.stack((k[keys], v[keys]), 1)[None]
            blocks = torch.zeros(1, dtype=torch.int64)
            scores = Scores(softmax_scale, window)
            alone = prefill_attention(q[own], cache[0, own.start - own.stop :], cache, blocks, length, scores)
            out[own] = alone.view(out[own].shape)
            seen.append(length)
        assert max_seqlen_k == max(seen[-2:])
        return out

    library = LibraryPrefill("flash-attn-4", lambda: attend, required=True)
    library.join()
    cache = torch.randn(300, 4, 2, 1, 8, generator=gen)
    table = torch.randperm(300, generator=gen)[:80].view(1, 2, 40).int()
    rows, query_lens, seq_lens = torch.tensor([1, 0]), np.array([30, 7]), np.array([100, 7])
    for row, gone in ((1, max(0, 70 - window + 1) // 4), (0, 0)):
        cache[table[0, row, :gone].long()] = torch.nan  # others' by now
    kept = AttentionLayerKV(LayerPlace(WindowKV(1, 8, window), 0, 0), cache)
    q, k, v = torch.randn(3, 37, 1, 8, generator=gen)
    for i, (row, begin) in enumerate(((1, 70), (0, 0))):
        positions = torch.arange(begin, begin + int(query_lens[i]))
        own = slice(0, 30) if i == 0 else slice(30, 37)
        cache[table[0, row, positions // 4].long(), positions % 4] = torch.stack((k[own], v[own]), 1)
    metadata = PrefillMetadata.of(rows, table, query_lens, seq_lens)
    out = library.prefill(q, k, v, kept, metadata, Scores(0.3, window))
    assert seen == [min(100, 30 + window - 1), 7]
    for i, (row, own) in enumerate(((1, slice(0, 30)), (0, slice(30, 37)))):
        blocks, length = table[0, row, : -(-int(seq_lens[i]) // 4)].long(), int(seq_lens[i])
        kv = torch.stack((k[own], v[own]), 1)
        alone = prefill_attention(q[own], kv, cache.nan_to_num(), blocks, length, Scores(0.3, window))
        torch.testing.assert_close(out[own], alone)
