"""The kernels that are compiled before the first request, against those that steps of all kinds launch."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.ipc.messages import NewRequest, SchedulerOutput, float32, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.prefill import TritonPrefill
from aengine.runner.model_config import ModelConfig
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models import build_model, read_config
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.weights.formats import WeightFormats
from aengine.runner.weights.plain import PlainFormat
from aengine.runner.weights.sources.loader import load_weights

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too

CPU = torch.device("cpu")
HALF = WeightFormats(torch.float16, torch.float16, PlainFormat(torch.float16))  # as on a GPU
BLOCK_SIZE, MAX_LEN = 16, 320
PARAMETERS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "extras": {"logit_bias": [int32([3]).tobytes(), float32([1.0]).tobytes()]},
    "min_tokens": 9,
    "stop_token_ids": int32([4]),
    "logprobs": 5,
}
RUN = ("_prepare_inputs", "_prepare_decode", "_write_kernel")
"""What must run for the next op to find sensible indices; the rest is only recorded."""


@contextlib.contextmanager
def only_compiling(num_threads: int) -> Iterator[None]:
    """In place of `compiling`, where `launch` is a `Recorder`."""
    from aengine.kernels.triton import launch

    launch._compile_only = True
    try:
        yield
    finally:
        launch._compile_only = False


class Recorder:
    """In place of `launch`: which kernels would have to be compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aengine.kernels import triton as triton_kernels
        from aengine.kernels.triton.launch import launch

        self.compiled: set[tuple] = set()
        self.runs = True
        self._launch = launch
        names = [info.name for info in pkgutil.iter_modules(triton_kernels.__path__)]
        # All are imported before the first is changed: they take `launch` from one another.
        for module in [importlib.import_module(f"{triton_kernels.__name__}.{name}") for name in names]:
            if callable(getattr(module, "launch", None)):
                monkeypatch.setattr(module, "launch", self)

    def __call__(self, kernel: Any, grid: tuple, *args: Any, **options: Any) -> None:
        self.compiled.add((kernel.fn.__name__, *self._key(kernel, dict(zip(kernel.arg_names, args)) | options)))
        if self.runs and kernel.fn.__name__ in RUN:
            self._launch(kernel, grid, *args, **options)

    def _key(self, kernel: Any, values: dict[str, Any]) -> Iterator[tuple]:
        """As Triton's cache of compiled kernels: constants, types, what is aligned or 1."""
        from triton.runtime.jit import JITFunction
        from triton.tools.tensor_descriptor import TensorDescriptor

        for param in JITFunction(kernel.fn, **kernel.kwargs).params:
            value = values.pop(param.name)
            if isinstance(value, torch.Tensor):
                is_any = param.do_not_specialize or param.do_not_specialize_on_alignment
                is_aligned = value.data_ptr() % 16 == 0 and not is_any
                yield param.name, value.dtype, is_aligned
            elif isinstance(value, TensorDescriptor):
                yield param.name, value.base.dtype, tuple(value.block_shape)
            elif param.is_constexpr or value is None or (value == 1 and not param.do_not_specialize):
                yield param.name, value
            else:
                yield param.name, type(value), not param.do_not_specialize and value % 16 == 0
        yield tuple(values.items())


def make_runner(folder: Path, max_num_seqs: int) -> tuple[ModelRunner, ModelConfig]:
    from aengine.runner.attention.triton_attention import GpuKvCache

    source = resolve_model(EngineConfig.create(str(folder), {}))
    config = read_config(source.hf_config)
    model = build_model(config, HALF)
    load_weights(model, source, 0, lambda *report: None)
    num_blocks = MAX_LEN // BLOCK_SIZE
    spec = KvCacheSpec(config, num_blocks, BLOCK_SIZE, HALF.dtype, CPU, max_num_seqs, MAX_LEN)
    cache = GpuKvCache(spec, TritonPrefill())
    runner = ModelRunner(
        model,
        cache,
        vocab_size=config.vocab_size,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_LEN,
        num_blocks=num_blocks,
        kv_groups=cache.layout.groups,
        platform=CpuPlatform(),
        graph_sizes=[size for size in (1, 2, 4, 8, 16, 40, 128) if size < max_num_seqs] + [max_num_seqs],
        enforce_eager=True,
    )
    return runner, config


def step(rng: random.Random, num_groups: int, num_decodes: int, prompts: list[int]) -> Iterator[SchedulerOutput]:
    """Requests prefilled, then one step of them all with ``prompts``, then one more, then they go. All write the same
    blocks. Some have all sampling parameters."""
    count = MAX_LEN // BLOCK_SIZE
    blocks, spans = int32(range(count)) * num_groups, int32([0, count] * num_groups)

    def new(row: int, length: int) -> NewRequest:
        ids = int32(rng.randrange(300) for _ in range(length))
        params = rng.choice([{"temperature": 0.0}, {"temperature": 1.0}, PARAMETERS])
        return NewRequest(row, ids, length, 0, blocks, block_spans=spans, **params)

    rows = list(range(num_decodes + len(prompts)))
    early = [new(row, 2) for row in rows[:num_decodes]]
    counts = int32([2] * num_decodes)
    yield SchedulerOutput(0, new_requests=early, req_idx=int32(rows[:num_decodes]), num_scheduled_tokens=counts)
    late = [new(row, length) for row, length in zip(rows[num_decodes:], prompts, strict=True)]
    counts = int32([1] * num_decodes + prompts)
    yield SchedulerOutput(1, new_requests=late, req_idx=int32(rows), num_scheduled_tokens=counts)
    yield SchedulerOutput(2, req_idx=int32(rows), num_scheduled_tokens=int32([1] * len(rows)))
    yield SchedulerOutput(3, removed=int32(rows))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}
SHAPE = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SHAPE | {"head_dim": 32},
    "phi3": SHAPE | {"num_attention_heads": 16, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "gemma2": SHAPE | {"num_attention_heads": 16, "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 40},
    # Other tiles from 5, 513 and 1025 tokens on; and from 5, 33, 65 and 193.
    "qwen3_moe": SHAPE | {"head_dim": 32, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": SHAPE | {"num_attention_heads": 16, "num_local_experts": 6, "num_experts_per_tok": 3},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it computes with whatever lies in memory
@pytest.mark.parametrize(
    ("arch", "max_num_seqs"),
    some(
        [
            ("qwen3", 1),
            ("qwen3", 3),
            ("qwen3", 40),
            ("qwen3", 90),
            ("phi3", 3),
            ("gemma2", 3),
            ("qwen3_moe", 4),
            ("mixtral", 4),
        ],
        *(("qwen3", 90), ("gemma2", 3), ("qwen3_moe", 4)),
    ),
)
def test_serving_compiles_nothing(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, arch: str, max_num_seqs: int
) -> None:
    """With two key-value heads, so that 90 sequences are of two sizes, and with tiles of short ones from 261
    tokens on."""
    pytest.importorskip("triton")
    from tiny import write_tiny_model

    from aengine.kernels.triton import launch, varlen_attention
    from aengine.runner.startup.layer_kinds import one_layer_of_each_kind
    from aengine.runner.startup.warm_up import compile_kernels

    monkeypatch.setattr(launch, "compiling", only_compiling)
    monkeypatch.setattr(varlen_attention, "MOST_PADDED", 260)
    runner, config = make_runner(write_tiny_model(tmp_path, arch, **MODELS[arch]), max_num_seqs)
    recorder = Recorder(monkeypatch)
    with triton_everywhere():
        recorder.runs = False
        with one_layer_of_each_kind(runner.model, runner.kv_memory.layout.layers):
            assert len(runner.model.layers) == (2 if arch == "gemma2" else 1)
            compile_kernels(runner, 1200, {config.num_kv_heads}, 1, has_experts=config.num_experts > 0)
        ahead, recorder.compiled, recorder.runs = recorder.compiled, set(), True
        for i in range(14 if arch == "qwen3" else 6):
            num_prompts = rng.randint(0, min(4, max_num_seqs))
            num_decodes = min(rng.choice([0, 1, 7, 16, 17, 32, 33, 89]), max_num_seqs - num_prompts)
            if i < 2:  # what every walk must have: a few decodes, and a prompt alone
                num_prompts, num_decodes = i, min(7, max_num_seqs) * (1 - i)
            prompts = [rng.choice([2, 7, 20, 33, 64, 90, 250, 270, 300]) for _ in range(num_prompts)]
            if i == 4:
                prompts, num_decodes = [70], 0
            if 2 <= i < 4:
                prompts = [280] * min(i, max_num_seqs)
                num_decodes = min(num_decodes, max_num_seqs - len(prompts))
            if num_decodes + len(prompts):
                for out in step(rng, len(runner.tables.groups), num_decodes, prompts):
                    runner.execute_model(out)
                    runner.sample_tokens(None)
    assert {key[0] for key in recorder.compiled} >= {"_varlen_attention", "_decode_attention", "skinny"} or (
        max_num_seqs == 1
    )
    missed = recorder.compiled - ahead
    assert not missed, sorted(missed, key=str)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it computes with whatever lies in memory
@pytest.mark.parametrize("kind", ["Model", "ForSequenceClassification"])
def test_an_encoder_compiles_nothing(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("triton")
    from test_encoders import write

    from aengine.checkpoint.safetensors_files import stored_names
    from aengine.kernels.triton import launch
    from aengine.runner.models.encoders import build_encoder, read_encoder_config
    from aengine.runner.pooling.encoder_runner import EncoderRunner
    from aengine.runner.pooling.vectors import VectorLayers
    from aengine.runner.startup.encoder import _compile_kernels, _run, adapt_names

    monkeypatch.setattr(launch, "compiling", only_compiling)
    write(tmp_path, "bert", kind, hidden_size=256, intermediate_size=512)
    source = resolve_model(EngineConfig.create(str(tmp_path), {}))
    model = build_encoder(read_encoder_config(source.hf_config), HALF)
    adapt_names(model, set(stored_names(tmp_path)))
    load_weights(model, source, 0, lambda *report: None)
    runner = EncoderRunner(model, VectorLayers("mean") if kind == "Model" else None, CpuPlatform())
    recorder = Recorder(monkeypatch)
    with triton_everywhere():
        _compile_kernels(runner, 1200)
        ahead, recorder.compiled = recorder.compiled, set()
        for lengths in (
            [1],
            [9, 3],
            [2] * 9,
            [17],
            [40, 8],
            *([rng.randint(1, 60)] * rng.randint(1, 9) for _ in "abc"),
        ):
            _run(runner, lengths)
    assert {key[0] for key in ahead} >= {"skinny", "tiled", "_gemv"}
    assert not recorder.compiled - ahead, sorted(recorder.compiled - ahead, key=str)


def test_sizes_between_which_tilings_change() -> None:
    """A tiling holds up to a number of rows that the walk goes through: else a kernel of its own would be missed."""
    from aengine.kernels.linear_tilings import measured_tilings
    from aengine.runner.startup.warm_up import NUM_TOKENS

    assert {rows for _, rows, _ in measured_tilings()} <= set(NUM_TOKENS)
